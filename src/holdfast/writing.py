"""Rows written out from what their layers tell: one pass for many examples, and one write per entry."""

from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.structure import LayerShape

__all__ = ["RowWriter"]


class RowWriter:
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
        largest = inputs.abs().amax() * gradients.abs().amax() * positions
        self.bounded = self.bounded and bool(largest.isfinite())
        left, right = (
            gradients.transpose(2, 3),
            inputs[..., :count],
        )  # (…, outputs, T) (…, T, inputs)
        if positions == 1:
            torch.mul(left, right, out=weight)
        else:
            weight.copy_(left @ right)
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
