"""The leading eigenvectors, streamed: one pass, O(t·m) memory, never an m × m matrix."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from holdfast.approximation.base import Approximation, Setting
from holdfast.approximation.count_sketch import stack
from holdfast.approximation.truncation import COLUMNS, leading, products, rotate
from holdfast.configuration import keep_positive
from holdfast.hashing import SketchHash
from holdfast.matrices import FactoredMatrix, Offset, PSDMatrix
from holdfast.regrouping import Regrouping
from holdfast.rows import RowBatch

__all__ = ["LowRank"]

_LEAST = 32  # rows kept while streaming, and between two truncations, however small the rank
_WORK = (
    10**10
)  # operations that single rows may cost before they are summed: a fraction of a second


class _State:
    """A basis of a few rows, below it a buffer of incoming rows, and the group being summed.

    While streaming, the basis is wider than a small rank: what a later row would have made
    important must not be gone by then.
    """

    def __init__(self, recipe: "LowRank", setting: Setting) -> None:
        self.recipe, self.setting = recipe, setting
        self.hash = SketchHash.draw(1, setting.draw.generator("groups"))
        self.width = recipe.width
        self.home = setting.empty(
            self.width, setting.dim
        )  # of the basis first, of the result at last
        self.rows: Tensor | None = None  # basis and buffer in between: one product reads both
        self.kept = 0  # rows of the basis that are in use
        self.gram: Tensor | None = None  # of the basis, where it is known
        self.filled = 0  # complete rows in the buffer
        self.pending = 0  # rows already summed into the next one
        self.single = 0  # rows that entered one by one
        self.alone = recipe.alone(setting.dim)  # … out of so many
        self.sizes = recipe.group_sizes()
        self.size = next(self.sizes)  # of the group being summed
        self.groups = Regrouping(1, self.sum, capacity=self.size)

    @property
    def basis(self) -> Tensor:
        return self.home if self.rows is None else self.rows[: self.width]

    @property
    def buffer(self) -> Tensor:
        """There only where more rows come than the basis has room for."""
        if self.rows is None:
            self.rows = self.setting.empty(2 * self.width, self.setting.dim)
            self.rows[: self.kept] = self.home[: self.kept]
        return self.rows[self.width :]

    def result(self) -> Tensor:
        """The leading rows, in memory of their own."""
        streamed = FactoredMatrix(self.basis[: self.kept])
        found = rotate(streamed, (), self.recipe.rank, self.recipe.shrink)[0].factor
        if len(found) < self.width:
            return found.clone()
        return self.home if self.rows is None else self.home.copy_(found)

    def push(self) -> None:
        """The row being written is complete."""
        self.filled += 1
        self.pending = 0
        if self.filled == self.width:
            self.truncate()

    def truncate(self) -> None:
        """Take the buffer into the basis: in place, a few columns at a time."""
        new, count = self.buffer[: self.filled], self.kept + self.filled
        if count <= self.width:
            self.basis[self.kept : count] = new
            self.kept, self.gram = count, None
        else:
            assert self.rows is not None
            basis, used = self.basis, self.rows[: self.width + self.filled]
            basis[self.kept :].zero_()
            right = products(used, new)
            above = products(basis, basis) if self.gram is None else self.gram
            left = torch.cat([above, right[: self.width].T])
            U, lengths = leading(torch.cat([left, right], 1), self.width, self.recipe.shrink)
            rotation = U.T.to(used.dtype)
            for first in range(0, self.setting.dim, COLUMNS):
                part = slice(first, first + COLUMNS)
                basis[:, part] = rotation @ used[:, part]
            # the rotated rows are orthogonal: only products with new rows are ever needed again
            self.kept, self.gram = self.width, torch.diag(lengths)
        self.filled = 0

    def take(self, rows: RowBatch) -> None:
        """Rows to be summed: cut where a group of another size begins."""
        first = 0
        while first < len(rows):
            room = self.size - self.pending - self.groups.held
            if not room:  # complete, but in several batches that cannot be joined
                self.groups.flush()
                continue
            some = _some(rows, slice(first, first + room))
            self.groups.add(some, torch.zeros_like(some.index), self.hash.signs(some.index))
            first += room

    @property
    def current(self) -> Tensor:
        """The row that is being summed, zero where nothing is in it yet."""
        row = self.buffer[self.filled]
        return row if self.pending else row.zero_()

    def sum(self, _: int, rows: RowBatch, signs: Tensor) -> None:
        rows.add_signed_sum_(self.current, signs)
        self.count(len(rows))

    def count(self, rows: int) -> None:
        """So many rows more are in the sum; a full one is closed, and the next may be larger."""
        self.pending += rows
        if self.pending < self.size:
            return
        self.push()
        before, self.size = self.size, next(self.sizes)
        if self.size != before:
            self.groups = Regrouping(1, self.sum, capacity=self.size)

    @property
    def room(self) -> int:
        """Single rows that the basis takes as they are."""
        return 0 if self.filled or self.alone < self.width else self.width - self.kept

    def fill(self, rows: RowBatch) -> None:
        """As many rows as there is room for, written where they stay."""
        rows.write_(self.basis[self.kept : self.kept + len(rows)])
        self.kept += len(rows)

    def write(self, block: Tensor) -> None:
        for row in block:
            if self.room:
                self.basis[self.kept] = row
                self.kept += 1
            else:
                self.buffer[self.filled] = row
                self.push()


def _some(rows: RowBatch, part: slice) -> RowBatch:
    """Some rows of a batch that can be cut."""
    assert rows.columns is not None
    return rows.like([column[part] for column in rows.columns], rows.index[part])


@dataclass(frozen=True)
class LowRank(Approximation):
    r"""The truncated eigendecomposition of Ω, by stacking, a small Gram matrix and truncation.

    The first rows enter one by one, at least ``rank`` of them, so rank ≥ n is exact. Later rows enter
    as random-sign sums of consecutive rows (unbiased; quality falls with the size of the groups, speed
    rises). The sums are the rows of a sketch with one entry ±1 per column: with ``shrink``, this is a
    sketch of many rows streamed into Frequent Directions.

    Args:
        rank: Rows kept.
        group: Rows per sum: 1 streams every row. "auto" streams single rows as long as that takes a
            fraction of a second (thousands of rows of a small network, the first ``rank`` rows of a large
            one), then sums of 4 rows and four times as many whenever half as many sums as are kept have
            come in, up to max(64, 6·rank): there the arithmetic of truncation stays below that of the
            backward passes.
        shrink: Subtract the (rank+1)-th eigenvalue at every truncation (Frequent Directions). With
            group=1, :math:`0 \preceq \Omega-\hat\Omega` and the Frequent Directions bound hold.
        merge: "rows" truncates the stacked factors of tasks back to ``rank``; "stack" keeps them all.

    References:
        Frequent Directions: Simple and Deterministic Matrix Sketching (Ghashami et al., 2016)
        https://arxiv.org/abs/1501.01711
    """

    rank: int = 50
    group: int | Literal["auto"] = "auto"
    shrink: bool = False
    merge: Literal["rows", "stack"] = "rows"

    def __post_init__(self) -> None:
        keep_positive(self, "rank")
        if self.group != "auto":
            keep_positive(self, "group", otherwise="or 'auto'")
        if self.merge not in ("rows", "stack"):
            raise ValueError(f"merge must be 'rows' or 'stack', got {self.merge!r}")

    @property
    def width(self) -> int:
        """Rows kept while streaming."""
        return max(self.rank, _LEAST)

    def alone(self, dim: int) -> int:
        """How many rows of ``dim`` entries enter one by one before rows are summed."""
        each = (
            7 * self.width * dim
        )  # operations per row: half a truncation's products and rotation
        return max(self.rank, _WORK // each) if self.group == "auto" else self.rank

    def group_sizes(self) -> Iterator[int]:
        """Rows per sum, sum by sum, once rows are summed."""
        if self.group != "auto":
            yield from itertools.repeat(self.group)
        size, most = 4, max(64, 6 * self.rank)
        while size < most:
            yield from itertools.repeat(size, self.width // 2)
            size *= 4
        yield from itertools.repeat(most)

    def hash_ids(self, setting: Setting) -> tuple[str, ...]:
        if self.group == 1:
            return ()
        return (SketchHash.draw(1, setting.draw.generator("groups")).id,)

    def start(self, setting: Setting) -> _State:
        return _State(self, setting)

    def update(self, state: Any, rows: RowBatch) -> None:
        alone = len(rows) if self.group == 1 else min(len(rows), state.alone - state.single)
        if rows.columns is None:
            self._update_whole(state, rows, alone)
            return
        kept = min(alone, state.room)
        if kept:
            state.fill(_some(rows, slice(0, kept)))
        if kept < alone:
            for block in _some(rows, slice(kept, alone)).blocks():
                state.write(block)
        state.single += alone
        if alone < len(rows):
            state.take(_some(rows, slice(alone, None)))

    def _update_whole(self, state: _State, rows: RowBatch, alone: int) -> None:
        """Rows that cannot be cut: written out, then summed where sums are asked for."""
        state.groups.flush()  # what waits belongs to the sum that they go on with
        for i, row in enumerate(row for block in rows.blocks() for row in block):
            if i < alone:
                state.write(row.unsqueeze(0))
                state.single += 1
                continue
            current = state.current
            current += state.hash.signs(rows.index[i : i + 1]).to(row) * row
            state.count(1)

    def finish(self, state: Any) -> FactoredMatrix:
        state.groups.flush()
        if state.pending:
            state.push()
        if state.filled:
            state.truncate()
        return FactoredMatrix(state.result())

    def nbytes(self, setting: Setting) -> int:
        # the result, basis and buffer; the rotation is in place
        return setting.nbytes(3 * self.width * setting.dim)

    def add(self, old: PSDMatrix, offset: Offset, new: PSDMatrix) -> tuple[PSDMatrix, Offset]:
        assert isinstance(old, FactoredMatrix)
        assert isinstance(new, FactoredMatrix)
        stacked, e = stack(old, offset, new)
        if self.merge == "stack":
            return stacked, e
        return rotate(stacked, e, self.rank, self.shrink)
