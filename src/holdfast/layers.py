r"""Sums of squared per-example gradients of single layers, from what went in and what came back.

A layer sees inputs :math:`a` and, in the backward pass, gradients :math:`g` of its outputs. For a linear
layer called once on one vector per example, the row of example i is :math:`g_i a_i^\top`, so that

.. math:: \sum_i w_i \circ w_i = (G \circ G)^\top (A \circ A)

costs one product and no row is ever written out. With several positions per example (sequences, images)
:math:`\sum_t g_{it} a_{it}^\top` is formed first, a few examples at a time.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from holdfast.products import add_product_

__all__ = ["RULES", "Rule"]

_CHUNK = 2**20  # entries of written-out products at a time: small enough for a cache
_PATCHES = 2**23  # entries of the patches of images at a time: enough to keep a product busy

Into = Mapping[str, Tensor]  # the held parameters of a layer -> where their squares are added
Pair = tuple[Tensor, Tensor]  # inputs (b, groups, T, in), gradients of outputs (b, groups, T, out)


@dataclass(frozen=True)
class Rule:
    """How one kind of layer is read.

    Attributes:
        add: ``add(layer, inputs, gradients of outputs, into)``.
        fits: Whether the layer's settings and these shapes are served; (layer, inputs, gradients).
        pairs: ``pairs(layer, inputs, gradients of outputs)`` for layers that multiply by a matrix:
            what it is multiplied with at every position, and what comes back.
    """

    add: Callable[[Any, Tensor, Tensor, Into], None]
    fits: Callable[[Any, Tensor, Tensor], bool]
    pairs: Callable[[Any, Tensor, Tensor], Iterator[Pair]] | None = None


def _add_products(into: Tensor, left: Tensor, right: Tensor) -> None:
    """Add Σ_i (left_i right_i)∘², of stacks of matrices, to ``into``."""
    step = max(1, _CHUNK // into.numel())
    for first in range(0, len(left), step):
        product = torch.bmm(left[first : first + step], right[first : first + step])
        if len(product) == 1:
            into.addcmul_(product[0], product[0])
        else:
            into.add_(product.square_().sum(0))


def _linear(layer: nn.Linear, x: Tensor, g: Tensor, into: Into) -> None:
    if x.dim() == 2:
        squares = g.square()
        if "weight" in into:
            add_product_(into["weight"], squares.T, x.square())
        if "bias" in into:
            into["bias"].add_(squares.sum(0))
        return
    x, g = x.flatten(1, -2), g.flatten(1, -2)
    if "weight" in into:
        _add_products(into["weight"], g.transpose(1, 2), x)
    if "bias" in into:
        into["bias"].add_(g.sum(1).square().sum(0))


def _linear_pairs(layer: nn.Linear, x: Tensor, g: Tensor) -> Iterator[Pair]:
    yield x.reshape(len(x), 1, -1, x.shape[-1]), g.reshape(len(g), 1, -1, g.shape[-1])


def _convolution(layer: nn.Conv1d | nn.Conv2d, x: Tensor, g: Tensor, into: Into) -> None:
    if "bias" in into:
        into["bias"].add_(g.flatten(2).sum(2).square().sum(0))
    if "weight" not in into:
        return
    weight = into["weight"].view(layer.groups, g.shape[1] // layer.groups, -1)
    for columns, gradients in _patches(layer, x, g, _CHUNK, weight.numel()):
        left = gradients.transpose(2, 3)
        if layer.groups == 1:
            _add_products(weight[0], left[:, 0], columns[:, 0])
        else:
            weight.add_((left @ columns).square_().sum(0))


def _convolution_pairs(layer: nn.Conv1d | nn.Conv2d, x: Tensor, g: Tensor) -> Iterator[Pair]:
    return _patches(layer, x, g, _PATCHES, 1)


def _patches(
    layer: nn.Conv1d | nn.Conv2d, x: Tensor, g: Tensor, room: int, least: int
) -> Iterator[Pair]:
    """What a convolution multiplies with at every place, a few examples at a time.

    Args:
        layer: The convolution.
        x: Its inputs.
        g: The gradients of its outputs.
        room: Entries at a time.
        least: Entries that an example takes anyway.
    """
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padding, kernel = _padding(layer), layer.kernel_size
    if any(padding):
        x = functional.pad(x, padding, mode=mode)
    stride, dilation = _each(layer, layer.stride), _each(layer, layer.dilation)
    if isinstance(layer, nn.Conv1d):  # an image of height one
        x, g = x.unsqueeze(2), g.unsqueeze(2)
        kernel, stride, dilation = (1, *kernel), (1, *stride), (1, *dilation)
    groups, places = layer.groups, g.shape[2] * g.shape[3]
    inputs = layer.weight[0].numel()
    step = max(1, room // max(least, groups * inputs * places))
    for first in range(0, len(x), step):
        part = slice(first, first + step)
        columns = functional.unfold(x[part], kernel, dilation, 0, stride)
        right = columns.view(-1, groups, inputs, places).transpose(2, 3)
        left = g[part].reshape(-1, groups, g.shape[1] // groups, places)
        yield right, left.transpose(2, 3)


def _each(layer: nn.Conv1d | nn.Conv2d, value: Any) -> tuple[int, ...]:
    """A setting in every direction; one number stands for all."""
    return tuple(value) if isinstance(value, tuple | list) else (value,) * (layer.weight.dim() - 2)


def _padding(layer: nn.Conv1d | nn.Conv2d) -> list[int]:
    """Before and after, the last direction first. It may have been changed since the layer was made."""
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        return list(layer._reversed_padding_repeated_twice)
    return [n for n in reversed(_each(layer, layer.padding)) for _ in range(2)]


def _embedding(layer: nn.Embedding, ids: Tensor, g: Tensor, into: Into) -> None:
    if "weight" not in into:
        return
    count, width = layer.num_embeddings, layer.embedding_dim
    example = torch.arange(len(ids), device=ids.device).repeat_interleave(ids[0].numel())
    ids, g = ids.reshape(-1), g.reshape(-1, width)
    if layer.padding_idx is not None:
        used = ids != layer.padding_idx
        ids, g, example = ids[used], g[used], example[used]
    # a word that occurs twice in one example has one gradient there: the sum
    pairs, where = torch.unique(example * count + ids, return_inverse=True)
    sums = g.new_zeros(len(pairs), width).index_add_(0, where, g)
    into["weight"].index_add_(0, pairs % count, sums.square_())


def _add_affine(normalised: Tensor, g: Tensor, into: Into, over: list[int]) -> None:
    """Layers y = w∘x̂ + b; ``over`` are the dimensions along which an example's entries share w."""
    if "weight" in into:
        product = normalised * g
        row = product.sum(over) if over else product
        into["weight"].add_(row.square().sum(0))
    if "bias" in into:
        row = g.sum(over) if over else g
        into["bias"].add_(row.square().sum(0))


def _layer_norm(layer: nn.LayerNorm, x: Tensor, g: Tensor, into: Into) -> None:
    normalised = functional.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    _add_affine(normalised, g, into, list(range(1, x.dim() - len(layer.normalized_shape))))


def _rms_norm(layer: nn.RMSNorm, x: Tensor, g: Tensor, into: Into) -> None:
    normalised = functional.rms_norm(x, layer.normalized_shape, eps=layer.eps)
    _add_affine(normalised, g, into, list(range(1, x.dim() - len(layer.normalized_shape))))


def _group_norm(layer: nn.GroupNorm, x: Tensor, g: Tensor, into: Into) -> None:
    normalised = functional.group_norm(x, layer.num_groups, eps=layer.eps)
    _add_affine(normalised, g, into, list(range(2, x.dim())))


def _batch_norm(layer: Any, x: Tensor, g: Tensor, into: Into) -> None:
    mean, var = layer.running_mean.to(x.dtype), layer.running_var.to(x.dtype)
    normalised = functional.batch_norm(x, mean, var, eps=layer.eps)
    _add_affine(normalised, g, into, list(range(2, x.dim())))


def _last_dimensions(layer: nn.LayerNorm | nn.RMSNorm, x: Tensor, g: Tensor) -> bool:
    return x.dim() > len(layer.normalized_shape)


def _matrix_like(layer: nn.Linear, x: Tensor, g: Tensor) -> bool:
    return x.dim() >= 2


def _image_like(layer: nn.Conv1d | nn.Conv2d, x: Tensor, g: Tensor) -> bool:
    if x.dim() != layer.weight.dim():  # without a batch dimension there is one less
        return False
    padding = _padding(layer)[::-1]
    sides = zip(
        x.shape[2:], padding[::2], padding[1::2], layer.weight.shape[2:],
        _each(layer, layer.stride), _each(layer, layer.dilation), strict=True,
    )  # fmt: skip
    places = [(n + a + b - d * (k - 1) - 1) // s + 1 for n, a, b, k, s, d in sides]
    return list(g.shape[2:]) == places


def _plain_words(layer: nn.Embedding, x: Tensor, g: Tensor) -> bool:
    return layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse


def _fixed_statistics(layer: Any, x: Tensor, g: Tensor) -> bool:
    return not layer.training and layer.running_mean is not None


def _several_dimensions(layer: nn.GroupNorm, x: Tensor, g: Tensor) -> bool:
    return x.dim() >= 2


_CONVOLUTION = Rule(_convolution, _image_like, _convolution_pairs)
_BATCH_NORM = Rule(_batch_norm, _fixed_statistics)

RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: Rule(_linear, _matrix_like, _linear_pairs),
    nn.Conv1d: _CONVOLUTION,
    nn.Conv2d: _CONVOLUTION,
    nn.Embedding: Rule(_embedding, _plain_words),
    nn.LayerNorm: Rule(_layer_norm, _last_dimensions),
    nn.RMSNorm: Rule(_rms_norm, _last_dimensions),
    nn.GroupNorm: Rule(_group_norm, _several_dimensions),
    nn.BatchNorm1d: _BATCH_NORM,
    nn.BatchNorm2d: _BATCH_NORM,
    nn.BatchNorm3d: _BATCH_NORM,
}
