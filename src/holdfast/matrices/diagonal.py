"""diag(d)."""

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from holdfast.matrices.base import PSDMatrix, compute_dtype, refuse_int8, scatter, vector, weight

__all__ = ["DiagonalMatrix"]


class DiagonalMatrix(PSDMatrix):
    """A diagonal matrix.

    Example:
        >>> DiagonalMatrix(torch.tensor([1.0, 3.0])).quadratic(torch.ones(2)).item()
        4.0
    """

    def __init__(self, values: Tensor) -> None:
        self.values, self.dim = values, values.shape[0]

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return {"values": self.values}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        return cls(tensors["values"])

    def __matmul__(self, v: Tensor) -> Tensor:
        dtype = compute_dtype(self.values, v)
        return self.values.to(dtype) * vector(v, self.dim).to(dtype)

    def diagonal(self) -> Tensor:
        return self.values.to(compute_dtype(self.values))

    def dense(self) -> Tensor:
        return self.diagonal().diag()

    def __rmul__(self, scale: float) -> Self:
        return type(self)(weight(scale) * self.values)

    def __add__(self, other: "DiagonalMatrix") -> "DiagonalMatrix":
        return DiagonalMatrix(self.values + other.values)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        refuse_int8("a diagonal", dtype)
        return type(self)(self.values.to(device=device, dtype=dtype))

    def expand(self, dim: int, index: Tensor) -> Self:
        return type(self)(scatter(self.values, dim, index))
