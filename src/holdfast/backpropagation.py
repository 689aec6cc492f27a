r"""Gradients of the mean cross-entropy, written into ``.grad`` that is already there.

A step of a small perceptron is nearly all overhead of the autograd engine: written out, its gradient takes
0.15 ms instead of 0.37. Everything else goes through autograd.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from holdfast.products import linear, multiply_

__all__ = ["cross_entropy_gradient", "outputs"]

Gradient = Callable[[Tensor, Tensor], None]  # (inputs, labels): overwrites every .grad


def cross_entropy_gradient(model: nn.Module) -> Gradient:
    """A function that sets every ``.grad`` of the model to the gradient of a batch's mean cross-entropy.

    Args:
        model: Its trainable parameters must have a ``.grad``; they may change between calls, but their
            storage and that of the gradients must not.
    """
    layers = _linear_layers(model)
    return _autograd(model) if layers is None else _written_out(layers)


def _autograd(model: nn.Module) -> Gradient:
    """Any model."""
    gradients = [p.grad for p in model.parameters() if p.requires_grad and p.grad is not None]

    def gradient(x: Tensor, y: Tensor) -> None:
        torch._foreach_zero_(gradients)
        torch.autograd.backward(functional.cross_entropy(model(x), y))

    return gradient


def _linear_layers(model: nn.Module) -> list[nn.Linear] | None:
    """The linear layers of a plain perceptron (Linear, ReLU, Linear, …), or None for anything else."""
    if type(model) is not nn.Sequential or len(model) % 2 == 0:
        return None
    kinds = [nn.Linear, nn.ReLU] * len(model)
    if any(type(layer) is not kind for layer, kind in zip(model, kinds, strict=False)):
        return None
    modules = list(model.modules())
    hooked = any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in modules)
    parameters = list(model.parameters())  # a layer or tensor used twice would be counted once
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    count = sum(1 if layer.bias is None else 2 for layer in layers)
    ready = all(p.requires_grad and p.grad is not None for p in parameters)
    return layers if ready and not hooked and len(parameters) == count else None


def _written_out(layers: list[nn.Linear]) -> Gradient:
    r"""Backpropagation by hand, from :math:`(\mathrm{softmax}(z) - y)/B` for outputs z of B examples."""
    weights = [layer.weight.detach() for layer in layers]
    biases = [None if layer.bias is None else layer.bias.detach() for layer in layers]
    weight_grads = [_grad(layer.weight) for layer in layers]
    bias_grads = [None if layer.bias is None else _grad(layer.bias) for layer in layers]
    last = len(layers) - 1
    minus_one = -weights[0].new_ones(())

    @torch.no_grad()
    def gradient(x: Tensor, y: Tensor) -> None:
        inputs, h = [x], x
        for i in range(last):
            h = _linear(h, weights[i], biases[i]).relu_()
            inputs.append(h)
        delta = functional.linear(h, weights[last], biases[last]).softmax(1)
        delta.scatter_add_(1, y.unsqueeze(1), minus_one.expand(len(y), 1))
        delta.div_(len(y))
        for i in range(last, -1, -1):
            multiply_(weight_grads[i], delta.t(), inputs[i])
            bias_grad = bias_grads[i]
            if bias_grad is not None:
                torch.sum(delta, 0, out=bias_grad)
            if i:
                # ReLU: 0 at and below 0
                delta = linear(delta, weights[i].t()).mul_(inputs[i].sign())

    return gradient


def outputs(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The function from inputs to outputs, which keeps no graph."""
    layers = _linear_layers(model)
    if layers is None:
        return torch.no_grad()(model)
    weights = [layer.weight.detach() for layer in layers]
    biases = [None if layer.bias is None else layer.bias.detach() for layer in layers]

    @torch.no_grad()
    def perceptron(x: Tensor) -> Tensor:
        for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
            x = _linear(x, weight, bias).relu_()
        return _linear(x, weights[-1], biases[-1])

    return perceptron


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear(x, weight) if bias is None else functional.linear(x, weight, bias)


def _grad(parameter: Tensor) -> Tensor:
    """The gradient, which is there: see :func:`_linear_layers`."""
    assert parameter.grad is not None
    return parameter.grad
