r"""What we can afford: one pass over the rows of W becomes Ω̂."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdfast.hashing import Draw
from holdfast.matrices import Offset, PSDMatrix
from holdfast.parameters import ParameterSpace
from holdfast.rows import RowBatch
from holdfast.structure import LayerShape, layers_within

__all__ = ["Approximation", "Setting", "rows_at_once"]


_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Setting:
    """Where an approximation works: the held parameters, the randomness, the device.

    ``layers`` says which of the parameters act as matrices.
    """

    space: ParameterSpace
    draw: Draw
    device: torch.device = _CPU
    dtype: torch.dtype = torch.float32
    layers: tuple[LayerShape, ...] = ()

    def part(self, positions: Sequence[int], place: int) -> "Setting":
        """The setting of the ``place``-th part, which has the parameters at some positions."""
        layers = layers_within(self.layers, self.space, positions)
        space, draw = self.space.part(positions), self.draw.part(place)
        return dataclasses.replace(self, space=space, draw=draw, layers=layers)

    @property
    def dim(self) -> int:
        """The number m of held entries."""
        return self.space.dim

    def zeros(self, *shape: int) -> Tensor:
        """A zero tensor where rows are accumulated."""
        return torch.zeros(shape, device=self.device, dtype=self.dtype)

    def empty(self, *shape: int) -> Tensor:
        """Room for rows, not written to."""
        return torch.empty(shape, device=self.device, dtype=self.dtype)

    def nbytes(self, count: int) -> int:
        """Bytes of ``count`` numbers."""
        return count * torch.empty(0, dtype=self.dtype).element_size()


class Approximation(ABC):
    r"""A recipe for :math:`\hat\Omega \approx \sum_i w_i w_i^\top`; never learns what a network is.

    Must implement: :meth:`start`, :meth:`update`, :meth:`finish`. May implement: :meth:`nbytes` (so
    that memory is refused before it is taken), :meth:`add` (where adding two matrices is more than
    adding entries), :meth:`hash_ids` (where randomness must never be shared).
    """

    @abstractmethod
    def start(self, setting: Setting) -> Any:
        """An empty state, of any kind."""

    @abstractmethod
    def update(self, state: Any, rows: RowBatch) -> None:
        """Take more rows into the state, in place."""

    @abstractmethod
    def finish(self, state: Any) -> PSDMatrix:
        """The sum over all rows; it is divided by n elsewhere, once."""

    @property
    def fits_int8(self) -> bool:
        """Whether its matrix may be stored in int8, which only a factor can: it has a scale per row."""
        return True

    def nbytes(self, setting: Setting) -> int:
        """An estimate of the bytes needed while consolidating, beside the network."""
        return 0

    def hash_ids(self, setting: Setting) -> tuple[str, ...]:
        """Names of the hash functions drawn, which no other task may share."""
        return ()

    def add(self, old: PSDMatrix, offset: Offset, new: PSDMatrix) -> tuple[PSDMatrix, Offset]:
        """Old + new, with the offset of the sum; ``new`` has none. Weights are already in."""
        if type(old) is not type(new) or not hasattr(old, "__add__"):
            raise TypeError(f"{type(self).__name__} does not say how to add {old!r} and {new!r}")
        return old + new, offset

    def embed(self, matrix: PSDMatrix, space: ParameterSpace, index: Tensor) -> PSDMatrix:
        """The matrix in a larger parameter space."""
        return matrix.expand(space.dim, index)

    def embed_offset(
        self, matrix: PSDMatrix, offset: Offset, space: ParameterSpace, index: Tensor
    ) -> Offset:
        """The offset of what :meth:`embed` returns."""
        return matrix.expand_offset(offset, space.dim, index)


def rows_at_once(kept: int) -> int:
    """Rows that are written out together where ``kept`` numbers per parameter are read for them.

    Too few and the memory that is read decides how long it takes; as many as are kept double the memory.
    """
    return min(max(8, kept), 64)
