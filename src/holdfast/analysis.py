r"""Numbers about importance matrices, without writing out m × m entries where that can be avoided."""

from typing import Literal

import torch
from torch import Tensor

from holdfast.matrices import (
    BlockDiagonalMatrix,
    DiagonalMatrix,
    FactoredMatrix,
    KroneckerMatrix,
    PartsMatrix,
    PSDMatrix,
    SumMatrix,
    kronecker_sums,
)

__all__ = ["frobenius_error", "inner", "spectrum", "stable_rank"]


def inner(a: PSDMatrix, b: PSDMatrix) -> float:
    r"""The Frobenius inner product :math:`\mathrm{tr}(A B)`, in float64."""
    if a.dim != b.dim:
        raise ValueError(f"matrices must have the same size, got {a.dim} and {b.dim}")
    for x, y in ((a, b), (b, a)):
        if isinstance(x, DiagonalMatrix):
            return float(x.values.double() @ y.diagonal().double())
    for x, y in ((a, b), (b, a)):
        if isinstance(x, SumMatrix):
            return sum(inner(part, y) for part in x.parts)
    if isinstance(a, FactoredMatrix) and isinstance(b, FactoredMatrix):
        return float((a.factor.double() @ b.factor.double().T).square().sum())
    for x, y in ((a, b), (b, a)):
        if isinstance(y, FactoredMatrix):  # tr(X FᵀF) = Σ fᵀ X f
            return sum(float(f @ (x @ f)) for f in y.factor.double())
    if isinstance(a, BlockDiagonalMatrix) and isinstance(b, BlockDiagonalMatrix):
        if [s.shape for s in a.stacks] == [s.shape for s in b.stacks]:
            pairs = zip(a.stacks, b.stacks, strict=True)
            return sum(float((s.double() * t.double()).sum()) for s, t in pairs)
    if isinstance(a, PartsMatrix) and isinstance(b, PartsMatrix) and a.places == b.places:
        return sum(inner(x, y) for x, y in zip(a.parts, b.parts, strict=True))
    if isinstance(a, KroneckerMatrix) and isinstance(b, KroneckerMatrix) and a.like(b):
        blocks = zip(a.blocks, b.blocks, strict=True)
        rest = float(a.rest.double() @ b.rest.double())
        return rest + sum(kronecker_sums.inner(one, two) for one, two in blocks)
    return float((a.dense().double() * b.dense().double()).sum())


def frobenius_error(approximate: PSDMatrix, exact: PSDMatrix) -> float:
    r"""The squared relative error :math:`\lVert\hat\Omega-\Omega\rVert_F^2 / \lVert\Omega\rVert_F^2`.

    Example:
        >>> ones = FactoredMatrix(torch.ones(1, 4))
        >>> frobenius_error(DiagonalMatrix(torch.ones(4)), ones)
        0.75
    """
    norm = inner(exact, exact)
    if norm == 0:
        raise ValueError("the exact matrix is zero: a relative error is not defined")
    return max(0.0, (inner(approximate, approximate) - 2 * inner(approximate, exact)) / norm + 1)


def spectrum(matrix: PSDMatrix) -> Tensor:
    """All m eigenvalues, largest first, in float64; a factored matrix has zeros at the end."""
    if isinstance(matrix, DiagonalMatrix):
        values = matrix.values.double()
    elif isinstance(matrix, FactoredMatrix):
        small = torch.linalg.eigvalsh(matrix.gram())
        if len(small) > matrix.dim:
            small = small.sort(descending=True).values[: matrix.dim]
        values = torch.cat([small, small.new_zeros(matrix.dim - len(small))])
    elif isinstance(matrix, BlockDiagonalMatrix):
        values = torch.cat([torch.linalg.eigvalsh(s.double()).flatten() for s in matrix.stacks])
    elif isinstance(matrix, KroneckerMatrix):
        values = torch.cat([matrix.rest.double(), *(b.spectrum() for b in matrix.blocks)])
    else:
        values = torch.linalg.eigvalsh(matrix.dense().double())
    return values.clamp(min=0).sort(descending=True).values


def stable_rank(matrix: PSDMatrix, definition: Literal["trace", "frobenius"] = "trace") -> float:
    r"""How many directions matter.

    Args:
        matrix: Ω.
        definition: "trace" is :math:`\mathrm{tr}\,\Omega/\lambda_1 = \lVert W\rVert_F^2/\lVert
            W\rVert_2^2`, the r of the paper's Theorem 1; "frobenius" is
            :math:`\lVert\Omega\rVert_F^2/\lambda_1^2`, which the paper's printed 1.26 is.
    """
    if definition not in ("trace", "frobenius"):
        raise ValueError(f"definition must be 'trace' or 'frobenius', got {definition!r}")
    values = spectrum(matrix)
    largest = float(values[0])
    if largest == 0:
        raise ValueError("the matrix is zero: its stable rank is not defined")
    if definition == "trace":
        return float(values.sum()) / largest
    return float(values.square().sum()) / largest**2
