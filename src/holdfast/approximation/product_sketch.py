"""Sketches with a full matrix of signs or numbers: F = S W, one product per block of rows."""

import hashlib
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.approximation.base import Approximation, Setting, rows_at_once
from holdfast.approximation.count_sketch import advise, merged
from holdfast.hashing import Draw
from holdfast.matrices import FactoredMatrix, Offset, PSDMatrix
from holdfast.rows import RowBatch

__all__ = ["ProductSketch"]


@dataclass
class _State:
    draw: Draw
    factor: Tensor  # (size, m)
    columns: Tensor  # of S, transposed: those of the chunk at hand
    room: Tensor  # for rows of W
    number: int = 0  # of that chunk
    rows: int = 0


class ProductSketch(Approximation):
    r""":math:`F = S W / \sqrt t` with an S of t full rows, of which only the columns at hand are kept.

    The rows of W are written out and multiplied, block by block: t backward passes per batch would
    cost t epochs. The columns of S belong to row indices: they are drawn in chunks of consecutive
    indices, each from its own generator, so that no cut into batches changes them.

    Must implement: :attr:`chunk`, :meth:`columns`. The entries of S have mean square 1.
    """

    size: int
    merge: Literal["rows", "stack"]

    @property
    @abstractmethod
    def chunk(self) -> int:
        """Row indices whose columns of S are drawn together."""

    @abstractmethod
    def columns(self, generator: np.random.Generator) -> NDArray[Any]:
        """The columns of S for one chunk, transposed: (chunk, size)."""

    def hash_ids(self, setting: Setting) -> tuple[str, ...]:
        drawn = self.columns(setting.draw.generator("entries"))
        return (hashlib.sha256(drawn.tobytes()).hexdigest()[:16],)

    def start(self, setting: Setting) -> _State:
        factor = setting.zeros(self.size, setting.dim)
        room = setting.empty(rows_at_once(self.size), setting.dim)
        return _State(setting.draw, factor, self._drawn(setting.draw, 0), room)

    def _drawn(self, draw: Draw, number: int) -> Tensor:
        return torch.from_numpy(self.columns(draw.generator("entries", number)))

    def update(self, state: Any, rows: RowBatch) -> None:
        first = 0
        for block in rows.written(state.room):
            columns = self._columns(state, rows.index[first : first + len(block)])
            state.factor.addmm_(columns.to(block).T, block)
            first += len(block)
        state.rows += first

    def _columns(self, state: _State, index: Tensor) -> Tensor:
        """The columns of S for these row indices, transposed."""
        numbers = index // self.chunk
        found = state.columns.new_empty(len(index), self.size)
        for number in numbers.unique().tolist():
            if number != state.number:
                state.number, state.columns = number, self._drawn(state.draw, number)
            here = numbers == number
            found[here] = state.columns[index[here] % self.chunk]
        return found

    def finish(self, state: Any) -> FactoredMatrix:
        advise(self, self.size, state.rows)
        return FactoredMatrix(state.factor).scale_(1 / self.size)

    def nbytes(self, setting: Setting) -> int:
        return setting.nbytes((self.size + rows_at_once(self.size)) * setting.dim)

    def add(self, old: PSDMatrix, offset: Offset, new: PSDMatrix) -> tuple[PSDMatrix, Offset]:
        return merged(self.merge, old, offset, new)
