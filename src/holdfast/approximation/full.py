"""The whole matrix, in whichever exact form is smaller."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from holdfast.approximation.base import Approximation, Setting
from holdfast.approximation.count_sketch import stack
from holdfast.matrices import DenseMatrix, FactoredMatrix, Offset, PSDMatrix
from holdfast.rows import RowBatch

__all__ = ["Full"]

_SMALL = 2048  # entries a side up to which a dense matrix (16 MB) is the simplest form
_BUFFER = 1024  # rows between two compressions
# Share of the trace that compression may drop: about the rounding of the rows themselves.
_DROPPED = {torch.float32: 1e-7, torch.float64: 1e-15}


def compress(matrix: FactoredMatrix, offset: Offset) -> tuple[FactoredMatrix, Offset]:
    """The same matrix with as many rows as its numerical rank."""
    return matrix.trimmed(_DROPPED[matrix.factor.dtype], offset)


@dataclass
class _State:
    dense: Tensor | None
    factor: Tensor
    buffer: list[Tensor]

    def compress(self) -> None:
        rows = torch.cat([self.factor, *self.buffer])
        self.factor = compress(FactoredMatrix(rows), ())[0].factor
        self.buffer.clear()


@dataclass(frozen=True)
class Full(Approximation):
    """No approximation: all of Ω.

    Args:
        form: "dense" writes out m × m entries; "factored" keeps as many rows as the numerical rank,
            dropping at most 1e-7 of the trace per compression (1e-15 in float64); "auto" takes "dense" up to
            m = 2,048 and "factored" above, as the importance matrices of networks have few directions.
    """

    form: Literal["auto", "dense", "factored"] = "auto"

    def __post_init__(self) -> None:
        if self.form not in ("auto", "dense", "factored"):
            raise ValueError(f"form must be 'auto', 'dense' or 'factored', got {self.form!r}")

    @property
    def fits_int8(self) -> bool:
        return self.form != "dense"

    def _dense(self, dim: int) -> bool:
        return self.form == "dense" or (self.form == "auto" and dim <= _SMALL)

    def start(self, setting: Setting) -> _State:
        m = setting.dim
        return _State(setting.zeros(m, m) if self._dense(m) else None, setting.zeros(0, m), [])

    def update(self, state: Any, rows: RowBatch) -> None:
        for block in rows.blocks():
            if state.dense is not None:
                state.dense.addmm_(block.T, block)
            else:
                state.buffer.append(block)
                if sum(map(len, state.buffer)) >= _BUFFER:
                    state.compress()

    def finish(self, state: Any) -> PSDMatrix:
        if state.dense is not None:
            return DenseMatrix(state.dense)
        state.compress()
        return FactoredMatrix(state.factor)

    def nbytes(self, setting: Setting) -> int:
        m = setting.dim
        return setting.nbytes(m * m if self._dense(m) else 2 * m * min(m, 2 * _BUFFER))

    def add(self, old: PSDMatrix, offset: Offset, new: PSDMatrix) -> tuple[PSDMatrix, Offset]:
        if isinstance(old, FactoredMatrix) and isinstance(new, FactoredMatrix):
            return compress(*stack(old, offset, new))
        if isinstance(old, FactoredMatrix) and offset:  # a grown network changed the form
            offset = old.lift(offset[0]), offset[0] @ offset[0]
        return DenseMatrix(old.dense() + new.dense()), offset
