"""Sums of outer products: whole, or only their leading directions and their diagonal."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from holdfast.approximation.base import Setting
from holdfast.matrices.thin_block import Thin, leading, thin
from holdfast.products import add_product_

__all__ = ["Gram", "ThinGram", "WholeGram", "gram", "gram_size"]

_WIDE = 1024  # sides above which a thin sum takes less time than a whole one and its eigenvectors


def gram(setting: Setting, groups: int, side: int, rank: int | None) -> "Gram":
    """An empty sum that can give ``rank`` directions, or all of them."""
    if rank is not None and _is_wide(side, rank):
        return ThinGram(setting, groups, side, rank)
    return WholeGram(setting, groups, side)


def gram_size(groups: int, side: int, rank: int | None, *, read: bool = False) -> int:
    """The numbers that a sum takes, or what comes on top while it is read."""
    if rank is None:
        return 0 if read else 2 * groups * side**2  # the sum, and divided
    if _is_wide(side, rank):
        return groups * side * (4 if read else 1) * (ThinGram.capacity_for(rank) + 1)
    return groups * (8 * side**2 if read else side**2 + side * rank)  # eigenvectors in float64


def _is_wide(side: int, rank: int) -> bool:
    return side > max(_WIDE, 8 * rank)


class Gram(ABC):
    """Σ c cᵀ of rows c of (b, groups, T, n), for every group."""

    @abstractmethod
    def add(self, columns: Tensor) -> None:
        """Add the outer products of all rows."""

    @abstractmethod
    def trace(self) -> Tensor:
        """Of every group, (groups,)."""

    @abstractmethod
    def thin(self, rank: int, over: Tensor) -> Thin:
        """Leading directions and diagonal of the sum divided by ``over`` (groups,), as one term."""


class WholeGram(Gram):
    """All entries, as (groups, n, n)."""

    def __init__(self, setting: Setting, groups: int, side: int) -> None:
        self.matrix = setting.zeros(groups, side, side)

    def add(self, columns: Tensor) -> None:
        if columns.shape[1] == 1:
            flat = columns.reshape(-1, columns.shape[3])
            add_product_(self.matrix[0], flat.T, flat)
        else:
            flat = columns.transpose(0, 1).flatten(1, 2)
            self.matrix.baddbmm_(flat.mT, flat)

    def trace(self) -> Tensor:
        return self.matrix.diagonal(dim1=1, dim2=2).sum(1)

    def thin(self, rank: int, over: Tensor) -> Thin:
        matrix = (self.matrix / over[:, None, None]).unsqueeze(0)
        return thin(leading(matrix), matrix.diagonal(dim1=2, dim2=3), rank, matrix.dtype)


class ThinGram(Gram):
    """Leading directions in memory that grows with n, not n²; the diagonal is exact.

    Rows are kept until there are ``capacity`` of them, and then replaced by twice as many leading
    directions as are asked for. How they come in batches makes no difference.
    """

    def __init__(self, setting: Setting, groups: int, side: int, rank: int) -> None:
        self.kept = 2 * rank
        self.rows = setting.zeros(groups, self.capacity_for(rank), side)
        self.diagonal = setting.zeros(groups, side)
        self.count = 0

    @staticmethod
    def capacity_for(rank: int) -> int:
        """Rows that are held before they are reduced to 2·rank."""
        return 2 * rank + max(256, 2 * rank)

    def add(self, columns: Tensor) -> None:
        flat = columns.transpose(0, 1).flatten(1, 2)  # (groups, rows, n)
        while flat.shape[1]:
            piece = flat[:, : self.rows.shape[1] - self.count]
            self.diagonal += piece.square().sum(1)
            self.rows[:, self.count : self.count + piece.shape[1]] = piece
            self.count += piece.shape[1]
            flat = flat[:, piece.shape[1] :]
            if self.count == self.rows.shape[1]:
                self._reduce()

    def _reduce(self) -> None:
        rows = self.rows[:, : self.count]
        products = rows @ rows.mT
        self.count = min(self.kept, self.count)
        if not bool(products.isfinite().all()):
            return  # nor is the diagonal: refused by name, later
        _, vectors = torch.linalg.eigh(products.double())
        self.rows[:, : self.count] = vectors[..., -self.count :].flip(-1).mT.to(rows) @ rows

    def trace(self) -> Tensor:
        return self.diagonal.sum(1)

    def thin(self, rank: int, over: Tensor) -> Thin:
        self._reduce()
        roots = self.rows[:, : self.count].mT.double() / over.double().sqrt()[:, None, None]
        diagonal = self.diagonal / over[:, None]
        return thin(roots.unsqueeze(0), diagonal.unsqueeze(0), rank, self.rows.dtype)
