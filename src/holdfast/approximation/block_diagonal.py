"""Exact blocks along the diagonal."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from holdfast.approximation.base import Approximation, Setting, rows_at_once
from holdfast.configuration import keep_positive
from holdfast.matrices import BlockDiagonalMatrix, PSDMatrix
from holdfast.parameters import ParameterSpace
from holdfast.rows import RowBatch

__all__ = ["BlockDiagonal"]


@dataclass
class _State:
    stacks: list[Tensor]  # (count, size, size)
    room: Tensor  # for rows


@dataclass(frozen=True)
class BlockDiagonal(Approximation):
    """Blocks of the flat parameter vector; everything between blocks is dropped.

    Where a network grows in the middle, between tasks, blocks are cut anew, and what the old matrix held
    across the new borders is dropped.

    Args:
        size: Contiguous blocks of this many entries, across layer borders, the last one smaller.
        by: "size", or "layer" for one block per module (weight and bias together).
    """

    size: int = 50
    by: Literal["size", "layer"] = "size"

    def __post_init__(self) -> None:
        keep_positive(self, "size")
        if self.by not in ("size", "layer"):
            raise ValueError(f"by must be 'size' or 'layer', got {self.by!r}")

    @property
    def fits_int8(self) -> bool:
        return False

    def shapes(self, space: ParameterSpace) -> list[tuple[int, int]]:
        """(count, size) of every stack of blocks, in order."""
        if self.by == "layer":
            return [(1, end - start) for start, end in space.layers.values()]
        count, rest = divmod(space.dim, self.size)
        stacks = [(count, self.size)] if count else []
        return stacks + ([(1, rest)] if rest else [])

    def start(self, setting: Setting) -> _State:
        shapes = self.shapes(setting.space)
        stacks = [setting.zeros(k, b, b) for k, b in shapes]
        return _State(stacks, setting.empty(_together(shapes), setting.dim))

    def update(self, state: Any, rows: RowBatch) -> None:
        sizes = [stack.shape[0] * stack.shape[1] for stack in state.stacks]
        for block in rows.written(state.room):
            for stack, piece in zip(state.stacks, block.split(sizes, 1), strict=True):
                k, b = stack.shape[:2]
                columns = piece.unflatten(1, (k, b)).transpose(0, 1)  # (k, rows, b)
                stack.baddbmm_(columns.transpose(1, 2), columns)

    def finish(self, state: Any) -> BlockDiagonalMatrix:
        return BlockDiagonalMatrix(state.stacks)

    def nbytes(self, setting: Setting) -> int:
        shapes = self.shapes(setting.space)
        kept = sum(k * b * b for k, b in shapes)
        return setting.nbytes(kept + _together(shapes) * setting.dim)

    def embed(self, matrix: PSDMatrix, space: ParameterSpace, index: Tensor) -> PSDMatrix:
        assert isinstance(matrix, BlockDiagonalMatrix)
        return matrix.project(index, self.shapes(space))


def _together(shapes: Sequence[tuple[int, int]]) -> int:
    """Rows to write out at a time."""
    return rows_at_once(max((b for _, b in shapes), default=1))
