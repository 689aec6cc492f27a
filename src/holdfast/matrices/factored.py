r"""FᵀF with a few rows: sketches and low rank."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from holdfast import kernels
from holdfast.matrices.base import Offset, PSDMatrix, compute_dtype, scatter, vector, weight

__all__ = ["FactoredMatrix"]

_COLUMNS = 2**18  # columns turned into full precision at a time: 50 rows of them are 52 MB


def _parts(vector: Tensor, rows: Tensor, first: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of ``vector``, which begins at column ``first``, each with its columns of ``rows``."""
    length = vector.numel()
    step = _COLUMNS if rows.dtype != vector.dtype else max(1, length)
    for start in range(0, length, step):
        part = vector[start : start + step]
        yield part, rows[:, first + start : first + start + part.numel()]


class FactoredMatrix(PSDMatrix):
    r""":math:`\Omega = F^\top F`, F with few rows.

    Args:
        rows: F, shape (rows, m): floating point, or int8 with ``scale``.
        scale: One number per row, for int8.

    Attributes:
        rows: F as it is stored.
        scale: What int8 rows are multiplied by; None for others.

    Example:
        >>> FactoredMatrix(torch.tensor([[1.0, 2.0]])).dense().tolist()
        [[1.0, 2.0], [2.0, 4.0]]
    """

    def __init__(self, rows: Tensor, scale: Tensor | None = None) -> None:
        self.rows, self.scale, self.dim = rows, scale, rows.shape[1]

    @property
    def offset_length(self) -> int:
        return 1

    @property
    def has_constant(self) -> bool:
        return False

    @property
    def state_length(self) -> int:
        return self.rows.shape[0]

    @property
    def factor(self) -> Tensor:
        """F in full precision, shape (rows, m)."""
        rows = self.rows.to(compute_dtype(self.rows))
        return rows if self.scale is None else rows * self.scale.unsqueeze(1)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        rows = {"rows": self.rows}
        return rows if self.scale is None else {**rows, "scale": self.scale}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        return cls(tensors["rows"], tensors.get("scale"))

    def project(self, v: Tensor) -> Tensor:
        """F v, in one read of F."""
        return self._project([vector(v, self.dim)])

    def lift(self, u: Tensor) -> Tensor:
        """Fᵀ u, in one read of F."""
        dtype = compute_dtype(self.rows, u)
        u = u.to(dtype)
        if self.rows.dtype == dtype:
            return u @ self.rows
        out = u.new_zeros(self.dim)
        self._add_lift_([out], u, 1.0)
        return out

    def _project(self, pieces: Sequence[Tensor]) -> Tensor:
        """F v for a vector in pieces: views of F, so that a large model needs no flat copy."""
        rows, dtype, first = self.rows, compute_dtype(self.rows, *pieces), 0
        if len(pieces) == 1 and rows.dtype == dtype:
            return rows @ pieces[0].to(dtype)
        compiled = kernels.serves(rows, *pieces)
        u = torch.zeros(rows.shape[0], dtype=dtype, device=rows.device)
        for piece in pieces:
            if compiled:
                kernels.add_project_(u, rows, first, piece)
            else:
                for part, columns in _parts(piece, rows, first):
                    u.addmv_(columns.to(dtype), part.to(dtype))
            first += piece.numel()
        return u if self.scale is None else u * self.scale.to(dtype)

    def _add_lift_(self, targets: Sequence[Tensor], u: Tensor, alpha: float) -> None:
        """Add alpha · Fᵀ u to a vector in pieces, all in the precision of u."""
        rows, first = self.rows, 0
        if self.scale is not None:
            u = u * self.scale.to(u.dtype)
        compiled = kernels.serves(rows, u, *targets)
        for target in targets:
            if compiled:
                kernels.add_lift_(target, rows, first, u, alpha)
            else:
                for part, columns in _parts(target, rows, first):
                    part.addmv_(columns.to(u.dtype).T, u, alpha=alpha)
            first += target.numel()

    def __matmul__(self, v: Tensor) -> Tensor:
        return self.lift(self.project(v))

    def quadratic(self, v: Tensor) -> Tensor:
        return self.project(v).square().sum()

    def evaluate(self, deltas: Sequence[Tensor], offset: Offset = ()) -> tuple[Tensor, Tensor]:
        u = self._project(deltas)
        if offset:
            u = u + offset[0]
        return u @ u, u

    def product(self, state: Tensor) -> Tensor:
        return self.lift(state)

    def add_product_(self, targets: Sequence[Tensor], state: Tensor, alpha: float) -> None:
        if all(t.dtype == state.dtype for t in targets):
            self._add_lift_(targets, state, alpha)
        else:
            super().add_product_(targets, state, alpha)

    def moved(self, offset: Offset, d: Tensor) -> Offset:
        e = self.project(d)
        return (e + offset[0] if offset else e,)

    def recentred(self, offset: Offset, stored: PSDMatrix, eps: float) -> Offset:
        return offset  # of the rows, whatever they are

    def scaled_offset(self, offset: Offset, scale: float) -> Offset:
        return tuple(scale**0.5 * part for part in offset)

    def expand_offset(self, offset: Offset, dim: int, index: Tensor) -> Offset:
        return offset

    def gram(self) -> Tensor:
        """F Fᵀ in float64, rows × rows; its eigenvalues are those of Ω that are not zero."""
        F = self.factor
        out = torch.zeros(len(F), len(F), dtype=torch.float64, device=F.device)
        for first in range(0, self.dim, _COLUMNS):
            part = F[:, first : first + _COLUMNS].double()
            out += part @ part.T
        return out

    def trimmed(self, energy: float, offset: Offset = ()) -> tuple["FactoredMatrix", Offset]:
        r"""Fewer rows: eigenvectors whose eigenvalues sum to at most ``energy`` of the trace are left out.

        With an offset there is one row more, of zeros: :math:`\lVert F\delta + e\rVert^2` has a constant
        part outside the range of F, which is not zero once tasks with different anchors share directions.
        """
        F = self.factor
        values, vectors = torch.linalg.eigh(self.gram())  # ascending
        values = values.clamp(min=0)
        dropped = values.cumsum(0) <= energy * values.sum()
        U, rest = vectors[:, ~dropped], vectors[:, dropped]
        rows = U.to(F.dtype).T @ F
        if not offset:
            return FactoredMatrix(rows), ()
        e = offset[0].double()
        constant = (rest.T @ e).norm().reshape(1)
        rows = torch.cat([rows, rows.new_zeros(1, self.dim)])
        return FactoredMatrix(rows), (torch.cat([U.T @ e, constant]).to(offset[0].dtype),)

    def diagonal(self) -> Tensor:
        return self.factor.square().sum(0)

    def trace(self) -> Tensor:
        if self.scale is not None or self.rows.dtype != compute_dtype(self.rows):
            return self.factor.square().sum()
        norms = torch.linalg.vector_norm(self.rows, dim=1)  # one read, no squares written out
        return norms.square().sum()

    def dense(self) -> Tensor:
        F = self.factor
        return F.T @ F

    def __rmul__(self, scale: float) -> Self:
        root = weight(scale) ** 0.5
        if self.scale is not None:
            return type(self)(self.rows, root * self.scale)
        return type(self)(root * self.rows)

    def scale_(self, scale: float) -> Self:
        (self.rows if self.scale is None else self.scale).mul_(scale**0.5)
        return self

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        if dtype == torch.int8:
            F = self.factor
            scale = F.abs().amax(1).clamp(min=torch.finfo(F.dtype).tiny) / 127
            rows = (F / scale.unsqueeze(1)).round().to(torch.int8)
            return type(self)(rows.to(device), scale.to(device))
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"a factor can be stored in floating point or int8, not {dtype}")
        if dtype is None:
            scale_ = None if self.scale is None else self.scale.to(device)
            return type(self)(self.rows.to(device), scale_)
        rows = self.rows if self.scale is None else self.factor
        return type(self)(rows.to(device=device, dtype=dtype))

    def expand(self, dim: int, index: Tensor) -> Self:
        return type(self)(scatter(self.rows, dim, index), self.scale)
