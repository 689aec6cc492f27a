"""What Kronecker products read of layers: sums of outer products, then second moments in their bases."""

from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.approximation.base import Setting
from holdfast.approximation.gram import Gram, WholeGram, gram
from holdfast.matrices.kronecker_block import KroneckerBlock
from holdfast.matrices.kronecker_sums import bases, cleared, nearest
from holdfast.matrices.thin_block import ThinBlock

__all__ = ["Factors", "Moments"]

_CHUNK = 2**20  # entries of written-out products at a time


class Factors:
    r"""Sums of outer products of inputs and of gradients; and of rows, where layers cannot be read."""

    def __init__(self, setting: Setting, rank: int | None) -> None:
        self.setting, self.layers, self.rank = setting, setting.layers, rank
        both = [self._empty(layer) for layer in range(len(self.layers))]
        self.inputs, self.outputs = [A for A, _ in both], [G for _, G in both]
        # inputs that had a gradient; the gradients of a row's positions add up
        self.positions = [0] * len(self.layers)
        self.right: dict[int, Gram] = {}  # Σ Mᵀ M of written-out rows
        self.left: dict[int, Gram] = {}  # Σ M Mᵀ

    def _empty(self, layer: int) -> tuple[Gram, Gram]:
        """Sums for inputs and outputs."""
        shape = self.layers[layer]
        A, G = (
            gram(self.setting, shape.groups, side, self.rank)
            for side in (shape.columns, shape.outputs)
        )
        return A, G

    def pairs(self, layer: int, inputs: Tensor, gradients: Tensor) -> None:
        # no row depends on what gets no gradient, such as padding: it has no part in the mean of inputs
        live = gradients.ne(0).any(3).any(1)  # (b, T)
        count = int(live.sum())
        if count < live.numel():
            inputs = inputs * live[:, None, :, None]
        self.inputs[layer].add(inputs)
        self.outputs[layer].add(gradients)
        self.positions[layer] += count

    def rows(self, layer: int, rows: Tensor) -> None:
        if layer not in self.left:
            self.right[layer], self.left[layer] = self._empty(layer)
        self.left[layer].add(rows.mT)
        self.right[layer].add(rows)

    def block(self, layer: int) -> KroneckerBlock:
        """The estimate of the sum over all rows, A being a mean."""
        found = []
        if self.positions[layer] or layer not in self.left:
            A, G = self.inputs[layer], self.outputs[layer]
            count = torch.full_like(A.trace(), max(1, self.positions[layer]))
            found.append(self._product(layer, A, G, count))
        if layer in self.left:
            trace = self.right[layer].trace()
            trace = trace.clamp(min=torch.finfo(trace.dtype).tiny)
            found.append(self._product(layer, self.right[layer], self.left[layer], trace))
        return found[0] if len(found) == 1 else nearest(found[0], found[1], self.rank)

    def _product(self, layer: int, A: Gram, G: Gram, over: Tensor) -> KroneckerBlock:
        """G ⊗ A / over, of every group."""
        shape = self.layers[layer]
        place = shape.weight, shape.bias
        if self.rank is None:
            assert isinstance(A, WholeGram)
            assert isinstance(G, WholeGram)
            mean = A.matrix / over[:, None, None]
            parts = mean.unsqueeze(0), G.matrix.unsqueeze(0)
            return KroneckerBlock(*place, *parts, name=shape.name)
        (F, columns), (H, rows) = A.thin(self.rank, over), G.thin(self.rank, torch.ones_like(over))
        named = shape.name
        return ThinBlock(*place, F, H, name=named, inputs_rest=columns, outputs_rest=rows)


class Moments:
    """Sums of squares of rows, turned to given bases."""

    def __init__(self, setting: Setting, blocks: Sequence[KroneckerBlock]) -> None:
        self.blocks = blocks
        self.bases = [bases(block.inputs[0], block.outputs[0]) for block in blocks]
        shapes = setting.layers
        self.values = [setting.zeros(s.groups, s.outputs, s.columns) for s in shapes]

    def pairs(self, layer: int, inputs: Tensor, gradients: Tensor) -> None:
        inputs, gradients = map(_turned, (inputs, gradients), self.bases[layer])
        if inputs.shape[2] == 1:  # the square of an outer product is that of its factors
            left, right = gradients[:, :, 0].permute(1, 2, 0), inputs[:, :, 0].transpose(0, 1)
            self.values[layer].baddbmm_(left.square(), right.square())
            return
        step = max(1, _CHUNK // self.values[layer].numel())
        for a, g in zip(inputs.split(step), gradients.split(step), strict=True):
            self.values[layer] += (g.mT @ a).square_().sum(0)

    def rows(self, layer: int, rows: Tensor) -> None:
        A, G = self.bases[layer]
        self.values[layer] += (G.mT @ rows @ A).square_().sum(0)

    def block(self, layer: int) -> KroneckerBlock:
        A, G = self.bases[layer]
        place = self.blocks[layer]
        values = cleared(self.values[layer]).unsqueeze(0)
        return place.with_parts(
            {"inputs": A.unsqueeze(0), "outputs": G.unsqueeze(0), "values": values}
        )


def _turned(columns: Tensor, basis: Tensor) -> Tensor:
    """(b, groups, T, n) times (groups, n, n), as one product per group."""
    if columns.shape[1] == 1:
        return columns @ basis[0]
    flat = columns.transpose(0, 1)
    return (flat.flatten(1, 2) @ basis).view_as(flat).transpose(0, 1)
