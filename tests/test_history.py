"""How the past adds up: five tasks against dense sums of separate quadratic penalties."""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

import holdfast as hf
import reference
from holdfast.hashing import Draw
from holdfast.rows import GivenRows
from models_zoo import CASES, Columns, batches, flat, nudge
from recipes_table import approximate, close

TASKS = 5
EXAMPLES = 6
SEED = 4
STRENGTH = 2.5

HISTORIES: dict[str, tuple[hf.History, Callable[[int, int], float]]] = {
    # the weight of task k of T, written out
    "sum": (hf.Sum(), lambda k, T: 1.0),
    "mean": (hf.Mean(), lambda k, T: 1 / T),
    "moving_average": (
        hf.MovingAverage(new=0.3),
        lambda k, T: 0.7 ** (T - 1) if k == 0 else 0.3 * 0.7 ** (T - 1 - k),
    ),
    "moving_average-zero": (
        hf.MovingAverage(new=0.3, start="zero"),
        lambda k, T: 0.3 * 0.7 ** (T - 1 - k),
    ),
    "moving_average-last": (hf.MovingAverage(new=1.0), lambda k, T: float(k == T - 1)),
}
EXACT = {
    "diagonal": hf.Diagonal(),
    "block_diagonal-size": hf.BlockDiagonal(size=7),
    "block_diagonal-layer": hf.BlockDiagonal(by="layer"),
    "full-dense": hf.Full(form="dense"),
    "full-factored": hf.Full(form="factored"),
    "low_rank": hf.LowRank(rank=TASKS * EXAMPLES),
    "low_rank-stack": hf.LowRank(rank=EXAMPLES, merge="stack"),
    "diagonal_plus_low_rank": hf.DiagonalPlusLowRank(rank=TASKS * EXAMPLES),
    "diagonal_plus_low_rank-stack": hf.DiagonalPlusLowRank(rank=2, group=1, merge="stack"),
    "composite": hf.Composite(
        {
            "*.bias": hf.Full(form="dense"),
            "body.*": hf.LowRank(rank=2, group=1, merge="stack"),
            "*": hf.DiagonalPlusLowRank(rank=2, group=1, merge="stack"),
        }
    ),
    "kronecker-stack": hf.Kronecker(merge="stack"),
    "kronecker-eigen-stack": hf.Kronecker(correction="eigen", merge="stack"),
    "kronecker_plus_low_rank": hf.KroneckerPlusLowRank(rank=TASKS * EXAMPLES),
    "kronecker_plus_low_rank-stack": hf.KroneckerPlusLowRank(rank=2, group=1, merge="stack"),
}


@dataclass
class Task:
    model: nn.Module
    columns: Columns
    W: Tensor
    anchor: Tensor


@functools.cache
def tasks() -> list[Task]:
    """Five tasks with their own data and parameters, and the rows of each."""
    case, found = CASES["mlp"], []
    model = case.model()
    for k in range(TASKS):
        model = nudge(copy.deepcopy(model), seed=k)
        columns = case.columns(EXAMPLES, seed=k)
        W = reference.rows(model, columns, hf.EWC())
        found.append(Task(model, columns, W, flat(model)))
    return found


def consolidated(recipe: hf.Regularizer, seed: int = SEED) -> list[hf.Penalty]:
    """The penalty after every task, the seed being the same in the whole loop."""
    found: list[hf.Penalty] = []
    for task in tasks():
        previous = found[-1] if found else None
        data = batches(task.columns, 4)
        found.append(recipe.consolidate(task.model, data, previous=previous, seed=seed))
    return found


def dense_terms(
    approximation: hf.Approximation, weight: Callable[[int, int], float], anchor: str, count: int
) -> list[tuple[Tensor, Tensor]]:
    """(weighted matrix, anchor) of every separate penalty after ``count`` tasks."""
    terms = []
    for k, task in enumerate(tasks()[:count]):
        source = {"columns": task.columns, "importance": hf.EWC()}
        matrix = approximate(approximation, task.W, task.model, divisor=EXAMPLES, task=k, **source)
        at = task.anchor if anchor == "each" else tasks()[count - 1].anchor
        terms.append((weight(k, count) * matrix, at))
    return terms


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("anchor", ["latest", "each"])
@pytest.mark.parametrize("approximation", EXACT)
def test_the_sum_of_separate_penalties(history: str, anchor: str, approximation: str) -> None:
    """After every task: matrix, value and gradient, at float64 rounding."""
    rule, weight = HISTORIES[history]
    recipe = hf.Regularizer(
        hf.EWC(), EXACT[approximation], strength=STRENGTH, history=rule, anchor=anchor
    )
    probe = nudge(copy.deepcopy(tasks()[-1].model), seed=99)
    theta = flat(probe)
    for count, penalty in enumerate(consolidated(recipe), start=1):
        terms = dense_terms(recipe.approximation, weight, anchor, count)
        omega = sum((matrix for matrix, _ in terms), torch.zeros(()))
        close(penalty.matrix.dense(), omega, 1e-8)
        at = theta.clone().requires_grad_()
        value = sum(
            (reference.quadratic(matrix, at, a, STRENGTH) for matrix, a in terms), torch.zeros(())
        )
        (gradient,) = torch.autograd.grad(value, at)
        found = penalty(probe)
        close(found.detach(), value.detach(), 1e-9)
        probe.zero_grad()
        found.backward()
        grads = [p.grad for p in probe.parameters() if p.grad is not None]
        close(torch.cat([g.flatten() for g in grads]), gradient, 1e-8)
        assert torch.equal(penalty.anchor, tasks()[count - 1].anchor)
        assert len(penalty.tasks) == count


@pytest.mark.parametrize("anchor", ["latest", "each"])
def test_five_equal_tasks_at_five_anchors(anchor: str) -> None:
    """The factored form loses nothing when tasks share all their directions.

    Compression drops the rows that tasks have in common; what the anchors disagree about along them
    is a constant of the penalty, and stays.
    """
    task = tasks()[0]
    values = {}
    probe = nudge(copy.deepcopy(task.model), seed=99)
    for form in ("dense", "factored"):
        recipe = hf.Regularizer(hf.EWC(), hf.Full(form=form), anchor=anchor)
        penalty = None
        for k in range(TASKS):
            model = nudge(copy.deepcopy(task.model), seed=k)
            matrix = hf.Regularizer(hf.EWC(), hf.Full(form=form)).consolidate(
                task.model, [task.columns]
            )
            record = hf.TaskRecord(EXAMPLES, 0)
            penalty = recipe.extend(penalty, model, matrix.matrix, record)
        assert penalty is not None
        values[form] = penalty(probe).detach()
    close(values["factored"], values["dense"])


def test_constant_memory() -> None:
    """Every approximation but the stacking ones: five tasks take what two do."""
    for approximation in (
        *[EXACT[name] for name in ("diagonal", "block_diagonal-size", "block_diagonal-layer")],
        EXACT["full-dense"],
        hf.Kronecker(),
        hf.Kronecker(correction="eigen"),
        hf.KroneckerPlusLowRank(rank=3),
        hf.KroneckerPlusLowRank(rank=3, correction="eigen"),
        hf.Kronecker(merge="nearest"),
        hf.CountSketch(size=3),
        hf.LowRank(rank=3),
        hf.DenseSketch(size=3),
        hf.OSNAP(size=4),
        hf.SRHT(size=3),
        hf.Nystrom(size=3),
        hf.DiagonalPlusLowRank(rank=3),
        hf.Composite({"body.*": hf.DiagonalPlusLowRank(rank=3), "*": hf.CountSketch(size=3)}),
    ):
        recipe = hf.Regularizer(hf.EWC(), approximation, anchor="each")
        sizes = [penalty.nbytes for penalty in consolidated(recipe)]
        assert len(set(sizes[1:])) == 1
    stacked = hf.Regularizer(hf.EWC(), hf.CountSketch(size=3, merge="stack"))
    assert [len(p.matrix.factor) for p in consolidated(stacked)] == [3, 6, 9, 12, 15]


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("copies", [1, 2])
def test_merged_sketches_are_sums_of_independent_ones(history: str, copies: int) -> None:
    """F = Σ √w_k S_k W_k with the hash of (seed, k): exactly, for a constant seed in the loop."""
    rule, weight = HISTORIES[history]
    approximation = hf.CountSketch(size=2, copies=copies)
    penalty = consolidated(hf.Regularizer(hf.EWC(), approximation, history=rule))[-1]
    F, ids = torch.zeros(()), []
    for k, task in enumerate(tasks()):
        sketch, names = reference.count_sketch(task.W, 2, seed=SEED, task=k, copies=copies)
        F = F + weight(k, TASKS) ** 0.5 * sketch / EXAMPLES**0.5
        ids.append(names)
    close(penalty.matrix.factor, F)
    assert [task.hash_ids for task in penalty.tasks] == ids
    assert len({name for names in ids for name in names}) == TASKS * copies


@pytest.mark.parametrize("anchor", ["latest", "each"])
@pytest.mark.parametrize(
    "approximation",
    [hf.CountSketch(size=2, merge="stack"), hf.LowRank(rank=2, group=1, merge="stack")],
)
def test_stacking_is_the_average_of_the_matrices(
    anchor: str, approximation: hf.Approximation
) -> None:
    """Neither summed nor truncated: exactly the weighted sum of the separate approximations."""
    recipe = hf.Regularizer(
        hf.EWC(), approximation, STRENGTH, hf.MovingAverage(new=0.3), anchor=anchor
    )
    penalty = consolidated(recipe)[-1]
    omega, value = torch.zeros(()), torch.zeros(())
    probe = nudge(copy.deepcopy(tasks()[-1].model), seed=99)
    for k, task in enumerate(tasks()):
        weight = HISTORIES["moving_average"][1](k, TASKS)
        alone = approximate(approximation, task.W, task.model, divisor=EXAMPLES, seed=SEED, task=k)
        at = task.anchor if anchor == "each" else tasks()[-1].anchor
        omega = omega + weight * alone
        value = value + reference.quadratic(weight * alone, flat(probe), at, STRENGTH)
    close(penalty.matrix.dense(), omega)
    close(penalty(probe).detach(), value)


def test_truncated_low_rank_stays_below_and_keeps_the_best() -> None:
    """Stack and truncate: the merged factor is the best of its rank for the stacked rows."""
    recipe = hf.Regularizer(hf.EWC(), hf.LowRank(rank=3, group=1))
    first, second = consolidated(recipe)[:2]
    new = approximate(recipe.approximation, tasks()[1].W, tasks()[1].model, divisor=EXAMPLES)
    close(second.matrix.dense(), reference.best_rank(first.matrix.dense() + new, 3))


# Statistics of merged sketches: many seeds, each constant over its loop.

SEEDS = 120


@functools.cache
def _draws(anchor: str, copies: int = 1, shared: bool = False) -> tuple[Tensor, Tensor]:
    """The penalty at one point for many seeds, and what it must be on average.

    The tasks have half of their rows in common, so that a shared hash shows.
    """
    torch.manual_seed(0)
    common = torch.randn(2, 3, dtype=torch.float64)
    W = [torch.cat([common, torch.randn(2, 3, dtype=torch.float64)]) for _ in range(TASKS)]
    models = [nudge(nn.Linear(3, 1, bias=False).double(), seed=k) for k in range(TASKS)]
    probe = nudge(nn.Linear(3, 1, bias=False).double(), seed=77, scale=1.0)
    space = hf.ParameterSpace.of(probe)
    sketch = hf.CountSketch(size=2, copies=copies)
    recipe = hf.Regularizer(hf.EWC(), sketch, 1.0, hf.Mean(), anchor=anchor)
    found = []
    for seed in range(SEEDS):
        penalty = None
        for k, model in enumerate(models):
            draw = Draw(seed, task=0 if shared else k)
            setting = hf.Setting(space, draw, dtype=torch.float64)
            state = sketch.start(setting)
            sketch.update(state, GivenRows(W[k], torch.arange(4)))
            ids = () if shared else sketch.hash_ids(setting)
            matrix = 0.25 * sketch.finish(state)
            penalty = recipe.extend(penalty, model, matrix, hf.TaskRecord(4, seed, ids))
        assert penalty is not None
        found.append(penalty(probe).detach())
    exact = torch.zeros(())
    for k in range(TASKS):
        at = flat(models[k] if anchor == "each" else models[-1])
        exact = exact + reference.quadratic(W[k].T @ W[k] / 4 / TASKS, flat(probe), at, 1.0)
    return torch.stack(found), exact


def _z(draws: Tensor, exact: Tensor) -> float:
    return float((draws.mean() - exact) / (draws.std() / len(draws) ** 0.5))


@pytest.mark.parametrize("anchor", ["latest", "each"])
def test_merged_sketches_are_unbiased_for_a_constant_seed(anchor: str) -> None:
    draws, exact = _draws(anchor)
    assert draws.std() > 0.05 * exact  # they are sketches, not the exact thing
    assert abs(_z(draws, exact)) < 4


def test_a_shared_hash_would_be_biased() -> None:
    """The test above has the power to see it: with one hash for all tasks the mean is far off."""
    draws, exact = _draws("latest", shared=True)
    assert _z(draws, exact) > 8
    assert draws.mean() > 1.5 * exact


def test_copies_average_independent_sketches() -> None:
    """FᵀF of c copies is the mean of c sketches, so the spread falls with √c."""
    one, exact = _draws("latest")
    four, same = _draws("latest", copies=4)
    assert torch.equal(exact, same)
    assert abs(_z(four, exact)) < 4
    assert 0.35 < float(four.std() / one.std()) < 0.7  # 1/2 up to sampling noise


@pytest.mark.parametrize("anchor", ["latest", "each"])
def test_previous_is_left_as_it_was(anchor: str) -> None:
    for approximation in (*EXACT.values(), hf.CountSketch(size=2)):
        recipe = hf.Regularizer(hf.EWC(), approximation, history=hf.Mean(), anchor=anchor)
        one, two = tasks()[:2]
        first = recipe.consolidate(one.model, [one.columns], seed=1)
        second = recipe.consolidate(two.model, [two.columns], previous=first, seed=1)
        stored = [
            t.clone() for t in (*second.matrix.tensors.values(), second.anchor, *second.offset)
        ]
        recipe.consolidate(one.model, [one.columns], previous=second, seed=1)
        now = (*second.matrix.tensors.values(), second.anchor, *second.offset)
        assert all(torch.equal(a, b) for a, b in zip(stored, now, strict=True))


def test_strength_may_change_between_tasks() -> None:
    one, two = tasks()[:2]
    weak = hf.Regularizer(hf.EWC(), hf.Diagonal(), strength=1.0)
    strong = replace(weak, strength=10.0)
    first = weak.consolidate(one.model, [one.columns])
    second = strong.consolidate(two.model, [two.columns], previous=first)
    same = weak.consolidate(two.model, [two.columns], previous=first)
    assert second.strength == 10.0
    assert torch.equal(second.matrix.values, same.matrix.values)


@pytest.mark.parametrize(
    "other",
    [
        {"importance": hf.MAS()},
        {"approximation": hf.BlockDiagonal()},
        {"history": hf.Mean()},
        {"anchor": "each"},
    ],
)
def test_previous_of_another_recipe_is_refused(other: dict[str, object]) -> None:
    recipe = hf.Regularizer(hf.EWC(), hf.Diagonal())
    task = tasks()[0]
    penalty = recipe.consolidate(task.model, [task.columns])
    with pytest.raises(ValueError, match=rf"another recipe.*\n  {next(iter(other))}: was .*, is "):
        replace(recipe, **other).consolidate(task.model, [task.columns], previous=penalty)
