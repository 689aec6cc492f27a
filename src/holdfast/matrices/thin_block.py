r"""A layer's Kronecker product whose factors are a low rank and a diagonal.

Either factor is :math:`F F^\top + \mathrm{diag}(d)`: its leading directions, and what the others add to
the diagonal. So the diagonal is that of the factor itself, nothing that it holds is free, and a product with
it is two with thin matrices.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from holdfast.matrices.base import compute_dtype
from holdfast.matrices.kronecker_block import KroneckerBlock, times
from holdfast.products import add_product_

__all__ = ["ThinBlock", "mixed", "thinned"]

_WHOLE = 1024  # sides up to which all eigenvectors are computed: a fifth of a second
_SPARE, _ROUNDS = 16, 4  # of the subspace iteration: more columns than are kept, and products


@dataclass(frozen=True, eq=False)
class ThinBlock(KroneckerBlock):
    """A sum of Kronecker products of thin factors on the entries of one layer.

    Attributes:
        inputs: F of A, (terms, groups, columns, rank).
        outputs: F of G, (terms, groups, outputs, rank).
        inputs_rest: d of A, (terms, groups, columns).
        outputs_rest: d of G, (terms, groups, outputs).
    """

    inputs_rest: Tensor = field(kw_only=True)
    outputs_rest: Tensor = field(kw_only=True)

    @property
    def parts(self) -> dict[str, Tensor]:
        rests = {"inputs_rest": self.inputs_rest, "outputs_rest": self.outputs_rest}
        return {"inputs": self.inputs, "outputs": self.outputs, **rests}

    @property
    def scaled(self) -> dict[str, float]:
        return {"outputs": 0.5, "outputs_rest": 1.0}

    def _multiply(self, out: Tensor, V: Tensor, parts: Mapping[str, Tensor], first: bool) -> None:
        F, H = parts["inputs"], parts["outputs"]
        columns, rows = (parts[f"{name}_rest"] for name in ("inputs", "outputs"))
        left = times(H, times(H.mT, V)).addcmul_(rows.unsqueeze(-1), V)
        scaled = left * columns.unsqueeze(-2)
        if first:
            out.copy_(scaled)
        else:
            out.add_(scaled)
        add_product_(out, times(left, F), F.mT)

    def factors(self) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(self.inputs)
        A, G = (F.to(dtype) @ F.to(dtype).mT for F in (self.inputs, self.outputs))
        A.diagonal(dim1=2, dim2=3).add_(self.inputs_rest)
        G.diagonal(dim1=2, dim2=3).add_(self.outputs_rest)
        return A, G

    def sides(self) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(self.inputs)
        roots, rests = (self.inputs, self.outputs), (self.inputs_rest, self.outputs_rest)
        A, G = (F.to(dtype).square().sum(3) + d for F, d in zip(roots, rests, strict=True))
        return A, G

    def grown(self, outputs: int) -> Self:
        more = outputs - self.outputs.shape[2]
        wide, rest = functional.pad(self.outputs, (0, 0, 0, more)), (0, more)
        return replace(self, outputs=wide, outputs_rest=functional.pad(self.outputs_rest, rest))

    def biased(self, bias: int) -> Self:
        inputs = functional.pad(self.inputs, (0, 0, 0, 1))
        rest = functional.pad(self.inputs_rest, (0, 1))
        return replace(self, bias=bias, inputs=inputs, inputs_rest=rest)

    def of_bias(self, diagonal: Tensor) -> Self:
        empty = {name: torch.zeros_like(part[:1]) for name, part in self.parts.items()}
        empty["inputs_rest"][..., -1] = 1
        held = diagonal.to(self.outputs).view(1, *self.outputs.shape[1:3])
        return self.with_parts({**empty, "outputs_rest": held})


def thinned(block: KroneckerBlock, rank: int) -> ThinBlock:
    """The block with the leading directions of its factors, and the diagonal of what they leave."""
    found = []
    for factor in block.factors():
        root = _leading(factor.double(), rank)
        found.append(_thin(root, factor.diagonal(dim1=2, dim2=3), rank, factor.dtype))
    return _block(block, *found)


def mixed(one: ThinBlock, two: ThinBlock, weights: tuple[Tensor, Tensor], rank: int) -> ThinBlock:
    """A single product: weighted sums (terms, groups) of both factors over the terms of both blocks."""
    found = []
    for name, weight in zip(("inputs", "outputs"), weights, strict=True):
        dtype = compute_dtype(one.parts[name], two.parts[name])
        each = [b.parts[name].double() for b in (one, two)]
        rest = torch.cat([b.parts[f"{name}_rest"].double() for b in (one, two)])
        width = max(root.shape[-1] for root in each)
        roots = torch.cat([functional.pad(root, (0, width - root.shape[-1])) for root in each])
        roots = roots * weight.double().sqrt()[..., None, None]
        joined = roots.permute(1, 2, 0, 3).flatten(2)  # (groups, n, terms · rank)
        rest = (weight.double().unsqueeze(2) * rest).sum(0)
        diagonal = joined.square().sum(2) + rest
        U, S, _ = torch.linalg.svd(joined, full_matrices=False)
        root = (U * S.unsqueeze(1)).unsqueeze(0)
        found.append(_thin(root, diagonal.unsqueeze(0), rank, dtype))
    return _block(one, *found)


Thin = tuple[Tensor, Tensor]


def _leading(matrix: Tensor, rank: int) -> Tensor:
    """Columns whose outer products add up to the leading part of (…, n, n), the largest first.

    All eigenvectors of a wide matrix would cost n³. A few of them are found by subspace iteration; what that
    has found is then below the matrix (Nyström), so that what is left has no negative diagonal.
    """
    wide = matrix.shape[-1]
    if not bool(matrix.isfinite().all()):
        return torch.full_like(matrix[..., :1], torch.nan)  # refused by name, later
    if wide <= max(_WHOLE, 8 * rank):
        values, vectors = torch.linalg.eigh(matrix)
        return (vectors * values.clamp(min=0).sqrt().unsqueeze(-2)).flip(-1)
    start = torch.randn(wide, rank + _SPARE, generator=torch.Generator().manual_seed(0))
    Q = start.to(matrix).expand(*matrix.shape[:-1], -1)
    for _ in range(_ROUNDS):
        Q, _ = torch.linalg.qr(matrix @ Q)
    seen = matrix @ Q
    values, vectors = torch.linalg.eigh(Q.mT @ seen)
    least = torch.finfo(matrix.dtype).eps * wide * values[..., -1:]
    inverse = torch.where(values > least, values, torch.inf).rsqrt()
    U, S, _ = torch.linalg.svd(seen @ (vectors * inverse.unsqueeze(-2)), full_matrices=False)
    return U * S.unsqueeze(-2)


def _thin(root: Tensor, diagonal: Tensor, rank: int, dtype: torch.dtype) -> Thin:
    """The first columns of a root (…, n, columns), and the diagonal without theirs, (…, n)."""
    kept, eps = root[..., :rank], torch.finfo(dtype).eps
    # What only rounding has left is not held; products of such numbers would be subnormal, and slow.
    least = eps**2 * kept.abs().amax((-2, -1), keepdim=True)
    kept = torch.where(kept.abs() <= least, 0.0, kept)
    held = kept.square().sum(-1)
    # Rounding goes by the largest entry of all: elsewhere more could be held than there is.
    kept = kept * torch.where(held > diagonal, (diagonal / held).sqrt(), 1.0).unsqueeze(-1)
    rest = diagonal - kept.square().sum(-1)
    rest = torch.where(rest <= eps * diagonal, 0.0, rest)
    return kept.to(dtype).contiguous(), rest.to(dtype)


def _block(place: KroneckerBlock, inputs: Thin, outputs: Thin) -> ThinBlock:
    (F, columns), (H, rows) = inputs, outputs
    at = place.weight, place.bias
    return ThinBlock(*at, F, H, name=place.name, inputs_rest=columns, outputs_rest=rows)
