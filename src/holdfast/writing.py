"""Rows written out from what their layers tell: one pass for many examples, and one write per entry."""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from holdfast.batches import Examples
from holdfast.finite import check_rows
from holdfast.structure import LayerShape, layer_shapes

if TYPE_CHECKING:
    from holdfast.gradients import Gradients

__all__ = ["Writing"]

_ENTRIES = 2**20  # of products that are not written where they are wanted


class Writing:
    """Rows of a batch, written to a matrix; by the general road where a parameter belongs to no layer.

    Args:
        gradients: The network, and the general road to its rows.
        model: The network itself.
    """

    def __init__(self, gradients: "Gradients", model: nn.Module) -> None:
        self._gradients = weakref.proxy(gradients)
        layers = layer_shapes(model, gradients.space)
        whole = sum(layer.size for layer in layers) == gradients.space.dim
        self._layers = layers if whole else ()

    def write_(self, out: Tensor, examples: Examples) -> None:
        """Write the rows of a cuttable batch to a matrix (b, m)."""
        if not self._layers:
            for _ in self._gradients.rows(examples, out=out):
                pass
            return
        writer = _RowWriter(out, self._layers)
        nothing = out.new_zeros(()).expand(out.shape[1])  # no parameter is left for it
        self._gradients.squares.add_(nothing, examples, self._layers, writer, ordered=True)
        if not writer.bounded:
            check_rows(out, examples.index)


class _RowWriter:
    """A reader of layers that writes the rows of a batch where they are wanted.

    Args:
        out: A matrix (b, m); every entry belongs to one of ``layers``.
        layers: All layers.
    """

    def __init__(self, out: Tensor, layers: Sequence[LayerShape]) -> None:
        self._out, self._layers = out, layers
        self._next = [0] * len(layers)  # the rows are told in order, layer by layer
        self.bounded = True  # whether no entry can have overflowed

    def pairs(self, layer: int, inputs: Tensor, gradients: Tensor) -> None:
        weight, bias = self._place(layer, len(inputs))
        count, positions = self._layers[layer].inputs, inputs.shape[2]
        if inputs.numel() and gradients.numel():
            largest = inputs.abs().amax() * gradients.abs().amax() * positions
            self.bounded = self.bounded and bool(largest.isfinite())
        left, right = (
            gradients.transpose(2, 3),
            inputs[..., :count],
        )  # (…, outputs, T) (…, T, inputs)
        if positions == 1:
            torch.mul(left, right, out=weight)
        else:
            step = max(1, _ENTRIES // max(1, weight[0].numel()))
            for first in range(0, len(weight), step):
                some = slice(first, first + step)
                weight[some] = left[some] @ right[some]
        if bias is not None:
            bias.copy_((left @ inputs[..., count:]).squeeze(3))

    def rows(self, layer: int, rows: Tensor) -> None:
        weight, bias = self._place(layer, len(rows))
        count = self._layers[layer].inputs
        weight.copy_(rows[..., :count])
        if bias is not None:
            bias.copy_(rows[..., count])

    def _place(self, layer: int, count: int) -> tuple[Tensor, Tensor | None]:
        """Where the next rows of a layer go: (b, groups, outputs, inputs) and (b, groups, outputs)."""
        shape, first = self._layers[layer], self._next[layer]
        self._next[layer] += count
        out, outputs = self._out[first : first + count], shape.groups * shape.outputs
        weight = out[:, shape.weight : shape.weight + outputs * shape.inputs]
        weight = weight.unflatten(1, (shape.groups, shape.outputs, shape.inputs))
        if shape.bias is None:
            return weight, None
        bias = out[:, shape.bias : shape.bias + outputs]
        return weight, bias.unflatten(1, (shape.groups, shape.outputs))
