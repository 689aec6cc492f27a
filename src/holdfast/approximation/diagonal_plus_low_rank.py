"""The leading eigenvectors, and the diagonal of what they leave out: no direction is free."""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from holdfast.approximation.base import Approximation, Setting
from holdfast.approximation.count_sketch import stack
from holdfast.approximation.low_rank import LowRank
from holdfast.approximation.truncation import truncated
from holdfast.configuration import keep_as
from holdfast.matrices import DiagonalMatrix, FactoredMatrix, Offset, PSDMatrix, SumMatrix
from holdfast.rows import RowBatch
from holdfast.views import SquaredRows

__all__ = ["DiagonalPlusLowRank"]

_COLUMNS = 2**15  # columns of dropped rows at a time


@dataclass(frozen=True)
class DiagonalPlusLowRank(Approximation):
    r"""diag(Ω − FᵀF) + FᵀF with the F of LowRank, in one pass: no direction is free.

    A low rank alone leaves all but a few directions free, and an optimiser finds them. Here every entry that
    any row touches is held: the diagonal is exactly that of Ω, and F adds the leading correlations. The
    difference is never negative for ``group=1``; with groups F holds sums of rows, whose squares may exceed
    those of the rows, and is clamped at zero there.

    Histories add the diagonals, and what truncation drops from the stacked factors moves into the diagonal,
    so that the diagonal of the sum stays exact. With ``anchor="each"`` the merged penalty has its minimum
    where the sum of both has it, and the same value there, as nearly as some hundred products tell.

    Args:
        rank: Rows of F.
        group: Rows per sum; see :class:`LowRank`.
        shrink: Subtract the (rank+1)-th eigenvalue at every truncation; the diagonal makes up for it.
        merge: "rows" truncates the stacked factors of tasks back to ``rank``; "stack" keeps them all.
    """

    rank: int = 50
    group: int | Literal["auto"] = "auto"
    shrink: bool = False
    merge: Literal["rows", "stack"] = "rows"

    def __post_init__(self) -> None:
        keep_as(self, self.low_rank, "rank", "group")  # says what is wrong

    @property
    def fits_int8(self) -> bool:
        return False

    @property
    def low_rank(self) -> LowRank:
        """The recipe of F."""
        return LowRank(self.rank, self.group, self.shrink, self.merge)

    def hash_ids(self, setting: Setting) -> tuple[str, ...]:
        return self.low_rank.hash_ids(setting)

    def start(self, setting: Setting) -> tuple[Tensor, Any]:
        return setting.zeros(setting.dim), self.low_rank.start(setting)

    def update(self, state: Any, rows: RowBatch) -> None:
        squares, streamed = state
        self.low_rank.update(streamed, SquaredRows(rows, squares))

    def finish(self, state: Any) -> SumMatrix:
        squares, streamed = state
        low = self.low_rank.finish(streamed)
        for row in low.factor:
            squares.addcmul_(row, row, value=-1)
        return SumMatrix([DiagonalMatrix(squares.clamp_(min=0)), low])

    def nbytes(self, setting: Setting) -> int:
        return self.low_rank.nbytes(setting) + setting.nbytes(setting.dim)

    def add(self, old: PSDMatrix, offset: Offset, new: PSDMatrix) -> tuple[PSDMatrix, Offset]:
        assert isinstance(old, SumMatrix)
        assert isinstance(new, SumMatrix)
        (diagonal, low), (more, other) = old.parts, new.parts
        assert isinstance(low, FactoredMatrix)
        assert isinstance(other, FactoredMatrix)
        pull, e = old.offsets(offset)
        values = diagonal.diagonal() + more.diagonal()
        factor, e = stack(low, e, other)
        if self.merge == "stack" or len(factor.factor) <= self.rank:
            return SumMatrix([DiagonalMatrix(values), factor]), (*pull, *e)
        kept, dropped = truncated(factor, self.rank, self.shrink)
        for first in range(0, len(values), _COLUMNS):
            part = slice(first, first + _COLUMNS)
            values[part] += dropped.columns(part).square().sum(0)
        merged = SumMatrix([DiagonalMatrix(values), kept])
        return merged, merged.recentred_as([old, new], offset)
