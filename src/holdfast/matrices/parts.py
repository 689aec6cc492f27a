"""A direct sum: parts of the vector, each with a matrix of its own, and nothing between them."""

import bisect
import itertools
from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from holdfast.matrices.base import Offset, PSDMatrix, compute_dtype
from holdfast.matrices.nested import NestedMatrix, parts_of

__all__ = ["PartsMatrix", "Ranges", "ranges_of"]

Ranges = tuple[tuple[int, int], ...]  # half-open, in the order of a part's own vector

_NOBODY = -1  # the owner of entries that no part holds: there the matrix is zero


class PartsMatrix(NestedMatrix):
    """Every part acts on some ranges of the vector; entries outside of all ranges are free.

    Args:
        parts: The matrices.
        places: For each, the half-open ranges of the vector that together are its own vector.
        dim: The length of the whole vector.

    Example:
        >>> from holdfast import DiagonalMatrix, FactoredMatrix
        >>> parts = DiagonalMatrix(torch.ones(2)), FactoredMatrix(torch.ones(1, 1))
        >>> PartsMatrix(parts, [[(0, 1), (2, 3)], [(1, 2)]], 3).dense().tolist()
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """

    def __init__(
        self, parts: Sequence[PSDMatrix], places: Sequence[Sequence[tuple[int, int]]], dim: int
    ) -> None:
        self.parts, self.dim = tuple(parts), dim
        self.places: tuple[Ranges, ...] = tuple(tuple(ranges) for ranges in places)
        owned = sorted(itertools.chain(*self.places))
        sizes = [sum(end - start for start, end in ranges) for ranges in self.places]
        apart = all(a[1] <= b[0] for a, b in itertools.pairwise(owned))
        if sizes != [part.dim for part in self.parts] or not apart:
            raise ValueError(
                f"parts of sizes {[part.dim for part in self.parts]} do not fit the ranges "
                f"{self.places}: these must not overlap, and must be as long as their part"
            )
        if not 0 < (owned[-1][1] if owned else 0) <= dim:
            raise ValueError(f"the ranges {self.places} do not lie in a vector of length {dim}")

    @property
    def layout(self) -> Tensor:
        """Rows (part, start, end) in the order of the parts' own vectors; -1 owns what is free."""
        rows = [(i, *r) for i, ranges in enumerate(self.places) for r in ranges]
        borders = [(0, 0), *sorted(itertools.chain(*self.places)), (self.dim, self.dim)]
        between = [(_NOBODY, a[1], b[0]) for a, b in itertools.pairwise(borders)]
        rows += [row for row in between if row[1] < row[2]]
        return torch.tensor(rows, dtype=torch.int64, device=self.parts[0].device)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return {**super().tensors, "layout": self.layout}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        rows = tensors["layout"].tolist()
        parts = list(parts_of({n: t for n, t in tensors.items() if n != "layout"}))
        places = [[(a, b) for owner, a, b in rows if owner == i] for i in range(len(parts))]
        return cls(parts, places, max(end for _, _, end in rows))

    def _with(self, parts: Sequence[PSDMatrix]) -> Self:
        return type(self)(parts, self.places, self.dim)

    def views(self, pieces: Sequence[Tensor]) -> list[list[Tensor]]:
        firsts = list(itertools.accumulate((len(piece) for piece in pieces), initial=0))
        return [_cut(pieces, firsts, ranges) for ranges in self.places]

    def diagonal(self) -> Tensor:
        diagonals = [part.diagonal() for part in self.parts]
        out = torch.zeros(self.dim, dtype=compute_dtype(*diagonals), device=self.parts[0].device)
        for views, values in zip(self.views([out]), diagonals, strict=True):
            torch._foreach_copy_(views, list(values.split([len(view) for view in views])))
        return out

    def dense(self) -> Tensor:
        blocks = [part.dense() for part in self.parts]
        out = torch.zeros(
            self.dim, self.dim, dtype=compute_dtype(*blocks), device=self.parts[0].device
        )
        for at, block in zip(self.entries(), blocks, strict=True):
            here = at.to(out.device)
            out[here.unsqueeze(1), here] = block.to(out.dtype)
        return out

    def entries(self) -> list[Tensor]:
        """For every part, where the entries of its own vector lie."""
        return [torch.cat([torch.arange(a, b) for a, b in ranges]) for ranges in self.places]

    def expand(self, dim: int, index: Tensor) -> Self:
        places = [ranges_of(index.cpu()[entries]) for entries in self.entries()]
        return type(self)(self.parts, places, dim)

    def expand_offset(self, offset: Offset, dim: int, index: Tensor) -> Offset:
        return offset  # the parts keep their own vectors


def _cut(pieces: Sequence[Tensor], firsts: Sequence[int], ranges: Ranges) -> list[Tensor]:
    """Views of what lies in the ranges, of a vector in pieces that begin at ``firsts``."""
    found = []
    for start, end in ranges:
        at = bisect.bisect_right(firsts, start) - 1
        while start < end:
            stop = min(end, firsts[at + 1])
            if start < stop:
                found.append(pieces[at][start - firsts[at] : stop - firsts[at]])
            start, at = stop, at + 1
    return found


def ranges_of(positions: Tensor) -> Ranges:
    """A vector of positions as ranges of consecutive ones, in its order."""
    steps = (positions.diff() != 1).nonzero().squeeze(1) + 1
    runs = positions.tensor_split(steps)
    return tuple((int(run[0]), int(run[-1]) + 1) for run in runs)
