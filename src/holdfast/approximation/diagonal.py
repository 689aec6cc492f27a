"""The exact diagonal."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from holdfast.approximation.base import Approximation, Setting
from holdfast.matrices import DiagonalMatrix
from holdfast.rows import RowBatch

__all__ = ["Diagonal"]


@dataclass(frozen=True)
class Diagonal(Approximation):
    r""":math:`\mathrm{diag}(\sum_i w_i \circ w_i)`: squares of single rows, never of a batch mean."""

    def start(self, setting: Setting) -> Tensor:
        return setting.zeros(setting.dim)

    def update(self, state: Any, rows: RowBatch) -> None:
        rows.add_squared_sum_(state)

    def finish(self, state: Any) -> DiagonalMatrix:
        return DiagonalMatrix(state)

    def nbytes(self, setting: Setting) -> int:
        return setting.nbytes(setting.dim)
