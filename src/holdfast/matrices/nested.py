"""Matrices made of matrices: what their sums and direct sums have in common."""

import itertools
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from holdfast.matrices.base import Offset, PSDMatrix, vector

__all__ = ["NestedMatrix"]


class NestedMatrix(PSDMatrix):
    """A matrix whose parts act on vectors of their own.

    The stored tensors are those of the parts, called ``<place>.<kind>.<name>``; an offset is that of the
    first part, then that of the second, and so on: every part keeps the form that is exact for it.
    """

    parts: tuple[PSDMatrix, ...]

    @abstractmethod
    def views(self, pieces: Sequence[Tensor]) -> list[list[Tensor]]:
        """For every part, the pieces of its own vector: views of a vector in pieces."""

    @abstractmethod
    def _with(self, parts: Sequence[PSDMatrix]) -> Self:
        """The same with other parts of the same sizes."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return {
            f"{place:04d}.{_kind(part)}.{name}": tensor
            for place, part in enumerate(self.parts)
            for name, tensor in part.tensors.items()
        }

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    @property
    def offset_length(self) -> int:
        return sum(part.offset_length for part in self.parts)

    @property
    def has_constant(self) -> bool:
        return any(part.has_constant for part in self.parts)

    @property
    def state_length(self) -> int:
        return sum(part.state_length for part in self.parts)

    def offsets(self, offset: Offset) -> list[Offset]:
        """The offset of every part."""
        if not offset:
            return [() for _ in self.parts]
        left = iter(offset)
        return [tuple(itertools.islice(left, part.offset_length)) for part in self.parts]

    def evaluate(self, deltas: Sequence[Tensor], offset: Offset = ()) -> tuple[Tensor, Tensor]:
        each = zip(self.parts, self.views(deltas), self.offsets(offset), strict=True)
        found = [part.evaluate(pieces, own) for part, pieces, own in each]
        value = torch.stack([value for value, _ in found]).sum()
        return value, torch.cat([state for _, state in found])

    def product(self, state: Tensor) -> Tensor:
        out = state.new_zeros(self.dim)
        self.add_product_([out], state, 1.0)
        return out

    def add_product_(self, targets: Sequence[Tensor], state: Tensor, alpha: float) -> None:
        if any(target.dtype != state.dtype for target in targets):  # to be rounded once
            super().add_product_(targets, state, alpha)
            return
        states = state.split([part.state_length for part in self.parts])
        for part, pieces, own in zip(self.parts, self.views(targets), states, strict=True):
            part.add_product_(pieces, own, alpha)

    def __matmul__(self, v: Tensor) -> Tensor:
        return self.product(self.evaluate([vector(v, self.dim)])[1])

    def quadratic(self, v: Tensor) -> Tensor:
        return self.evaluate([vector(v, self.dim)])[0]

    def trace(self) -> Tensor:
        return torch.stack([part.trace() for part in self.parts]).sum()

    def __rmul__(self, scale: float) -> Self:
        return self._with([scale * part for part in self.parts])

    def scale_(self, scale: float) -> Self:
        for part in self.parts:
            part.scale_(scale)
        return self

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        return self._with([part.to(device=device, dtype=dtype) for part in self.parts])

    def moved(self, offset: Offset, d: Tensor) -> Offset:
        vectors = [joined(pieces) for pieces in self.views([vector(d, self.dim)])]
        each = zip(self.parts, self.offsets(offset), vectors, strict=True)
        return tuple(itertools.chain(*(part.moved(own, v) for part, own, v in each)))

    def recentred(self, offset: Offset, stored: PSDMatrix, eps: float) -> Offset:
        assert isinstance(stored, NestedMatrix)
        each = zip(self.parts, self.offsets(offset), stored.parts, strict=True)
        return tuple(itertools.chain(*(part.recentred(own, s, eps) for part, own, s in each)))

    def raised(self, offset: Offset, value: Tensor) -> Offset:
        offsets = self.offsets(offset)
        place = next(i for i, part in enumerate(self.parts) if part.has_constant)
        offsets[place] = self.parts[place].raised(offsets[place], value)
        return tuple(itertools.chain(*offsets))

    def scaled_offset(self, offset: Offset, scale: float) -> Offset:
        each = zip(self.parts, self.offsets(offset), strict=True)
        return tuple(itertools.chain(*(part.scaled_offset(own, scale) for part, own in each)))


def joined(pieces: Sequence[Tensor]) -> Tensor:
    """A vector in pieces as one; a single piece as it is."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def parts_of(tensors: Mapping[str, Tensor]) -> Iterator[PSDMatrix]:
    """The parts, from tensors that are named as :attr:`NestedMatrix.tensors` names them."""
    from holdfast.matrices import MATRICES

    def part(name: str) -> tuple[str, ...]:
        return tuple(name.split(".")[:2])

    for (place, kind), names in itertools.groupby(sorted(tensors), part):
        prefix = f"{place}.{kind}."
        yield MATRICES[kind].from_tensors({n.removeprefix(prefix): tensors[n] for n in names})


def _kind(part: PSDMatrix) -> str:
    from holdfast.matrices import MATRICES

    return next(kind for kind, cls in MATRICES.items() if cls is type(part))
