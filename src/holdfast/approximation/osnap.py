"""Several signed entries per row instead of one."""

from dataclasses import dataclass
from typing import Any, Literal

from holdfast.approximation.base import Approximation, Setting
from holdfast.approximation.count_sketch import CountSketch, advise, check_merge, merged
from holdfast.configuration import keep_positive
from holdfast.matrices import FactoredMatrix, Offset, PSDMatrix
from holdfast.rows import RowBatch

__all__ = ["OSNAP"]


@dataclass(frozen=True)
class OSNAP(Approximation):
    r"""F = SW; a column of S has s entries ±1/√s, one in each of s blocks of rows.

    This block construction is, to the bit, ``CountSketch(size=size // nonzeros, copies=nonzeros)``:
    here the whole budget is named. The mean and the mean-square error are those of
    ``CountSketch(size=size)``; what more entries buy is a lighter tail.

    Args:
        size: The number t of rows kept, a multiple of ``nonzeros``.
        nonzeros: The number s of entries per column; each costs its own epoch of passes.
        merge: "rows" adds the sketches of tasks (constant memory; their hashes are independent, so
            the sum is again such a sketch of all rows); "stack" keeps them apart (memory grows with tasks).

    References:
        OSNAP: Faster Numerical Linear Algebra Algorithms via Sparser Subspace Embeddings
        (Nelson and Nguyen, 2013) https://arxiv.org/abs/1211.1002
    """

    size: int = 50
    nonzeros: int = 2
    merge: Literal["rows", "stack"] = "rows"

    def __post_init__(self) -> None:
        keep_positive(self, "size", "nonzeros")
        if self.size % self.nonzeros:
            raise ValueError(
                f"size must be a multiple of nonzeros={self.nonzeros}, got {self.size}; "
                f"{-(-self.size // self.nonzeros) * self.nonzeros} is one"
            )
        check_merge(self.merge)

    @property
    def sketch(self) -> CountSketch:
        """The same thing as copies of a CountSketch."""
        return CountSketch(self.size // self.nonzeros, self.nonzeros, self.merge)

    def hash_ids(self, setting: Setting) -> tuple[str, ...]:
        return self.sketch.hash_ids(setting)

    def start(self, setting: Setting) -> Any:
        return self.sketch.start(setting)

    def update(self, state: Any, rows: RowBatch) -> None:
        self.sketch.update(state, rows)

    def finish(self, state: Any) -> FactoredMatrix:
        advise(self, self.size, state.rows)
        return self.sketch.collect(state)

    def nbytes(self, setting: Setting) -> int:
        return self.sketch.nbytes(setting)

    def add(self, old: PSDMatrix, offset: Offset, new: PSDMatrix) -> tuple[PSDMatrix, Offset]:
        return merged(self.merge, old, offset, new)
