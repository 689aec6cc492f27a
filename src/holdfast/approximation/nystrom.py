"""The Nyström approximation from one product with a fixed random matrix."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from holdfast.approximation.base import Approximation, Setting, rows_at_once
from holdfast.approximation.count_sketch import check_merge, stack
from holdfast.configuration import keep_positive
from holdfast.hashing import Draw, checked_seed
from holdfast.matrices import FactoredMatrix, Offset, PSDMatrix
from holdfast.rows import RowBatch

__all__ = ["Nystrom"]

_ENTRIES = 2**15  # entries of θ at a time, when all of G is not needed at once


@dataclass
class _State:
    test: Tensor  # G, (m, l), with orthonormal columns
    product: Tensor  # (Ω G)ᵀ, (l, m)
    room: Tensor  # for rows of W


@dataclass(frozen=True)
class Nystrom(Approximation):
    r"""Ω̂ = Y(GᵀY)⁺Yᵀ from Y = ΩG with a random m × l matrix G.

    Never above Ω, exact once l reaches its rank, and with an error in trace norm of at most
    :math:`\left(1 + \frac{k}{l-k-1}\right)\sum_{j>k}\lambda_j` in the mean, for every k < l − 1.

    Y is linear in Ω and G is the same for all tasks, so that merging is exact: after any number of
    tasks, with any weights, Ω̂ is the Nyström approximation of the weighted sum of their Ω. G comes
    from the recipe's own seed and is drawn again when needed, never stored. Tasks must not share the
    signs of a sketch, since products of their rows would not cancel; here none are formed, and
    sharing G is what makes Y add up.

    In a network that has grown, entries of θ meet other rows of G than before: what was kept of the
    old tasks then stands for them, and Ω̂ is still not above Ω.

    The small matrix :math:`G^\top Y` is shifted by its own rounding before it is inverted, so that
    rounding does not lift Ω̂ above Ω. What is smaller than that is lost: Y squares the rows, so that
    the precision of float32 ends at eigenvalues of about 1e-7 of the largest.

    Args:
        size: The number l of columns of G, and of rows kept.
        seed: What G is drawn from.
        merge: "rows" keeps ``size`` rows for all tasks; "stack" keeps the rows of every task (memory
            grows with tasks).

    References:
        Fixed-Rank Approximation of a Positive-Semidefinite Matrix from Streaming Data
        (Tropp et al., 2017) https://arxiv.org/abs/1706.05736
    """

    size: int = 50
    seed: int = 0
    merge: Literal["rows", "stack"] = "rows"

    def __post_init__(self) -> None:
        keep_positive(self, "size")
        object.__setattr__(self, "seed", checked_seed(self.seed))
        check_merge(self.merge)

    def _drawn(self, like: Tensor, dim: int) -> Iterator[tuple[slice, Tensor]]:
        """Rows of G as they are drawn, a few at a time, with their places."""
        generator = Draw(self.seed).generator("test_matrix")
        width = min(self.size, dim)
        for first in range(0, dim, _ENTRIES):
            place = slice(first, min(first + _ENTRIES, dim))
            drawn = generator.standard_normal((place.stop - first, width))
            yield place, torch.from_numpy(drawn).to(like)

    def start(self, setting: Setting) -> _State:
        width = min(self.size, setting.dim)
        test = setting.zeros(setting.dim, width)
        gram = torch.zeros(width, width, dtype=torch.float64, device=setting.device)
        for place, drawn in self._drawn(test, setting.dim):
            test[place] = drawn
            gram += drawn.T.double() @ drawn.double()
        # only the range of G matters: orthonormal columns lose the least to rounding
        inverse = torch.linalg.inv(torch.linalg.cholesky(gram, upper=True)).to(test)
        for part in test.split(_ENTRIES):
            part.copy_(part @ inverse)
        room = setting.empty(rows_at_once(width), setting.dim)
        return _State(test, setting.zeros(width, setting.dim), room)

    def update(self, state: Any, rows: RowBatch) -> None:
        for block in rows.written(state.room):
            state.product.addmm_((block @ state.test).T, block)

    def finish(self, state: Any) -> FactoredMatrix:
        G, Y = state.test, state.product
        if not bool(Y.isfinite().all()):
            return FactoredMatrix(Y)  # overflow is reported where every matrix is looked at
        parts = [slice(first, first + _ENTRIES) for first in range(0, len(G), _ENTRIES)]
        core = torch.zeros(len(Y), len(Y), dtype=torch.float64, device=Y.device)
        for part in parts:
            core += Y[:, part].double() @ G[part].double()
        values, vectors = torch.linalg.eigh((core + core.T) / 2)
        # GᵀY would be symmetric without rounding; measured in float32, its error is half of this
        rounding = torch.linalg.matrix_norm(core - core.T, 2)
        shift = torch.maximum(rounding, 0.5 * torch.finfo(Y.dtype).eps * values.amax())
        kept = values > shift
        rotation = (vectors[:, kept] / (values[kept] + shift).sqrt()).T.to(Y)
        for part in parts:  # in place: Y is not needed again
            Y[: len(rotation), part] = rotation @ Y[:, part]
        return FactoredMatrix(Y if bool(kept.all()) else Y[: len(rotation)].clone())

    def nbytes(self, setting: Setting) -> int:
        width = min(self.size, setting.dim)  # of G and of Y, which becomes the result
        return setting.nbytes((2 * width + rows_at_once(width)) * setting.dim)

    def add(self, old: PSDMatrix, offset: Offset, new: PSDMatrix) -> tuple[PSDMatrix, Offset]:
        r"""The Nyström approximation of the sum, from the stacked factors A of both.

        Each keeps its product with G, so :math:`A^\top A G` is the sum of both Y, and
        :math:`\hat\Omega = A^\top P A` with P the projector onto the range of :math:`A G`.
        """
        assert isinstance(old, FactoredMatrix)
        assert isinstance(new, FactoredMatrix)
        stacked, e = stack(old, offset, new)
        A = stacked.factor
        if self.merge == "stack" or len(A) <= self.size:
            return stacked, e
        products = (
            A[:, place].double() @ drawn.double() for place, drawn in self._drawn(A, old.dim)
        )
        product = functools.reduce(torch.add, products)
        U = torch.linalg.qr(product).Q.to(A.dtype)
        return FactoredMatrix(U.T @ A), tuple(U.T @ part.to(U.dtype) for part in e)
