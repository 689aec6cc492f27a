"""Small settings of every registered recipe: a new member is tested by adding its row here."""

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import holdfast as hf
import kronecker_oracle
import reference


def spread(outputs: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
    """A potential of one's own: smooth, and it reads the inputs too."""
    weight = 1 + batch[0].flatten(1).double().square().mean(1)
    return outputs.flatten(1).logsumexp(1) * weight.to(outputs.dtype)


IMPORTANCES: dict[str, dict[str, hf.Importance]] = {
    "ewc": {
        "true": hf.EWC(),
        "sampled": hf.EWC(labels="sampled"),
        "expected": hf.EWC(labels="expected"),
        "predicted": hf.EWC(labels="predicted"),
    },
    "mas": {"logits": hf.MAS(), "softmax": hf.MAS(outputs="softmax")},
    "scp": {"mean": hf.SCP(slices=None), "few": hf.SCP(slices=2), "many": hf.SCP(slices=9)},
    "custom": {"spread": hf.Custom(spread)},
}

APPROXIMATIONS: dict[str, dict[str, hf.Approximation]] = {
    "diagonal": {"": hf.Diagonal()},
    "block_diagonal": {"size": hf.BlockDiagonal(size=7), "layer": hf.BlockDiagonal(by="layer")},
    "count_sketch": {"": hf.CountSketch(size=2), "copies": hf.CountSketch(size=1, copies=3)},
    "low_rank": {
        "exact": hf.LowRank(rank=250),
        "single": hf.LowRank(rank=2, group=1),
        "shrink": hf.LowRank(rank=2, group=1, shrink=True),
        "groups": hf.LowRank(rank=2, group=3),
        "auto": hf.LowRank(rank=1),
        "sketch": hf.LowRank(rank=2, group=3, shrink=True),
    },
    "full": {"dense": hf.Full(form="dense"), "factored": hf.Full(form="factored")},
    "diagonal_plus_low_rank": {
        "exact": hf.DiagonalPlusLowRank(rank=250),
        "single": hf.DiagonalPlusLowRank(rank=2, group=1, shrink=True),
        "groups": hf.DiagonalPlusLowRank(rank=2, group=3),
        "stack": hf.DiagonalPlusLowRank(rank=16, group=1, merge="stack"),
    },
    "composite": {
        "exact": hf.Composite({"*weight": hf.LowRank(rank=250), "*": hf.Diagonal()}),
        "groups": hf.Composite(
            {"*weight": hf.LowRank(rank=2, group=3), "*": hf.Full(form="dense")}
        ),
        "products": hf.Composite(
            {"Linear": hf.Kronecker(merge="stack"), "*": hf.LowRank(rank=2, group=1)}
        ),
    },
    "dense_sketch": {
        "rademacher": hf.DenseSketch(size=2),
        "gaussian": hf.DenseSketch(size=2, kind="gaussian"),
    },
    "osnap": {"": hf.OSNAP(size=2, nonzeros=2)},
    "srht": {"": hf.SRHT(size=2), "blocks": hf.SRHT(size=2, block=4)},
    "nystrom": {"": hf.Nystrom(size=2), "exact": hf.Nystrom(size=250)},
    "kronecker": {
        "": hf.Kronecker(),
        "nearest": hf.Kronecker(merge="nearest"),
        "stack": hf.Kronecker(merge="stack"),
        "eigen": hf.Kronecker(correction="eigen"),
        "eigen_stack": hf.Kronecker(correction="eigen", merge="stack"),
        "thin": hf.Kronecker(rank=2),
        "thin_nearest": hf.Kronecker(rank=2, merge="nearest"),
        "thin_stack": hf.Kronecker(rank=1, merge="stack"),
        "thin_exact": hf.Kronecker(rank=250),
    },
    "kronecker_plus_low_rank": {
        "exact": hf.KroneckerPlusLowRank(rank=250),
        "single": hf.KroneckerPlusLowRank(rank=2, group=1),
        "eigen": hf.KroneckerPlusLowRank(rank=2, group=1, correction="eigen"),
        "groups": hf.KroneckerPlusLowRank(rank=2, group=3, correction="eigen"),
        "shrink_stack": hf.KroneckerPlusLowRank(rank=16, group=1, shrink=True, merge="stack"),
    },
}


def flat(table: dict[str, dict[str, object]]) -> dict[str, object]:
    """``key-variant -> recipe``."""
    return {
        f"{key}-{variant}".rstrip("-"): recipe
        for key, variants in table.items()
        for variant, recipe in variants.items()
    }


ALL_IMPORTANCES: dict[str, hf.Importance] = flat(IMPORTANCES)  # type: ignore[arg-type,assignment]
ALL_APPROXIMATIONS: dict[str, hf.Approximation] = flat(APPROXIMATIONS)  # type: ignore[arg-type,assignment]

# Functions of the rows alone: any order of the examples gives the same matrix.
ORDERLESS = (
    "diagonal",
    "block_diagonal-size",
    "block_diagonal-layer",
    "low_rank-exact",
    "full-dense",
    "full-factored",
    "diagonal_plus_low_rank-exact",
    "composite-exact",
    "nystrom",
    "nystrom-exact",
    "kronecker",
    "kronecker-eigen",
    "kronecker_plus_low_rank-exact",
)
# Importances whose rows do not depend on the order of the examples.
ROW_ORDERLESS = [name for name in ALL_IMPORTANCES if name != "ewc-sampled"]


def sketched(
    approximation: hf.Approximation, W: Tensor, *, seed: int = 0, task: int = 0
) -> Tensor:
    """F = S W of the linear sketches, by dense algebra."""
    draw = {"seed": seed, "task": task}
    match approximation:
        case hf.CountSketch(size=size, copies=copies):
            return reference.count_sketch(W, size, copies=copies, **draw)[0]
        case hf.OSNAP(size=size, nonzeros=s):
            return reference.count_sketch(W, size // s, copies=s, **draw)[0]
        case hf.DenseSketch(size=size, kind=kind):
            return reference.dense_sketch(W, size, kind, **draw)
        case hf.SRHT(size=size, block=block):
            return reference.srht(W, size, block, **draw)
    raise NotImplementedError(f"no dense rule for {approximation!r}: add one")


def approximate(
    approximation: hf.Approximation,
    W: Tensor,
    model: nn.Module,
    *,
    divisor: int,
    seed: int = 0,
    task: int = 0,
    columns: tuple[Tensor, ...] | None = None,
    importance: hf.Importance | None = None,
    names: Sequence[str] | None = None,
) -> Tensor:
    """What the approximation of WᵀW / divisor must be, by dense algebra.

    ``columns`` and ``importance``, from which W was made, are for approximations that look into layers;
    ``names`` are the held parameters, where those are not all.
    """
    exact = W.T @ W / divisor
    match approximation:
        case hf.Diagonal():
            return exact.diagonal().diag()
        case hf.BlockDiagonal(by="layer"):
            return reference.blocks(exact, reference.layer_borders(model))
        case hf.BlockDiagonal(size=size):
            return reference.blocks(exact, [*range(0, len(exact), size), len(exact)])
        case hf.CountSketch() | hf.OSNAP() | hf.DenseSketch() | hf.SRHT():
            F = sketched(approximation, W, seed=seed, task=task)
            return F.T @ F / divisor
        case hf.LowRank(rank=rank, group=group, shrink=shrink):
            streamed = reference.streamed_low_rank(W, rank, group, shrink, seed, task)
            return streamed / divisor
        case hf.Full():
            return exact
        case hf.DiagonalPlusLowRank(rank=rank, group=group, shrink=shrink):
            low = approximate(
                hf.LowRank(rank, group, shrink), W, model, divisor=divisor, seed=seed, task=task
            )
            return low + (exact.diagonal() - low.diagonal()).clamp(min=0).diag()
        case hf.Composite(parts=parts):
            patterns = [pattern for pattern, _ in parts]
            groups = reference.names_by_pattern(model, patterns, names)
            found = reference.columns_by_pattern(model, patterns, names)
            total = torch.zeros_like(exact)
            for place, (at, group, (_, member)) in enumerate(
                zip(found, groups, parts, strict=True)
            ):
                if group:
                    own = reference.part_seed(seed, task, place)
                    total[at[:, None], at] = approximate(
                        member,
                        W[:, at],
                        model,
                        divisor=divisor,
                        seed=own,
                        task=task,
                        columns=columns,
                        importance=importance,
                        names=group,
                    )
            return total
        case hf.Nystrom(size=size, seed=own):
            return reference.nystrom(exact, size, own)
        case hf.Kronecker():
            assert columns is not None, "say what W was made from"
            assert importance is not None
            where = {"seed": seed, "task": task, "names": names}
            found = kronecker_oracle.kronecker(
                approximation, W, model, columns, importance, **where
            )
            return found / divisor
        case hf.KroneckerPlusLowRank(correction=correction):
            source = {"columns": columns, "importance": importance, "names": names}
            where = {"divisor": divisor, "seed": seed, "task": task}
            low = approximate(approximation.low_rank, W, model, **where)
            products = approximate(approximation.kronecker, W, model, **where, **source)
            at = kronecker_oracle.places(model, names)
            return kronecker_oracle.plus_low_rank(correction, exact, low, products, at)
    raise NotImplementedError(f"no dense rule for {approximation!r}: add one")


def close(actual: Tensor, expected: Tensor, relative: float = 1e-9) -> None:
    """Equal up to ``relative`` of the largest entry."""
    scale = float(expected.abs().max())
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=0, atol=relative * max(scale, 1e-30)
    )


def too_small_to_sketch(
    approximation: hf.Approximation, count: int
) -> AbstractContextManager[Any]:
    """Expects the one warning that a sketch has as many rows as what it sketches, if it has."""
    sketches = hf.CountSketch, hf.DenseSketch, hf.OSNAP, hf.SRHT
    if isinstance(approximation, sketches) and count <= approximation.size:
        return pytest.warns(UserWarning, match=f"LowRank\\(rank={count}\\)")
    return contextlib.nullcontext()
