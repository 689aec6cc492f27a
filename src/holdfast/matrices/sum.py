"""A + B + …, each stored as it is."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Self

from torch import Tensor

from holdfast.matrices.base import Offset, PSDMatrix
from holdfast.matrices.nested import NestedMatrix, parts_of

__all__ = ["SumMatrix"]


class SumMatrix(NestedMatrix):
    """A sum of matrices of any kind.

    Args:
        parts: The summands, all of one size.

    Example:
        >>> import torch
        >>> from holdfast import DiagonalMatrix, FactoredMatrix
        >>> SumMatrix([DiagonalMatrix(torch.ones(2)), FactoredMatrix(torch.ones(1, 2))]).dense().tolist()
        [[2.0, 1.0], [1.0, 2.0]]
    """

    def __init__(self, parts: Sequence[PSDMatrix]) -> None:
        sizes = {part.dim for part in parts}
        if len(sizes) != 1:
            raise ValueError(f"summands must have one size, got {sorted(sizes)}")
        self.parts, self.dim = tuple(parts), sizes.pop()

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        return cls(list(parts_of(tensors)))

    def views(self, pieces: Sequence[Tensor]) -> list[list[Tensor]]:
        return [list(pieces) for _ in self.parts]

    def _with(self, parts: Sequence[PSDMatrix]) -> Self:
        return type(self)(parts)

    def diagonal(self) -> Tensor:
        first, *rest = (part.diagonal() for part in self.parts)
        return sum(rest, first)

    def dense(self) -> Tensor:
        first, *rest = (part.dense() for part in self.parts)
        return sum(rest, first)

    def recentred(self, offset: Offset, stored: PSDMatrix, eps: float) -> Offset:
        if not self.has_constant:
            return super().recentred(offset, stored, eps)
        return PSDMatrix.recentred(self, offset, stored, eps)  # one centre for all summands

    def expand(self, dim: int, index: Tensor) -> Self:
        return type(self)([part.expand(dim, index) for part in self.parts])

    def expand_offset(self, offset: Offset, dim: int, index: Tensor) -> Offset:
        each = zip(self.parts, self.offsets(offset), strict=True)
        return tuple(itertools.chain(*(part.expand_offset(o, dim, index) for part, o in each)))
