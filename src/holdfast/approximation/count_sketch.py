"""CountSketch: a few signed sums of rows."""

import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from holdfast.approximation.base import Approximation, Setting
from holdfast.configuration import keep_positive
from holdfast.hashing import SketchHash
from holdfast.matrices import FactoredMatrix, Offset, PSDMatrix
from holdfast.regrouping import Regrouping
from holdfast.rows import RowBatch

__all__ = ["CountSketch", "advise", "check_merge", "merged", "stack"]


@dataclass
class _State:
    hashes: list[SketchHash]
    factor: Tensor  # (copies · size, m)
    groups: list[Regrouping]
    rows: int = 0


@dataclass(frozen=True)
class CountSketch(Approximation):
    r"""W̃ = SW: row k is the gradient of the sign-weighted sum of φ over the examples of bucket k.

    One pass, no per-example gradients, unbiased: :math:`\mathbb{E}\,\tilde W^\top \tilde W = W^\top W`, and
    exactly :math:`\mathbb{E}\lVert\tilde\Omega-\Omega\rVert_F^2 = \frac1t\left[(\mathrm{tr}\,\Omega)^2 +
    \lVert\Omega\rVert_F^2 - 2\sum_i\lVert a_i\rVert^4\right]`.

    Args:
        size: The number t of rows kept (of each copy).
        copies: Independent sketches whose matrices are averaged; each costs its own epoch of passes.
        merge: "rows" adds the sketches of tasks (constant memory; their hashes are independent, so the
            sum is again a CountSketch of all rows); "stack" keeps them apart (memory grows with tasks).

    References:
        Lifelong Learning with Sketched Structural Regularization (Li et al., 2021)
        https://arxiv.org/abs/2104.08604
    """

    size: int = 50
    copies: int = 1
    merge: Literal["rows", "stack"] = "rows"

    def __post_init__(self) -> None:
        keep_positive(self, "size", "copies")
        check_merge(self.merge)

    def hashes(self, setting: Setting) -> list[SketchHash]:
        """The hash functions of this task, one per copy."""
        draws = (setting.draw.generator("sketch", copy) for copy in range(self.copies))
        return [SketchHash.draw(self.size, draw) for draw in draws]

    def hash_ids(self, setting: Setting) -> tuple[str, ...]:
        return tuple(h.id for h in self.hashes(setting))

    def start(self, setting: Setting) -> _State:
        factor = setting.zeros(self.copies * self.size, setting.dim)

        def grouping(copy: int) -> Regrouping:
            def emit(bucket: int, rows: RowBatch, signs: Tensor) -> None:
                rows.add_signed_sum_(factor[copy * self.size + bucket], signs)

            return Regrouping(self.size, emit)

        return _State(self.hashes(setting), factor, [grouping(c) for c in range(self.copies)])

    def update(self, state: Any, rows: RowBatch) -> None:
        state.rows += len(rows)
        for h, group in zip(state.hashes, state.groups, strict=True):
            group.add(rows, h.buckets(rows.index), h.signs(rows.index))

    def finish(self, state: Any) -> FactoredMatrix:
        advise(self, self.size, state.rows)
        return self.collect(state)

    def collect(self, state: Any) -> FactoredMatrix:
        """What :meth:`finish` returns, without a word about its size."""
        for group in state.groups:
            group.flush()
        found = FactoredMatrix(state.factor)
        return found if self.copies == 1 else found.scale_(1 / self.copies)

    def nbytes(self, setting: Setting) -> int:
        return setting.nbytes(self.copies * self.size * setting.dim)

    def add(self, old: PSDMatrix, offset: Offset, new: PSDMatrix) -> tuple[PSDMatrix, Offset]:
        return merged(self.merge, old, offset, new)


def check_merge(merge: str) -> None:
    """Refuse a way of merging that there is not."""
    if merge not in ("rows", "stack"):
        raise ValueError(f"merge must be 'rows' or 'stack', got {merge!r}")


def advise(recipe: Approximation, size: int, rows: int) -> None:
    """Say so where a sketch has as many rows as what it sketches."""
    if rows <= size:
        warnings.warn(
            f"{type(recipe).__name__}(size={size}) of {rows} rows: LowRank(rank={rows}) "
            "needs no more memory and is exact",
            stacklevel=3,
        )


def merged(
    merge: Literal["rows", "stack"], old: PSDMatrix, offset: Offset, new: PSDMatrix
) -> tuple[FactoredMatrix, Offset]:
    """Two sketches F = S W with independent S as one: their rows added, or kept apart."""
    assert isinstance(old, FactoredMatrix)
    assert isinstance(new, FactoredMatrix)
    F, G = old.factor, new.factor
    if merge == "stack":
        return stack(old, offset, new)
    if len(F) == len(G):
        return FactoredMatrix(F + G), offset
    # A trimmed factor has other rows. New signs are independent of it, so that the mean of the sum
    # is still right wherever its rows are added.
    rows = max(len(F), len(G))
    padded = [torch.cat([X, X.new_zeros(rows - len(X), X.shape[1])]) for X in (F, G)]
    return FactoredMatrix(padded[0] + padded[1]), tuple(
        torch.cat([e, e.new_zeros(rows - len(e))]) for e in offset
    )


def stack(
    old: FactoredMatrix, offset: Offset, new: FactoredMatrix
) -> tuple[FactoredMatrix, Offset]:
    """FᵀF + GᵀG as one factor: the rows of both."""
    F, G = old.factor, new.factor
    stacked = FactoredMatrix(torch.cat([F, G]))
    return stacked, tuple(torch.cat([e, e.new_zeros(len(G))]) for e in offset)
