r"""Ω̂ as a value: a positive semi-definite matrix in the memory we have.

Beside the matrix itself, a penalty with several anchors needs the quadratic function

.. math:: q(\delta) = \delta^\top \Omega \delta + 2 b^\top \delta + k

whose extra terms are its *offset*: ``(b, k)``, or ``(e,)`` with
:math:`q(\delta) = \lVert F\delta + e \rVert^2` for a factored matrix. The empty offset is zero.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from holdfast.autocast import outside_autocast
from holdfast.matrices.centre import centre

__all__ = ["Offset", "PSDMatrix", "compute_dtype"]

Offset = tuple[Tensor, ...]

# Of what rounding changes: with all of it, much that holds is lost over several tasks, and with a
# hundredth still nothing is far away.
_SHARE = 1 / 16

# What people call on a matrix, wherever they are.
_ARITHMETIC = ("__matmul__", "__rmul__", "diagonal", "trace", "quadratic", "dense")


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any tensor is, float32 otherwise: low precision is for storage only."""
    double = any(t.dtype == torch.float64 for t in tensors)
    return torch.float64 if double else torch.float32


class PSDMatrix(ABC):
    """A symmetric positive semi-definite matrix; immutable, closed under addition and scaling."""

    dim: int

    def __init_subclass__(cls) -> None:
        """What a kind of matrix computes has full precision, also in the caller's autocast."""
        super().__init_subclass__()
        for name in _ARITHMETIC:
            if name in vars(cls):
                setattr(cls, name, outside_autocast(vars(cls)[name]))

    @property
    def offset_length(self) -> int:
        """How many tensors an offset has that is not empty."""
        return 2

    @property
    def has_constant(self) -> bool:
        """Whether an offset can be raised by a number."""
        return True

    @property
    def state_length(self) -> int:
        """How many numbers :meth:`evaluate` leaves for :meth:`product`."""
        return self.dim

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, Tensor]:
        """The stored tensors by name."""

    @classmethod
    @abstractmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Rebuild from :attr:`tensors`."""

    @abstractmethod
    def __matmul__(self, v: Tensor) -> Tensor:
        """Ω v, for a vector."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """The diagonal entries."""

    @abstractmethod
    def dense(self) -> Tensor:
        """The matrix written out: m × m entries."""

    @abstractmethod
    def __rmul__(self, scale: float) -> Self:
        """The matrix times a non-negative number."""

    def scale_(self, scale: float) -> Self:
        """Multiply in place; only for a matrix that nobody else has seen yet."""
        for tensor in self.tensors.values():
            tensor.mul_(scale)
        return self

    @abstractmethod
    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """The same matrix, stored elsewhere or in another precision."""

    @abstractmethod
    def expand(self, dim: int, index: Tensor) -> Self:
        """The matrix in a larger space, with zeros; entry i moves to ``index[i]``."""

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def device(self) -> torch.device:
        """Where it is stored."""
        return next(iter(self.tensors.values())).device

    @outside_autocast
    def trace(self) -> Tensor:
        """The sum of the diagonal."""
        return self.diagonal().sum()

    @outside_autocast
    def quadratic(self, v: Tensor) -> Tensor:
        """vᵀ Ω v."""
        product = self @ v
        return v.to(product.dtype) @ product

    def evaluate(self, deltas: Sequence[Tensor], offset: Offset = ()) -> tuple[Tensor, Tensor]:
        """q(δ), and what :meth:`product` needs to finish its gradient; δ comes in flat pieces."""
        delta = deltas[0] if len(deltas) == 1 else torch.cat(list(deltas))
        product = self @ delta
        delta = delta.to(product.dtype)
        if not offset:
            return delta @ product, product
        b, k = (part.to(product.dtype) for part in offset)
        return delta @ (product + 2 * b) + k, product + b

    def product(self, state: Tensor) -> Tensor:
        """Ωδ + b, half the gradient of q, from the second result of :meth:`evaluate`; linear in it."""
        return state

    def add_product_(self, targets: Sequence[Tensor], state: Tensor, alpha: float) -> None:
        """Add alpha · (Ωδ + b) to flat pieces that together have the length of δ."""
        product = self.product(state)
        pieces = torch.split(product, [len(t) for t in targets])
        for target, piece in zip(targets, pieces, strict=True):
            target.add_(piece, alpha=alpha)

    def value_and_product(self, delta: Tensor, offset: Offset = ()) -> tuple[Tensor, Tensor]:
        """q(δ) and half its gradient, Ωδ + b, from the same reads."""
        value, state = self.evaluate([delta], offset)
        return value, self.product(state)

    def moved(self, offset: Offset, d: Tensor) -> Offset:
        """The offset after the reference point has moved by ``d``: q'(δ) = q(δ + d)."""
        product = self @ d
        d = d.to(product.dtype)
        if not offset:
            return product, d @ product
        b, k = (part.to(product.dtype) for part in offset)
        return b + product, k + 2 * (b @ d) + d @ product

    def scaled_offset(self, offset: Offset, scale: float) -> Offset:
        """The offset of ``scale * matrix``."""
        return tuple(scale * part for part in offset)

    def recentred(self, offset: Offset, stored: "PSDMatrix", eps: float) -> Offset:
        """The offset with which this matrix, stored coarsely, has its minimum where it is as it stands.

        As it was, it would have parts along directions that have lost their curvature, or nearly all of
        it: the minimum would be far away there, and could be below zero.

        Args:
            offset: That of this matrix.
            stored: The same matrix in another precision.
            eps: Of the coarsest precision that either was in.
        """
        return stored.centred_as([self], offset, _SHARE * eps) if offset else ()

    def recentred_as(self, terms: Sequence["PSDMatrix"], offset: Offset) -> Offset:
        """:meth:`centred_as` for what stands for a sum without being it; empty without an offset."""
        if not offset:
            return ()
        rounding = torch.finfo(offset[0].dtype).eps  # of products; twice as many digits are safe
        return self.centred_as(terms, offset, rounding**0.5)

    def centred_as(self, terms: Sequence["PSDMatrix"], offset: Offset, share: float) -> Offset:
        """The offset with which this matrix has its minimum, and its value there, where a sum has it.

        Args:
            terms: What is added up; of the same kind, with one offset.
            offset: That of the sum.
            share: Directions in which the sum is less than this share of its diagonal move nothing.
        """
        dtype = offset[0].dtype
        zero = torch.zeros(self.dim, dtype=dtype, device=self.device)
        k, b = (part.double() for part in terms[0].value_and_product(zero, offset))

        def product(v: Tensor) -> Tensor:
            first, *rest = ((term @ v.to(dtype)).double() for term in terms)
            return sum(rest, first)

        first, *rest = (term.diagonal().double() for term in terms)
        c = centre(product, sum(rest, first), b, share)
        least = (k - 2 * (b @ c) + c @ product(c)).clamp(min=0)  # the value there
        moved = self.raised(self.moved((), c), least)
        return tuple(new.to(old.dtype) for new, old in zip(moved, offset, strict=True))

    def raised(self, offset: Offset, value: Tensor) -> Offset:
        """The offset of the same function, larger by a constant."""
        b, k = offset
        return b, k + value

    def expand_offset(self, offset: Offset, dim: int, index: Tensor) -> Offset:
        """The offset in a larger space."""
        if not offset:
            return ()
        b, k = offset
        return scatter(b, dim, index), k

    def __repr__(self) -> str:
        from holdfast.memory import readable

        return f"{type(self).__name__}(dim={self.dim}, {readable(self.nbytes)})"


def scatter(values: Tensor, dim: int, index: Tensor) -> Tensor:
    """The last dimension of ``values`` placed at ``index`` of a zero tensor of size ``dim``."""
    out = values.new_zeros((*values.shape[:-1], dim))
    out[..., index.to(values.device)] = values
    return out


def vector(v: Tensor, dim: int) -> Tensor:
    """``v`` if it is a vector of length ``dim``: anything else could broadcast to a wrong product."""
    if v.shape != (dim,):
        raise ValueError(
            f"expected a vector of length {dim}, got shape {tuple(v.shape)}; several vectors are "
            "multiplied one by one, a model's parameters are flattened first"
        )
    return v


def weight(scale: float) -> float:
    """``scale`` if a matrix times it is still positive semi-definite."""
    if not 0 <= scale < float("inf"):
        raise ValueError(f"a matrix is scaled by a finite number ≥ 0, got {scale}")
    return scale


def refuse_int8(kind: str, dtype: torch.dtype | None) -> None:
    """Only factored matrices have rows whose scale can be stored beside them."""
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(
            f"{kind} cannot be stored as {dtype}: its entries span too many orders of magnitude; "
            "use torch.bfloat16, or a factored approximation (CountSketch, LowRank)"
        )
