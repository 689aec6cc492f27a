"""Ω̂ as a value: the closed set of representations."""

from holdfast.matrices.base import Offset, PSDMatrix
from holdfast.matrices.block_diagonal import BlockDiagonalMatrix
from holdfast.matrices.dense import DenseMatrix
from holdfast.matrices.diagonal import DiagonalMatrix
from holdfast.matrices.factored import FactoredMatrix
from holdfast.matrices.kronecker import KroneckerMatrix
from holdfast.matrices.parts import PartsMatrix
from holdfast.matrices.sum import SumMatrix

__all__ = [
    "MATRICES",
    "BlockDiagonalMatrix",
    "DenseMatrix",
    "DiagonalMatrix",
    "FactoredMatrix",
    "KroneckerMatrix",
    "Offset",
    "PSDMatrix",
    "PartsMatrix",
    "SumMatrix",
]

MATRICES: dict[str, type[PSDMatrix]] = {
    "diagonal": DiagonalMatrix,
    "block_diagonal": BlockDiagonalMatrix,
    "factored": FactoredMatrix,
    "dense": DenseMatrix,
    "sum": SumMatrix,
    "parts": PartsMatrix,
    "kronecker": KroneckerMatrix,
}
