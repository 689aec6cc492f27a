"""A low rank across all layers, and a Kronecker product per layer for what it leaves."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from holdfast.approximation.base import Approximation, Setting
from holdfast.approximation.count_sketch import stack
from holdfast.approximation.kronecker import Kronecker
from holdfast.approximation.low_rank import LowRank
from holdfast.approximation.truncation import Dropped, truncated
from holdfast.configuration import keep_as
from holdfast.matrices import FactoredMatrix, KroneckerMatrix, Offset, PSDMatrix, SumMatrix
from holdfast.matrices.kronecker_block import KroneckerBlock
from holdfast.parameters import ParameterSpace
from holdfast.rows import RowBatch
from holdfast.views import TracedRows

__all__ = ["KroneckerPlusLowRank"]

_SHAPE = 1e-12  # of a product that has nothing left to hold: what keeps its shape for later


@dataclass
class _State:
    setting: Setting
    traces: Tensor  # Σ‖w‖² of every layer
    products: Any
    streamed: Any


@dataclass(frozen=True)
class KroneckerPlusLowRank(Approximation):
    r"""⊕ₗ cₗKₗ + FᵀF: Kronecker products for what the F of LowRank leaves.

    F holds the leading directions, terms between layers included; the product of a layer holds the rest of
    it, scaled so that the trace of the layer is exactly that of Ω:
    :math:`c_l = (\mathrm{tr}\,\Omega_l - \mathrm{tr}(F^\top F)_l) / \mathrm{tr}\,K_l`. With
    ``correction="eigen"`` what F holds is taken off direction by direction, in the eigenbasis of the layer,
    and the diagonal in that basis is exactly that of Ω. Parameters without a product get the diagonal of
    :math:`\Omega - F^\top F`. Nothing becomes negative for ``group=1``; with groups it is clamped at zero.

    So F is a low rank of Ω itself, and the products are scaled down for it; it is not a sketch of the
    residual :math:`\Omega - \bigoplus_l K_l`. That residual is indefinite, a product being too large along
    some directions and too small along others: no :math:`F^\top F` stands for it, and with a signed low rank
    the sum, and the penalty, could become negative. Here every term is positive semi-definite.

    Measured on one setup only, five perceptrons (20-32-16-5, 500 examples, sampled labels, ``group=1``): the
    penalty at the parameters after another task was off by 5 % on average at rank 5 (8 % with "eigen"), that
    of the low rank alone by 27 %, of :class:`DiagonalPlusLowRank` by 23 %; the products alone gave between
    0.45 and 25 times the exact value. At rank 50 all of them but the products are within 1 %. With
    ``group="auto"`` "eigen" was off by 25 % at rank 5 and 13 % at rank 50: few examples want ``group=1``.

    Args:
        rank: Rows of F.
        group: Rows per sum; see :class:`LowRank`.
        shrink: Subtract the (rank+1)-th eigenvalue at every truncation; the products make up for it.
        correction: "none" or "eigen"; see :class:`Kronecker`.
        merge: "rows" truncates the stacked factors of tasks back to ``rank`` and averages the products of a
            layer to one, with what was dropped added to it; "stack" keeps them all.
    """

    rank: int = 50
    group: int | Literal["auto"] = "auto"
    shrink: bool = False
    correction: Literal["none", "eigen"] = "none"
    merge: Literal["rows", "stack"] = "rows"

    def __post_init__(self) -> None:
        _ = self.kronecker  # says what is wrong, as does the other
        keep_as(self, self.low_rank, "rank", "group")

    @property
    def fits_int8(self) -> bool:
        return False

    @property
    def low_rank(self) -> LowRank:
        """The recipe of F."""
        return LowRank(self.rank, self.group, self.shrink, self.merge)

    @property
    def kronecker(self) -> Kronecker:
        """The recipe of the products."""
        return Kronecker(self.correction, "stack" if self.merge == "stack" else "average")

    def hash_ids(self, setting: Setting) -> tuple[str, ...]:
        return self.low_rank.hash_ids(setting)

    def start(self, setting: Setting) -> _State:
        traces = torch.zeros(len(setting.layers), dtype=torch.float64, device=setting.device)
        products, streamed = self.kronecker.start(setting), self.low_rank.start(setting)
        return _State(setting, traces, products, streamed)

    def update(self, state: Any, rows: RowBatch) -> None:
        traced = rows if self.correction == "eigen" else TracedRows(rows, state.traces)
        self.kronecker.update(state.products, traced)
        self.low_rank.update(state.streamed, rows)

    def finish(self, state: Any) -> SumMatrix:
        products, low = self.kronecker.finish(state.products), self.low_rank.finish(state.streamed)
        totals = {s.weight: t for s, t in zip(state.setting.layers, state.traces, strict=True)}
        blocks = [_without(block, totals[block.weight], low.factor) for block in products.blocks]
        rest = products.spread()
        for row in low.factor:
            rest.addcmul_(row, row, value=-1)
        return SumMatrix([KroneckerMatrix.on(blocks, rest.clamp_(min=0)), low])

    def nbytes(self, setting: Setting) -> int:
        return self.low_rank.nbytes(setting) + self.kronecker.nbytes(setting)

    def add(self, old: PSDMatrix, offset: Offset, new: PSDMatrix) -> tuple[PSDMatrix, Offset]:
        assert isinstance(old, SumMatrix)
        assert isinstance(new, SumMatrix)
        (products, low), (more, other) = old.parts, new.parts
        assert isinstance(low, FactoredMatrix)
        assert isinstance(other, FactoredMatrix)
        pull, e = old.offsets(offset)
        factor, e = stack(low, e, other)
        if self.merge == "stack" or len(factor.factor) <= self.rank:
            merged, pull = self.kronecker.add(products, pull, more)
            return SumMatrix([merged, factor]), (*pull, *e)
        averaged, _ = self.kronecker.add(products, (), more)
        kept, dropped = truncated(factor, self.rank, self.shrink)
        assert isinstance(averaged, KroneckerMatrix)
        whole = SumMatrix([_with(averaged, dropped), kept])
        return whole, whole.recentred_as([old, new], offset)

    def embed(self, matrix: PSDMatrix, space: ParameterSpace, index: Tensor) -> PSDMatrix:
        assert isinstance(matrix, SumMatrix)
        products, low = matrix.parts
        grown = self.kronecker.embed(products, space, index)
        return SumMatrix([grown, self.low_rank.embed(low, space, index)])


def _cut(block: KroneckerBlock, rows: Tensor) -> Tensor:
    """The layer's part of flat rows: (rows, groups, outputs, columns)."""
    return torch.stack([block.matrix(row) for row in rows])


def _without(block: KroneckerBlock, total: Tensor, rows: Tensor) -> KroneckerBlock:
    """The product for what the rows leave of a layer whose trace is ``total``."""
    if block.values is None:
        held = sum((rows[:, part].square().sum() for part in block.entries()), torch.zeros(()))
        share = (total - held) / block.trace().clamp(min=torch.finfo(rows.dtype).tiny)
        return block.times(share.clamp(min=_SHAPE).to(block.outputs.dtype))
    turned = block.outputs[0].mT @ _cut(block, rows) @ block.inputs[0]
    values = block.values - turned.square().sum(0)
    return block.with_parts({"values": values.clamp(min=0)})


def _with(matrix: KroneckerMatrix, dropped: Dropped) -> KroneckerMatrix:
    """The products with dropped rows added."""
    rows = dropped.columns(slice(None))
    rest = matrix.spread()
    rest += rows.square().sum(0)
    blocks = []
    for block in matrix.blocks:
        layer = _cut(block, rows)
        if block.values is None:
            trace = block.trace().clamp(min=torch.finfo(rows.dtype).tiny)
            blocks.append(block.times((1 + layer.square().sum() / trace).to(block.outputs.dtype)))
        else:
            G, A = block.outputs[0].to(rows.dtype), block.inputs[0].to(rows.dtype)
            within = G.mT @ layer @ A
            blocks.append(block.with_parts({"values": block.values + within.square().sum(0)}))
    return KroneckerMatrix.on(blocks, rest)
