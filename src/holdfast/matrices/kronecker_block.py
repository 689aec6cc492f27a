r"""One layer's share of a matrix: a Kronecker product, or a few that are summed.

A layer that multiplies by a matrix V (outputs × columns, the bias being a column) has the block
:math:`G \otimes A` for row-major V, so that :math:`(G \otimes A)\,\mathrm{vec}\,V = \mathrm{vec}(G V A)`: two
products with small matrices, and nothing large is ever formed. In its corrected form a block has
orthonormal bases in place of the factors and a value for every pair of directions:
:math:`U_G\,(S \circ U_G^\top V U_A)\,U_A^\top`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from holdfast.matrices.base import compute_dtype
from holdfast.matrices.rounding import rounded
from holdfast.products import add_product_, linear, multiply_, precision

__all__ = ["KroneckerBlock", "times"]


@dataclass(frozen=True, eq=False)
class KroneckerBlock:
    """A sum of Kronecker products on the entries of one layer.

    Attributes:
        weight: First entry of the layer's weight in the flat vector.
        bias: First entry of its bias, or None where there is none.
        inputs: A (or its basis), (terms, groups, columns, columns).
        outputs: G (or its basis), (terms, groups, outputs, outputs).
        values: The second moments along both bases, (terms, groups, outputs, columns); or None.
        name: The path of the layer where it is known: for messages, not stored.
    """

    weight: int
    bias: int | None
    inputs: Tensor
    outputs: Tensor
    values: Tensor | None = None
    name: str | None = None

    @property
    def place(self) -> tuple[int, int | None, int, int, int]:
        """Where it lies and how large it is; blocks with equal places can be added."""
        _, groups, outputs, _ = self.outputs.shape
        return self.weight, self.bias, groups, outputs, self.columns

    @property
    def columns(self) -> int:
        """The inputs of a group, a bias being one of them."""
        return self.inputs.shape[2]

    @property
    def size(self) -> int:
        """The number of entries of the layer."""
        return self.outputs.shape[1] * self.outputs.shape[2] * self.columns

    @property
    def parts(self) -> dict[str, Tensor]:
        """The tensors by name."""
        found = {"inputs": self.inputs, "outputs": self.outputs}
        return found if self.values is None else {**found, "values": self.values}

    def with_parts(self, parts: Mapping[str, Tensor]) -> Self:
        """The same place with other tensors."""
        named: dict[str, Any] = dict(parts)
        return replace(self, **named)

    @property
    def scaled(self) -> dict[str, float]:
        """The tensors that carry the scale, and the power of it that each of them has."""
        return {"outputs" if self.values is None else "values": 1.0}

    def times(self, scale: float | Tensor) -> Self:
        """The block times a number."""
        found = {}
        for name, power in self.scaled.items():
            part = self.parts[name]
            found[name] = self._rounded(part.to(compute_dtype(part)) * scale**power, part.dtype)
        return self.with_parts(found)

    def times_(self, scale: float) -> None:
        """The same in place."""
        for name, power in self.scaled.items():
            self.parts[name].mul_(scale**power)

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> Self:
        """The same block elsewhere or in another precision, and positive semi-definite there."""
        parts = {name: part.to(device=device) for name, part in self.parts.items()}
        return self.with_parts({name: self._rounded(part, dtype) for name, part in parts.items()})

    def _rounded(self, part: Tensor, dtype: torch.dtype | None) -> Tensor:
        """One of the tensors in another precision: whole factors are matrices, others are free to round."""
        return rounded(part, dtype) if self.values is None else part.to(dtype=dtype)

    def entries(self) -> list[slice]:
        """The ranges of the flat vector it covers."""
        _, groups, outputs, _ = self.outputs.shape
        rows, columns = groups * outputs, self.columns - (self.bias is not None)
        found = [slice(self.weight, self.weight + rows * columns)]
        return found if self.bias is None else [*found, slice(self.bias, self.bias + rows)]

    def matrix(self, v: Tensor) -> Tensor:
        """The layer's entries of a flat vector, (groups, outputs, columns)."""
        _, groups, outputs, _ = self.outputs.shape
        pieces = [v[part].view(groups, outputs, -1) for part in self.entries()]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)

    def write(self, out: Tensor, matrix: Tensor) -> None:
        """Put (groups, outputs, columns) at the layer's entries of a flat vector."""
        first, *others = self.entries()
        groups, outputs, columns = matrix.shape
        width = columns - len(others)
        out[first].view(groups, outputs, width).copy_(matrix[..., :width])
        for part in others:
            out[part].view(groups, outputs, 1).copy_(matrix[..., width:])

    def write_product(self, out: Tensor, v: Tensor) -> None:
        """Write the block's product with the flat vector ``v`` into ``out``."""
        V = self.matrix(v)
        alone = len(V) == 1  # torch is slow at batches of one
        V = V[0] if alone else V
        product = out[self.entries()[0]].view_as(V) if self.bias is None else torch.empty_like(V)
        dtype = precision(self.inputs, v, V.numel() * min(self.inputs.shape[3], *V.shape[-2:]))
        V = V.to(dtype)
        for term in range(len(self.inputs)):
            parts = {
                name: (part[term, 0] if alone else part[term]).to(dtype)
                for name, part in self.parts.items()
            }
            self._multiply(product, V, parts, first=term == 0)
        if self.bias is not None:
            self.write(out, product.view(*self.outputs.shape[1:3], self.columns))

    def _multiply(self, out: Tensor, V: Tensor, parts: Mapping[str, Tensor], first: bool) -> None:
        """Write one term's product with V, or add it."""
        A, G = parts["inputs"], parts["outputs"]
        if "values" in parts:
            left = times(G, times(times(G.mT, V), A).mul_(parts["values"]))
        else:
            left = times(G, V)
        right = A.mT if "values" in parts else A
        (multiply_ if first else add_product_)(out, left, right)

    def diagonal(self) -> Tensor:
        """The diagonal entries, (groups, outputs, columns)."""
        if self.values is not None:
            dtype = compute_dtype(self.inputs)
            A, G = self.inputs.to(dtype), self.outputs.to(dtype)
            return (G.square() @ self.values.to(dtype) @ A.square().mT).sum(0)
        columns, rows = self.sides()
        return (rows.unsqueeze(3) * columns.unsqueeze(2)).sum(0)

    def trace(self) -> Tensor:
        """The sum of the diagonal."""
        if self.values is None:
            A, G = self.sides()
            return (A.sum(2) * G.sum(2)).sum()
        dtype = compute_dtype(self.inputs)
        A, G = self.inputs.to(dtype), self.outputs.to(dtype)
        # the bases are not quite orthonormal in half precision
        lengths = G.square().sum(2).unsqueeze(3) * A.square().sum(2).unsqueeze(2)
        return (lengths * self.values.to(dtype)).sum()

    def factors(self) -> tuple[Tensor, Tensor]:
        """(A, G) of every term; of a corrected one the partial traces, A with trace one."""
        dtype = compute_dtype(self.inputs)
        A, G = self.inputs.to(dtype), self.outputs.to(dtype)
        if self.values is None:
            return A, G
        S = self.values.to(dtype)
        total = S.sum((2, 3)).clamp(min=torch.finfo(dtype).tiny)[..., None, None]
        columns, rows = S.sum(2) / total[..., 0], S.sum(3)
        return (A * columns.unsqueeze(2)) @ A.mT, (G * rows.unsqueeze(2)) @ G.mT

    def sides(self) -> tuple[Tensor, Tensor]:
        """The diagonals of both factors, (terms, groups, ·)."""
        A, G = self.factors()
        return A.diagonal(dim1=2, dim2=3), G.diagonal(dim1=2, dim2=3)

    def spectrum(self) -> Tensor:
        """All eigenvalues, in float64, in any order."""
        if len(self.inputs) > 1:
            return torch.linalg.eigvalsh(self.dense().double()).flatten()
        if self.values is not None:  # the bases are orthonormal
            return self.values.double().flatten()
        A, G = (factor.double() for factor in self.factors())
        rows, columns = torch.linalg.eigvalsh(G[0]), torch.linalg.eigvalsh(A[0])
        return (rows.unsqueeze(2) * columns.unsqueeze(1)).flatten()

    def grown(self, outputs: int) -> Self:
        """The block of a layer without groups that has more outputs now; they are free."""
        more = outputs - self.outputs.shape[2]
        wide = functional.pad(self.outputs, (0, more, 0, more))
        if self.values is None:
            return replace(self, outputs=wide)
        wide.diagonal(dim1=2, dim2=3)[..., -more:] = 1  # a basis stays one
        return replace(self, outputs=wide, values=functional.pad(self.values, (0, 0, 0, more)))

    def biased(self, bias: int) -> Self:
        """The block of a layer without a bias that has one now, which is free."""
        inputs = functional.pad(self.inputs, (0, 1, 0, 1))
        if self.values is None:
            return replace(self, bias=bias, inputs=inputs)
        inputs[..., -1, -1] = 1  # a basis stays one
        return replace(self, bias=bias, inputs=inputs, values=functional.pad(self.values, (0, 1)))

    def of_bias(self, diagonal: Tensor) -> Self:
        """A block in the same place that is a diagonal on the bias and zero on the weight."""
        A, G = torch.zeros_like(self.inputs[:1]), torch.zeros_like(self.outputs[:1])
        held = diagonal.to(G).view(1, *G.shape[1:3])
        if self.values is None:
            A[..., -1, -1] = 1
            G.diagonal(dim1=2, dim2=3).copy_(held)
            return replace(self, inputs=A, outputs=G)
        for basis in (A, G):
            basis.diagonal(dim1=2, dim2=3).fill_(1)
        values = torch.zeros_like(self.values[:1])
        values[..., -1] = held
        return replace(self, inputs=A, outputs=G, values=values)

    def dense(self) -> Tensor:
        """Every group's block written out, (groups, entries, entries)."""
        if self.values is None:
            A, G = self.factors()
            product = torch.einsum("tgij,tgkl->gikjl", G, A)
        else:
            dtype = compute_dtype(self.inputs)
            A, G = self.inputs.to(dtype), self.outputs.to(dtype)
            turn = torch.einsum("tgip,tgkq->tgikpq", G, A).flatten(4)
            S = self.values.to(dtype).flatten(2)[:, :, None, None]
            product = torch.einsum("tgikr,tgjlr->gikjl", turn * S, turn)
        entries = product.shape[1] * product.shape[2]
        return product.reshape(len(product), entries, entries)


def times(a: Tensor, b: Tensor) -> Tensor:
    """A B, both matrices or batches of them."""
    return linear(a, b.t()) if a.ndim == 2 else a @ b
