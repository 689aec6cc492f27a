"""The leading rows of a factor, from its small Gram matrix; and what they leave."""

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.matrices import FactoredMatrix, Offset

__all__ = ["COLUMNS", "Dropped", "leading", "products", "rotate", "truncated"]

COLUMNS = 2**13  # columns at a time: few enough to stay in a cache, enough to keep a product busy


def rotate(
    matrix: FactoredMatrix, offset: Offset, keep: int, shrink: bool = False
) -> tuple[FactoredMatrix, Offset]:
    r"""The best approximation with ``keep`` rows, from the small Gram matrix :math:`F F^\top`.

    :math:`F F^\top = U \Lambda U^\top`; F becomes the first rows of :math:`U^\top F`, the offset rotates
    along. With ``shrink`` the (keep + 1)-th eigenvalue is subtracted from all kept ones
    (Frequent Directions).
    """
    F = matrix.factor
    if len(F) <= keep:
        return matrix, offset
    U, _ = leading(matrix.gram(), keep, shrink)
    U = U.to(F.dtype)
    return FactoredMatrix(U.T @ F), tuple(U.T @ e.to(U.dtype) for e in offset)


@dataclass(frozen=True)
class Dropped:
    """The rows that truncation takes from a factor, written out where asked for."""

    factor: Tensor
    rotation: Tensor  # the rows that are dropped, in terms of those of the factor

    def columns(self, part: slice) -> Tensor:
        """Some columns of the dropped rows."""
        return self.rotation @ self.factor[:, part]


def truncated(
    matrix: FactoredMatrix, keep: int, shrink: bool = False
) -> tuple[FactoredMatrix, Dropped]:
    """What :func:`rotate` returns, and what it drops: all of it, nothing is counted twice."""
    F = matrix.factor
    _, vectors, shares = _shares(matrix.gram(), keep, shrink)
    some = shares < 1
    kept = (vectors[:, :keep] * shares[:keep].sqrt()).T.to(F.dtype)
    lost = (vectors[:, some] * (1 - shares[some]).sqrt()).T.to(F.dtype)
    return FactoredMatrix(kept @ F), Dropped(F, lost)


def leading(gram: Tensor, keep: int, shrink: bool) -> tuple[Tensor, Tensor]:
    """The rotation U to the leading ``keep`` rows, and the squared lengths these will have."""
    values, vectors, shares = _shares(gram, keep, shrink)
    U, lengths, shares = vectors[:, :keep], values[:keep], shares[:keep]
    return (U * shares.sqrt(), lengths * shares) if shrink else (U, lengths)


def _shares(gram: Tensor, keep: int, shrink: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues, largest first, eigenvectors, and the share of each eigenvalue that is kept."""
    values, vectors = torch.linalg.eigh(gram)
    order = values.argsort(descending=True)
    values, vectors = values[order].clamp(min=0), vectors[:, order]
    shares = (torch.arange(len(values), device=values.device) < keep).to(values.dtype)
    if shrink:
        least = torch.finfo(values.dtype).tiny
        shares *= (1 - values[keep] / values.clamp(min=least)).clamp(min=0)
    return values, vectors, shares


def products(A: Tensor, B: Tensor) -> Tensor:
    """A Bᵀ in float64; the products of a few columns are summed in the precision of the rows."""
    out = torch.zeros(len(A), len(B), dtype=torch.float64, device=A.device)
    for first in range(0, A.shape[1], COLUMNS):
        part = slice(first, first + COLUMNS)
        out += A[:, part] @ B[:, part].T
    return out
