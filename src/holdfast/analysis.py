r"""Numbers about importance matrices, without writing out m × m entries where that can be avoided."""

from typing import Literal

import torch
from torch import Tensor

from holdfast import memory
from holdfast.autocast import outside_autocast
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
from holdfast.matrices.centre import largest_ritz

__all__ = ["frobenius_error", "inner", "largest_eigenvalue", "spectrum", "stable_rank"]

_SMALL = 2048  # entries a side up to which a matrix may be written out
_INSTEAD = "largest_eigenvalue, trace and frobenius_error need no more memory than the matrix"


@outside_autocast
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
    needed = 3 * 8 * a.dim**2  # both in float64, and their product
    advice = (
        "matrices of one kind, or with a diagonal or a factored one, need no more than they have"
    )
    memory.require(f"the product of {a!r} and {b!r}, written out,", needed, a.device, advice)
    return float((a.dense().double() * b.dense().double()).sum())


@outside_autocast
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


@outside_autocast
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
        for block in matrix.blocks:
            _, _, groups, outputs, columns = block.place
            side = outputs * columns if len(block.inputs) > 1 else max(outputs, columns)
            what = f"all eigenvalues of a layer of {outputs} x {columns}"
            memory.require(what, 3 * 8 * groups * side**2, matrix.device, _INSTEAD)
        values = torch.cat([matrix.rest.double(), *(b.spectrum() for b in matrix.blocks)])
    elif isinstance(matrix, PartsMatrix):
        values = torch.cat([spectrum(part) for part in matrix.parts])
        values = torch.cat([values, values.new_zeros(matrix.dim - len(values))])
    else:
        memory.require(f"all of {matrix!r}", 8 * matrix.dim**2, matrix.device, _INSTEAD)
        values = torch.linalg.eigvalsh(matrix.dense().double())
    return values.clamp(min=0).sort(descending=True).values


@outside_autocast
def largest_eigenvalue(matrix: PSDMatrix) -> float:
    """λ₁; by Lanczos iterations where all eigenvalues would need the matrix written out."""
    if isinstance(matrix, PartsMatrix):
        return max(largest_eigenvalue(part) for part in matrix.parts)
    products = isinstance(matrix, KroneckerMatrix) and (matrix.terms > 1 or matrix.thin)
    if matrix.dim > _SMALL and (products or isinstance(matrix, SumMatrix)):
        return _lanczos(matrix)
    return float(spectrum(matrix)[0])


def _lanczos(matrix: PSDMatrix) -> float:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(matrix.dim, generator=generator, dtype=torch.float64).to(matrix.device)
    return largest_ritz(lambda v: matrix @ v, start, steps=200, tolerance=1e-9)


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
    largest = largest_eigenvalue(matrix)
    if largest == 0:
        raise ValueError("the matrix is zero: its stable rank is not defined")
    if definition == "frobenius":
        return inner(matrix, matrix) / largest**2
    return float(matrix.diagonal().double().sum()) / largest
