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

__all__ = ["Thin", "ThinBlock", "leading", "mixed", "overlaps", "thin"]

Thin = tuple[Tensor, Tensor]  # F and d of a factor


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

    def _rounded(self, part: Tensor, dtype: torch.dtype | None) -> Tensor:
        return part.to(dtype=dtype)  # roots and diagonals: nothing becomes negative

    def _multiply(self, out: Tensor, V: Tensor, parts: Mapping[str, Tensor], first: bool) -> None:
        F, H = parts["inputs"], parts["outputs"]
        columns, rows = (parts[f"{name}_rest"] for name in ("inputs", "outputs"))
        left = times(H, times(H.mT, V)).addcmul_(rows.unsqueeze(-1), V)
        if first:
            torch.mul(left, columns.unsqueeze(-2), out=out)
        else:
            out.addcmul_(left, columns.unsqueeze(-2))
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
        found.append(thin(root, diagonal.unsqueeze(0), rank, dtype))
    (F, columns), (H, rows) = found
    at = one.weight, one.bias
    return ThinBlock(*at, F, H, name=one.name, inputs_rest=columns, outputs_rest=rows)


def overlaps(one: ThinBlock, two: ThinBlock) -> list[Tensor]:
    """Frobenius inner products of the factors of all terms of both, (groups, terms, terms), in float64."""
    found = []
    for name in ("inputs", "outputs"):
        each = [b.parts[name].double() for b in (one, two)]
        rests = torch.cat([b.parts[f"{name}_rest"].double() for b in (one, two)])
        roots = [root for block in each for root in block]  # (groups, n, rank) of every term
        squares = torch.stack([root.square().sum(2) for root in roots])
        low = [[(a.mT @ b).square().sum((1, 2)) for b in roots] for a in roots]
        total = torch.stack([torch.stack(row) for row in low])  # (terms, terms, groups)
        cross = torch.einsum("sgn,tgn->stg", squares, rests)
        total += cross + cross.transpose(0, 1) + torch.einsum("sgn,tgn->stg", rests, rests)
        found.append(total.permute(2, 0, 1))
    return found


def leading(matrix: Tensor) -> Tensor:
    """Columns whose outer products add up to (…, n, n), orthogonal, the largest first; in float64."""
    if not bool(matrix.isfinite().all()):
        return torch.full_like(matrix[..., :1], torch.nan).double()  # refused by name, later
    values, vectors = torch.linalg.eigh(matrix.double())
    return (vectors * values.clamp(min=0).sqrt().unsqueeze(-2)).flip(-1)


def thin(root: Tensor, diagonal: Tensor, rank: int, dtype: torch.dtype) -> Thin:
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
