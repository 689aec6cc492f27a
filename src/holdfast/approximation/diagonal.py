"""The diagonal: exact, or estimated for the price of plain backward passes."""

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from holdfast.approximation.base import Approximation, Setting
from holdfast.configuration import QUIET, keep_positive
from holdfast.hashing import SketchHash
from holdfast.matrices import DiagonalMatrix
from holdfast.regrouping import Regrouping
from holdfast.rows import RowBatch

__all__ = ["Diagonal"]


class _Signed:
    """Squares of random-sign sums of a fixed number of consecutive rows."""

    def __init__(self, recipe: "Diagonal", setting: Setting) -> None:
        self.group, self.hash = recipe.group, recipe.hash(setting)
        self.total, self.sum = setting.zeros(setting.dim), setting.zeros(setting.dim)
        self.pending = 0
        self.groups = Regrouping(1, self.add, capacity=recipe.group)

    def add(self, _: int, rows: RowBatch, signs: Tensor) -> None:
        rows.add_signed_sum_(self.sum, signs)
        self.pending += len(rows)
        if self.pending >= self.group:
            self.close()

    def close(self) -> None:
        self.total.addcmul_(self.sum, self.sum)
        self.sum.zero_()
        self.pending = 0


@dataclass(frozen=True, repr=False)
class Diagonal(Approximation):
    r"""diag(Σᵢ wᵢ∘wᵢ): squares of single rows, never of a batch mean.

    Args:
        estimate: "exact" squares every row. "signs" squares random-sign sums, whose mean is the same,
            :math:`\mathbb{E}(\sum_i \sigma_i w_i)^2 = \sum_i w_i^2`, for any network at the price of one
            plain backward pass per group.
        group: Rows per sum, for "signs": fewer are slower and vary less, one is exact. The groups are
            consecutive rows, whatever the batches: the result does not depend on the batch size.
    """

    estimate: Literal["exact", "signs"] = field(
        default="exact", kw_only=True, metadata={QUIET: True}
    )
    group: int = field(default=128, kw_only=True, metadata={QUIET: True})

    def __post_init__(self) -> None:
        if self.estimate not in ("exact", "signs"):
            raise ValueError(f"estimate must be 'exact' or 'signs', got {self.estimate!r}")
        keep_positive(self, "group")

    @property
    def fits_int8(self) -> bool:
        return False

    def __repr__(self) -> str:
        exact = self.estimate == "exact"
        return "Diagonal()" if exact else f"Diagonal(estimate='signs', group={self.group})"

    def hash(self, setting: Setting) -> SketchHash:
        """The signs of this task."""
        return SketchHash.draw(1, setting.draw.generator("groups"))

    def hash_ids(self, setting: Setting) -> tuple[str, ...]:
        return () if self.estimate == "exact" else (self.hash(setting).id,)

    def start(self, setting: Setting) -> Tensor | _Signed:
        return setting.zeros(setting.dim) if self.estimate == "exact" else _Signed(self, setting)

    def update(self, state: Any, rows: RowBatch) -> None:
        if not isinstance(state, _Signed):
            rows.add_squared_sum_(state)
        elif rows.columns is None:  # cannot be regrouped: its rows are written out, so take them
            rows.add_squared_sum_(state.total)
        else:
            signs = state.hash.signs(rows.index)
            state.groups.add(rows, rows.index.new_zeros(len(rows)), signs)

    def finish(self, state: Any) -> DiagonalMatrix:
        if not isinstance(state, _Signed):
            return DiagonalMatrix(state)
        state.groups.flush()
        state.close()
        return DiagonalMatrix(state.total)

    def nbytes(self, setting: Setting) -> int:
        return setting.nbytes((1 if self.estimate == "exact" else 2) * setting.dim)
