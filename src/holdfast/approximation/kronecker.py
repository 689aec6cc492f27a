"""A Kronecker product per layer, and the exact diagonal for the rest."""

import warnings
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from holdfast import memory
from holdfast.approximation.base import Approximation, Setting
from holdfast.approximation.gram import gram_size
from holdfast.approximation.kronecker_readers import Factors, Moments
from holdfast.configuration import QUIET, keep_positive
from holdfast.matrices import KroneckerMatrix, Offset, PSDMatrix
from holdfast.matrices.kronecker_block import KroneckerBlock
from holdfast.matrices.kronecker_sums import averaged, nearest
from holdfast.parameters import ParameterSpace
from holdfast.regrouping import HELD_BYTES, Regrouping
from holdfast.rows import GivenRows, RowBatch

__all__ = ["Kronecker"]

_BATCH = 128  # rows at a time, whatever the batches: what can be read is then found out alike


class _Held:
    """Rows to be read again; what consecutive ones share, as those of one example do, is kept once."""

    def __init__(self, rows: RowBatch) -> None:
        columns = rows.columns or []
        none = [c.new_empty((0, *c.shape[1:])) for c in columns]
        self.index, self.kind = rows.index, rows.like(none, rows.index[:0])
        given = isinstance(rows, GivenRows)  # made for this, and never the same
        self.columns = [(column, None) if given else _once(column) for column in columns]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for pair in self.columns for t in pair if t is not None)

    def rows(self) -> RowBatch:
        columns = [c if places is None else c[places] for c, places in self.columns]
        return self.kind.like(columns, self.index)


def _once(column: Tensor) -> tuple[Tensor, Tensor]:
    """A copy of the entries that differ from those before them, and which of them each entry is."""
    flat = column.reshape(len(column), column[:1].numel())
    new = torch.ones(len(column), dtype=torch.bool, device=column.device)
    new[1:] = (flat[1:] != flat[:-1]).any(1)
    return column[new], new.cumsum(0) - 1


class _State:
    """What has been read; with a correction also the rows that the bases still wait for."""

    def __init__(self, recipe: "Kronecker", setting: Setting) -> None:
        self.setting, self.corrected = setting, recipe.correction == "eigen"
        self.squares = setting.zeros(setting.dim)
        self.unread = setting.zeros(
            setting.dim if self.corrected else 0
        )  # squares to be read again
        self.factors = Factors(setting, recipe.rank)
        self.moments: Moments | None = None
        self.held: list[_Held] = []
        self.nbytes = self.count = 0  # of what is held, and of the rows that the bases come from
        self.told = False
        self.groups = Regrouping(1, self.emit, capacity=_BATCH)

    def emit(self, _: int, rows: RowBatch, signs: Tensor) -> None:
        self.take(rows)

    def take(self, rows: RowBatch) -> None:
        layers = self.setting.layers
        if not self.corrected:
            rows.read_layers(layers, self.factors, self.squares)
        elif self.moments is not None:
            self.tell()
            rows.read_layers(layers, self.moments, self.squares)
        else:
            rows.read_layers(layers, self.factors, self.unread)
            self.held.append(_Held(rows))
            self.nbytes += self.held[-1].nbytes
            self.count += len(rows)
            if self.nbytes > HELD_BYTES:
                self.turn()

    def turn(self) -> None:
        """Fix the bases, and read the held rows again in them."""
        count = len(self.setting.layers)
        self.moments = Moments(self.setting, [self.factors.block(k) for k in range(count)])
        for held in self.held:
            held.rows().read_layers(self.setting.layers, self.moments, self.squares)
        self.held.clear()

    def tell(self) -> None:
        """Say once that the bases do not come from all of the data."""
        if not self.told:
            warnings.warn(
                f"the data is larger than what is held back for correction='eigen' "
                f"({memory.readable(HELD_BYTES)}): the bases come from its first {self.count} rows, only "
                "the second moments from all; shuffle the data, so that these are like the others",
                stacklevel=2,
            )
        self.told = True


@dataclass(frozen=True)
class Kronecker(Approximation):
    r"""E[a aᵀ] ⊗ E[g gᵀ] per Linear, Conv1d or Conv2d layer (K-FAC).

    a are the inputs of the layer (a bias is one more input, the constant one; a convolution's are its
    patches), g the gradients of its outputs. All other parameters (normalisation, embeddings, attention's
    joint projection, shared weights, a bias whose weight is frozen) get the exact diagonal, so that any
    network works. Nothing between layers is kept.

    Several positions per example (words, pixels) are treated as in K-FAC's "expand": a aᵀ is averaged over
    examples and positions, g gᵀ summed over the positions of an example. It is exact for one example with
    one position, and wherever inputs and gradients are independent. Positions whose gradient is zero, such
    as padding that the loss leaves out, have no part in the average.

    On the paper's perceptron (784-1024-512-256-10) it keeps 2.3 numbers per parameter (3.3 corrected).
    What it costs is in ``results/bench``: a step in ``step.md``, beside another library in ``peers.md``.

    A layer that cannot be read (used twice, called without its module, batches that cannot be cut, the
    ready-made rows of SCP) is taken from its written-out rows M: Σ M Mᵀ and Σ MᵀM, divided by their common
    trace, which is as exact for one row of rank one and for independent factors.

    Args:
        correction: "eigen" keeps the eigenvectors of both factors as a basis and the exact second moment
            of the rows along each of its directions, with the exact trace. For that rows are read twice:
            examples are held back, each once however many rows it has, up to 256 MiB of them. On data
            that fits it is never worse than "none" in Frobenius norm. Of larger data the first examples
            give the bases, and all of them the moments: that is said, and promised only for data in
            random order.
        merge: What tasks become. "average" keeps one product, with both partial traces of the sum;
            "nearest" the one product nearest to the sum in Frobenius norm; "stack" all of them (exact,
            memory grows with tasks). With ``anchor="each"`` the first two keep one centre, between the
            tasks' own: where the sum has its minimum, or nearly, along directions that matter little.
        rank: Keep so many leading directions of every factor, and of the others the diagonal: the diagonal of
            the matrix is then that of the whole products (after several tasks with "average" and "stack"),
            and no direction that they hold is free. A layer of n × k parameters keeps about rank·(n + k)
            numbers instead of n² + k², and a product with it takes 4·rank·n·k multiplications instead of
            n·k·(n + k). Among directions that matter alike, rounding decides which are kept. Sides
            above 1,024 are also read in memory that grows with the side and not with its square: rows are
            replaced by 2·rank leading directions again and again, which is a little less exact. (Merging
            with ``anchor="each"`` takes the square.) ``None`` keeps all.

    References:
        Optimizing Neural Networks with Kronecker-factored Approximate Curvature (Martens & Grosse, 2015)
        https://arxiv.org/abs/1503.05671
        Fast Approximate Natural Gradient Descent in a Kronecker-factored Eigenbasis (George et al., 2018)
        https://arxiv.org/abs/1806.03884
    """

    correction: Literal["none", "eigen"] = "none"
    merge: Literal["average", "nearest", "stack"] = "average"
    rank: int | None = field(default=None, metadata={QUIET: True})

    def __post_init__(self) -> None:
        if self.correction not in ("none", "eigen"):
            raise ValueError(f"correction must be 'none' or 'eigen', got {self.correction!r}")
        if self.merge not in ("average", "nearest", "stack"):
            raise ValueError(f"merge must be 'average', 'nearest' or 'stack', got {self.merge!r}")
        if self.rank is not None:
            keep_positive(self, "rank")
            if self.correction != "none":
                raise ValueError(
                    "correction='eigen' keeps whole bases: it cannot be combined with rank"
                )

    @property
    def fits_int8(self) -> bool:
        return False

    def start(self, setting: Setting) -> _State:
        return _State(self, setting)

    def update(self, state: Any, rows: RowBatch) -> None:
        if rows.columns is None and state.corrected:  # cannot be held, but its rows can
            first = 0
            for block in rows.blocks():
                state.take(GivenRows(block, rows.index[first : first + len(block)]))
                first += len(block)
        elif rows.columns is None or isinstance(rows, GivenRows):
            state.take(rows)
        else:
            zeros = torch.zeros_like(rows.index)
            state.groups.add(rows, zeros, zeros)

    def finish(self, state: Any) -> KroneckerMatrix:
        state.groups.flush()
        if state.corrected and state.moments is None:
            state.turn()
        source = state.moments if state.corrected else state.factors
        blocks = [source.block(k) for k in range(len(state.setting.layers))]
        return KroneckerMatrix.on(blocks, state.squares)

    def nbytes(self, setting: Setting) -> int:
        sides = [(s.groups, n) for s in setting.layers for n in (s.columns, s.outputs)]
        if self.correction == "none":
            sums = sum(gram_size(*side, self.rank) for side in sides)
            read = max((gram_size(*side, self.rank, read=True) for side in sides), default=0)
            return setting.nbytes(sums + read + setting.dim)
        factors = sum(groups * n**2 for groups, n in sides)
        return setting.nbytes(3 * factors + 3 * setting.dim) + HELD_BYTES

    def add(self, old: PSDMatrix, offset: Offset, new: PSDMatrix) -> tuple[PSDMatrix, Offset]:
        assert isinstance(old, KroneckerMatrix)
        assert isinstance(new, KroneckerMatrix)
        old = _joined(old, new)
        if self.merge == "stack":
            return old + new, offset
        merged = old.combined(new, self._merge)
        return merged, merged.recentred_as([old, new], offset)

    def _merge(self, one: KroneckerBlock, two: KroneckerBlock) -> KroneckerBlock:
        return (averaged if self.merge == "average" else nearest)(one, two, self.rank)

    def embed(self, matrix: PSDMatrix, space: ParameterSpace, index: Tensor) -> PSDMatrix:
        assert isinstance(matrix, KroneckerMatrix)
        return _fitted(matrix.expand(space.dim, index), space)


def _fitted(matrix: KroneckerMatrix, space: ParameterSpace) -> KroneckerMatrix:
    """The blocks as large as their layers are now; new outputs and biases are free."""
    starts = {a: i for i, (a, b) in enumerate(space.ranges) if a < b}
    blocks = []
    for block in matrix.blocks:
        _, _, groups, outputs, _ = block.place
        at = starts[block.weight]
        now = space.shapes[at][0]
        if now != groups * outputs:
            if groups > 1:
                raise ValueError(
                    f"{space.names[at]} has {groups} groups and grew from {groups * outputs} to {now} "
                    "outputs: its groups are other ones now; consolidate without previous=, or use "
                    "another approximation"
                )
            block = block.grown(now)
        name, _, _ = space.names[at].rpartition("weight")
        bias = f"{name}bias"
        if block.bias is None and bias in space.names:
            where = space.names.index(bias)
            if space.shapes[where] == (now,):  # not so in a class of one's own
                block = block.biased(space.ranges[where][0])
        blocks.append(replace(block, name=name.removesuffix(".")))
    return KroneckerMatrix.on(blocks, matrix.spread())


def _joined(old: KroneckerMatrix, new: KroneckerMatrix) -> KroneckerMatrix:
    """Old, with blocks for layers whose weight was free and whose bias had a diagonal."""
    diagonal, known = old.spread(), {block.weight for block in old.blocks}
    found = []
    for block in new.blocks:
        if block.weight not in known and block.bias is not None:
            weight, bias = (diagonal[part] for part in block.entries())
            if bool(bias.any()) and not bool(weight.any()):
                found.append(block.of_bias(bias))
    return KroneckerMatrix.on([*old.blocks, *found], diagonal) if found else old
