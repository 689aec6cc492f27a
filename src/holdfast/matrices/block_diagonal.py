"""Blocks along the diagonal."""

from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from holdfast.matrices.base import PSDMatrix, compute_dtype, refuse_int8, weight
from holdfast.matrices.rounding import rounded

__all__ = ["BlockDiagonalMatrix"]


class BlockDiagonalMatrix(PSDMatrix):
    """Contiguous blocks that cover the diagonal.

    Args:
        stacks: Tensors (k, b, b): k blocks of size b each, one stack after the other.

    Example:
        >>> BlockDiagonalMatrix([torch.eye(2).repeat(3, 1, 1), torch.eye(1).unsqueeze(0)]).dim
        7
    """

    def __init__(self, stacks: Sequence[Tensor]) -> None:
        self.stacks = tuple(stacks)
        self.dim = sum(s.shape[0] * s.shape[1] for s in self.stacks)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return {f"stack{i:04d}": s for i, s in enumerate(self.stacks)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        return cls([tensors[name] for name in sorted(tensors)])

    def _pieces(self, v: Tensor) -> list[Tensor]:
        sizes = [s.shape[0] * s.shape[1] for s in self.stacks]
        return [p.view(s.shape[0], -1) for p, s in zip(v.split(sizes), self.stacks, strict=True)]

    def __matmul__(self, v: Tensor) -> Tensor:
        dtype = compute_dtype(*self.stacks, v)
        pieces = self._pieces(v.to(dtype))
        products = [
            torch.bmm(p.unsqueeze(1), s.to(dtype)).flatten()  # pᵀB: rows are read in order
            for s, p in zip(self.stacks, pieces, strict=True)
        ]
        return torch.cat(products)

    def diagonal(self) -> Tensor:
        dtype = compute_dtype(*self.stacks)
        return torch.cat([s.diagonal(dim1=1, dim2=2).flatten().to(dtype) for s in self.stacks])

    def dense(self) -> Tensor:
        dtype = compute_dtype(*self.stacks)
        return torch.block_diag(*(block.to(dtype) for s in self.stacks for block in s))

    def __rmul__(self, scale: float) -> Self:
        scaled = (weight(scale) * s.to(compute_dtype(s)) for s in self.stacks)
        return type(self)(
            [rounded(s, old.dtype) for s, old in zip(scaled, self.stacks, strict=True)]
        )

    def __add__(self, other: "BlockDiagonalMatrix") -> "BlockDiagonalMatrix":
        return BlockDiagonalMatrix([a + b for a, b in zip(self.stacks, other.stacks, strict=True)])

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        refuse_int8("a block-diagonal matrix", dtype)
        return type(self)([rounded(s.to(device=device), dtype) for s in self.stacks])

    def expand(self, dim: int, index: Tensor) -> Self:
        raise TypeError("blocks are cut anew in a larger space; use project()")

    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """(row, column, value) of every stored entry."""
        rows, columns, values = [], [], []
        start = 0
        for s in self.stacks:
            k, b, _ = s.shape
            place = torch.arange(start, start + k * b, device=s.device).view(k, b)
            rows.append(place.unsqueeze(2).expand(k, b, b).reshape(-1))
            columns.append(place.unsqueeze(1).expand(k, b, b).reshape(-1))
            values.append(s.reshape(-1))
            start += k * b
        return torch.cat(rows), torch.cat(columns), torch.cat(values)

    def project(self, index: Tensor, shapes: Sequence[tuple[int, int]]) -> "BlockDiagonalMatrix":
        """The matrix in a larger space whose blocks are ``shapes`` = (count, size) per stack.

        Entry i moves to ``index[i]``. What crosses the new blocks is dropped (pinching: the result
        is still positive semi-definite).
        """
        row, column, value = self.entries()
        row, column = index.to(row.device)[row], index.to(row.device)[column]
        stacks, start = [], 0
        for k, b in shapes:
            end = start + k * b
            inside = (row >= start) & (row < end) & (column >= start) & (column < end)
            r, c, v = row[inside] - start, column[inside] - start, value[inside]
            same = r // b == c // b
            stack = value.new_zeros(k, b, b)
            r, c = r[same], c[same]
            stack[r // b, r % b, c % b] = v[same]
            stacks.append(stack)
            start = end
        return BlockDiagonalMatrix(stacks)
