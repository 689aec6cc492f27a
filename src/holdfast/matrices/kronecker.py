"""Kronecker products, one per layer, and a diagonal for the rest."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from holdfast.matrices.base import PSDMatrix, compute_dtype, refuse_int8, scatter, vector, weight
from holdfast.matrices.kronecker_block import KroneckerBlock
from holdfast.matrices.thin_block import ThinBlock

__all__ = ["KroneckerMatrix"]


Merge = Callable[[KroneckerBlock, KroneckerBlock], KroneckerBlock]


class KroneckerMatrix(PSDMatrix):
    """Kronecker blocks of layers, and the diagonal of all other entries.

    Args:
        blocks: One per layer.
        rest: The diagonal of the entries that no block covers, in flat order.

    Example:
        >>> block = KroneckerBlock(0, None, torch.eye(3)[None, None], torch.eye(2)[None, None])
        >>> KroneckerMatrix([block], torch.ones(1)).dim
        7
    """

    def __init__(self, blocks: Sequence[KroneckerBlock], rest: Tensor) -> None:
        self.blocks, self.rest = tuple(sorted(blocks, key=lambda block: block.weight)), rest
        self.dim = sum(block.size for block in self.blocks) + len(rest)

    @cached_property
    def others(self) -> Tensor:
        """The entries that no block covers: int64, in order, where the matrix is stored."""
        return _uncovered(self.blocks, self.dim).to(self.rest.device)

    @property
    def device(self) -> torch.device:
        return self.rest.device

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        # the place of a block is in its name: all tensors are then numbers of one kind
        found = {
            f"{block.weight}.{'-' if block.bias is None else block.bias}.{name}": part
            for block in self.blocks
            for name, part in block.parts.items()
        }
        return {**found, "rest": self.rest}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        parts: dict[tuple[str, str], dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            if key != "rest":
                weight_at, bias_at, name = key.split(".")
                parts.setdefault((weight_at, bias_at), {})[name] = tensor
        blocks: list[KroneckerBlock] = []
        for (w, b), named in parts.items():
            kind: Any = ThinBlock if "inputs_rest" in named else KroneckerBlock
            blocks.append(kind(int(w), None if b == "-" else int(b), **named))
        return cls(blocks, tensors["rest"])

    @property
    def terms(self) -> int:
        """Kronecker products that are summed in a block; 0 without blocks."""
        return max((len(block.inputs) for block in self.blocks), default=0)

    @property
    def thin(self) -> bool:
        """Whether factors are a low rank and a diagonal."""
        return any(isinstance(block, ThinBlock) for block in self.blocks)

    def like(self, other: "KroneckerMatrix") -> bool:
        """Whether both have blocks at the same places."""
        return self.dim == other.dim and [b.place for b in self.blocks] == [
            b.place for b in other.blocks
        ]

    def _dtype(self, *others: Tensor) -> torch.dtype:
        return compute_dtype(self.rest, *others)

    def __matmul__(self, v: Tensor) -> Tensor:
        v = vector(v, self.dim).to(self._dtype(v)).contiguous()
        out = torch.empty_like(v)
        if len(self.rest):
            out[self.others] = v[self.others] * self.rest.to(v.dtype)
        for block in self.blocks:
            block.write_product(out, v)
        return out

    def spread(self) -> Tensor:
        """The diagonal of the rest as a whole flat vector, zero where blocks are."""
        return scatter(self.rest.to(self._dtype()), self.dim, self.others)

    def diagonal(self) -> Tensor:
        out = self.spread()
        for block in self.blocks:
            block.write(out, block.diagonal())
        return out

    def trace(self) -> Tensor:
        return sum((b.trace() for b in self.blocks), self.rest.to(self._dtype()).sum())

    def dense(self) -> Tensor:
        out = self.spread().diag()
        index = torch.arange(self.dim, device=out.device)
        for block in self.blocks:
            places = block.matrix(index).flatten(1)
            for group, product in zip(places, block.dense(), strict=True):
                out[group.unsqueeze(1), group] = product
        return out

    def __rmul__(self, scale: float) -> Self:
        scale = weight(scale)
        return type(self)([b.times(scale) for b in self.blocks], scale * self.rest)

    def scale_(self, scale: float) -> Self:
        for block in self.blocks:
            block.times_(scale)
        self.rest.mul_(scale)
        return self

    def __add__(self, other: "KroneckerMatrix") -> "KroneckerMatrix":
        """Exactly the sum: the products of both, side by side."""

        def stacked(a: KroneckerBlock, b: KroneckerBlock) -> KroneckerBlock:
            if a.parts.keys() != b.parts.keys():
                raise TypeError(
                    "Kronecker products of different kinds (plain, corrected, of some rank) are not added"
                )
            pairs = {name: (part, b.parts[name]) for name, part in a.parts.items()}
            return a.with_parts({name: _stacked(*pair) for name, pair in pairs.items()})

        return self.combined(other, stacked)

    @classmethod
    def on(cls, blocks: Sequence[KroneckerBlock], diagonal: Tensor) -> Self:
        """Blocks, and of a flat vector what they do not cover."""
        others = _uncovered(blocks, len(diagonal)).to(diagonal.device)
        return cls(blocks, diagonal[others])

    def combined(self, other: "KroneckerMatrix", rule: Merge) -> "KroneckerMatrix":
        """The sum, two blocks of the same layer becoming one by ``rule``.

        A layer that only one of them covers is taken from there; the other must be zero on it.
        """
        mine, others = ({b.weight: b for b in m.blocks} for m in (self, other))
        blocks = []
        for at in sorted({*mine, *others}):
            one, two = mine.get(at), others.get(at)
            if one is not None and two is not None:
                if one.place != two.place:
                    raise ValueError(_changed(one, two))
                blocks.append(rule(one, two))
                continue
            block, uncovered = (one, other) if one is not None else (two, self)
            assert block is not None
            if any(bool(uncovered.spread()[part].any()) for part in block.entries()):
                raise ValueError(_changed(block))
            blocks.append(block)
        return KroneckerMatrix.on(blocks, self.spread() + other.spread())

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        refuse_int8("a Kronecker product", dtype)
        blocks = [block.to(device, dtype) for block in self.blocks]
        return type(self)(blocks, self.rest.to(device=device, dtype=dtype))

    def expand(self, dim: int, index: Tensor) -> Self:
        """The matrix in a larger space; layers must stay in one piece."""
        blocks = []
        for block in self.blocks:
            starts = []
            for part in block.entries():
                moved = index[part]
                if not torch.equal(
                    moved - moved[0], torch.arange(len(moved), device=index.device)
                ):
                    raise TypeError("the entries of a layer must stay next to each other")
                starts.append(int(moved[0]))
            bias = starts[1] if len(starts) > 1 else None
            blocks.append(replace(block, weight=starts[0], bias=bias))
        whole = scatter(self.spread().to(self.rest.dtype), dim, index)
        return type(self).on(blocks, whole)


def _stacked(one: Tensor, two: Tensor) -> Tensor:
    """Both along the first dimension; thin factors of a smaller rank get columns of zeros."""
    width = max(one.shape[-1], two.shape[-1])
    return torch.cat([functional.pad(part, (0, width - part.shape[-1])) for part in (one, two)])


def _uncovered(blocks: Sequence[KroneckerBlock], dim: int) -> Tensor:
    """The entries that no block covers, in order."""
    free = torch.ones(dim, dtype=torch.bool)
    for block in blocks:
        for part in block.entries():
            free[part] = False
    return free.nonzero().squeeze(1)


def _changed(block: KroneckerBlock, other: KroneckerBlock | None = None) -> str:
    """Why a layer's parts of two matrices cannot be added, and what to do."""
    names = [b.name for b in (block, other) if b is not None and b.name is not None]
    layer = f"the layer at entry {block.weight}"
    if names:
        layer = f"the layer {names[0]}" if names[0] else "the network's only layer"
    if other is None:
        how = "is a matrix of its own in one of the two tasks and has a diagonal in the other (its weight "
        how += "is shared with another layer there, or its class is not one of Linear, Conv1d, Conv2d)"
    else:
        how = f"was {_size(block)} and is {_size(other)}"
    return (
        f"{layer} {how}: their Kronecker products cannot be added; keep the layer as it was, "
        "consolidate without previous=, or use another approximation for all tasks, such as Diagonal()"
    )


def _size(block: KroneckerBlock) -> str:
    _, bias, groups, outputs, columns = block.place
    size = f"{outputs} x {columns}{'' if bias is None else ' with its bias'}"
    return size if groups == 1 else f"{groups} groups of {size}"
