"""A network that is looked at and comes back bit-identical."""

import contextlib
import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import nn

__all__ = ["neutral", "preserved"]

_COMPILED = "_orig_mod"  # what a compiled module calls the one it was made from


@contextlib.contextmanager
def neutral(device: torch.device) -> Iterator[None]:
    """Outside ``inference_mode`` and autocast, whatever the caller is in."""
    with torch.inference_mode(False), torch.autocast(device.type, enabled=False):
        yield


@contextlib.contextmanager
def preserved(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluation mode with gradients on; afterwards everything is as it was.

    Modes, buffers, ``.grad`` and the state of every global random generator are restored, also when
    the body raises. Inside, autocast is off (rows do not depend on the caller's precision context) and
    so are hooks on parameters: an optimiser that steps inside ``backward`` would train on what is only
    looked at, and a mask would be seen by some approximations and not by others. Compiled parts run
    as they were written: what a first pass compiles is not what later ones run.
    """
    modes = [(module, module.training) for module in model.modules()]
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  # others draw from it
    devices = [device] if device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices=devices),
        neutral(device),
        torch.enable_grad(),
        _uncompiled(model),
        _buffers_restored(model),
        _without_hooks([parameter for parameter, _ in grads]),
    ):
        try:
            model.eval()
            for parameter, _ in grads:
                parameter.grad = None
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for parameter, grad in grads:
                parameter.grad = grad
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


@contextlib.contextmanager
def _buffers_restored(model: nn.Module) -> Iterator[None]:
    """Afterwards every module has the buffers it had, the same tensors with the same contents."""
    registered = [(module, dict(module._buffers)) for module in model.modules()]
    contents = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for module, buffers in registered:  # a forward pass may assign or register others
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for buffer, before in contents:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


@contextlib.contextmanager
def _uncompiled(model: nn.Module) -> Iterator[None]:
    """Parts that ``torch.compile`` wraps, or that compile themselves, run as plain modules inside."""
    modules = list(model.modules())
    wrapped = [(m, m.__dict__.get("forward")) for m in modules if _COMPILED in m._modules]
    in_place = [(m, m._compiled_call_impl) for m in modules if m._compiled_call_impl is not None]
    try:
        for module, _ in wrapped:
            module.__dict__["forward"] = module.get_submodule(_COMPILED).__call__
        for module, _ in in_place:
            module._compiled_call_impl = None
        yield
    finally:
        for module, forward in wrapped:
            module.__dict__.pop("forward")
            if forward is not None:
                module.__dict__["forward"] = forward
        for module, compiled in in_place:
            module._compiled_call_impl = compiled


@contextlib.contextmanager
def _without_hooks(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """No hook that was registered on a parameter runs inside."""
    hooked = [
        (parameter, name, hooks)
        for parameter in parameters
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
        if (hooks := getattr(parameter, name))
    ]
    try:
        for parameter, name, _ in hooked:
            setattr(parameter, name, OrderedDict())  # None would leave the second kind in place
        yield
    finally:
        for parameter, name, hooks in hooked:
            setattr(parameter, name, hooks)
