"""All m × m entries."""

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from holdfast.matrices.base import PSDMatrix, compute_dtype, refuse_int8, scatter, vector, weight
from holdfast.matrices.rounding import rounded

__all__ = ["DenseMatrix"]


class DenseMatrix(PSDMatrix):
    """A matrix written out; for small m."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix, self.dim = matrix, matrix.shape[0]

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return {"matrix": self.matrix}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        return cls(tensors["matrix"])

    def __matmul__(self, v: Tensor) -> Tensor:
        dtype = compute_dtype(self.matrix, v)
        return self.matrix.to(dtype) @ vector(v, self.dim).to(dtype)

    def diagonal(self) -> Tensor:
        return self.matrix.diagonal().to(compute_dtype(self.matrix))

    def dense(self) -> Tensor:
        return self.matrix.to(compute_dtype(self.matrix))

    def __rmul__(self, scale: float) -> Self:
        scaled = weight(scale) * self.matrix.to(compute_dtype(self.matrix))
        return type(self)(rounded(scaled, self.matrix.dtype))

    def __add__(self, other: "DenseMatrix") -> "DenseMatrix":
        return DenseMatrix(self.matrix + other.matrix)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        refuse_int8("a dense matrix", dtype)
        return type(self)(rounded(self.matrix.to(device=device), dtype))

    def expand(self, dim: int, index: Tensor) -> Self:
        rows = scatter(self.matrix, dim, index)
        return type(self)(scatter(rows.T, dim, index).T.contiguous())
