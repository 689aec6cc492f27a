"""Accuracy against memory: every approximation at every budget, tuned alike, on the same streams."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from holdfast.approximation import (
    OSNAP,
    SRHT,
    Approximation,
    BlockDiagonal,
    CountSketch,
    DenseSketch,
    Diagonal,
    DiagonalPlusLowRank,
    Kronecker,
    KroneckerPlusLowRank,
    LowRank,
    Nystrom,
)
from holdfast.configuration import lookup
from holdfast.data import mnist
from holdfast.experiment import Experiment
from holdfast.history import Sum
from holdfast.importance import EWC
from holdfast.jobs import Job
from holdfast.models import MLP
from holdfast.recipes.cells import Cell, plan_presets
from holdfast.recipes.recipe import Recipe, Request, Score
from holdfast.recipes.tuning import GRID, SEEDS, Tuning, short_grid
from holdfast.regularizer import Regularizer
from holdfast.streams import PermutedMNIST, Toy
from holdfast.training import Training

__all__ = ["FrontierRecipe"]

SEARCHED = "ten-tasks"  # the stream on which strengths are chosen for all permutations
LENGTH = {"ten-tasks": 10, "twenty-tasks": 20, "fifty-tasks": 50}
# Floats per parameter beside 1 (diagonal), 50 (the paper's sketch) and thin products; the middle first.
BUDGETS = (10, 5, 25)
# These need every row written out: of all examples of all tasks that takes more than ten minutes a run.
BY_ROWS, ROWS = (BlockDiagonal, DenseSketch, Nystrom, SRHT), 10_000


@dataclasses.dataclass(frozen=True)
class InHalf:
    """An approximation that is stored in bfloat16."""

    approximation: Approximation


Method = Approximation | InHalf


class FrontierRecipe(Recipe):
    """What is best at every memory budget: EWC, all tasks summed, the latest anchor."""

    name: ClassVar[str] = "frontier"
    summary: ClassVar[str] = "accuracy against memory: every approximation at every budget"
    presets: ClassVar[Mapping[str, str]] = {
        "ten-tasks": "ten permutations of MNIST, one epoch a task, λ chosen on validation data",
        "toy": "the five tasks in the plane, λ chosen on validation data",
        "twenty-tasks": "the strongest of them on twenty permutations, at the λ that is best for ten",
        "fifty-tasks": "the strongest of them on fifty permutations, at the λ that is best for ten",
    }

    def example(self, preset: str, smoke: bool = False) -> Experiment:
        lookup(f"preset of {self.name}", self.presets, preset)
        return _held(_base(preset, smoke), Kronecker())

    def jobs(self, request: Request, score: Score) -> Sequence[Job]:
        return plan_presets(_groups, request, score, in_turn=True)


def _groups(preset: str, request: Request) -> Iterator[list[Cell]]:
    """The cells of a preset, the most important first."""
    base, smoke = _base(preset, request.smoke), request.smoke
    ends = [Cell(base)]
    if preset in ("toy", "ten-tasks"):  # longer streams learn thousands of epochs at once
        ends.append(Cell(dataclasses.replace(base, mode="joint")))
    tiers = _tiers() if preset in ("toy", "ten-tasks") else _longest()
    tiers = [[Kronecker(), KroneckerPlusLowRank(rank=2)]] if smoke else tiers
    for index, tier in enumerate(tiers):
        cells = [_tuned(base, method, smoke) for method in tier]
        yield [cell.adjusted(request) for cell in (cells + ends if index == 0 else cells)]


def _strongest() -> list[Method]:
    """What is compared first."""
    return [
        Kronecker(),
        Kronecker(rank=64),
        Diagonal(),
        CountSketch(50),
        LowRank(50),
        Kronecker(rank=16),
    ]


def _longest() -> list[list[Method]]:
    """What is compared on long streams; whole products in half precision, last: they take longest."""
    compared: list[Method] = [
        Kronecker(rank=64),
        Diagonal(),
        Kronecker(rank=16),
        CountSketch(50),
        LowRank(50),
    ]
    return [compared, [InHalf(Kronecker())]]


def _tiers() -> list[list[Method]]:
    """Every approximation at every budget; a part of a sum costs its share of it."""
    thin: list[Method] = [Kronecker(rank=4), Kronecker(rank=1)]
    together: list[Method] = [
        InHalf(Kronecker()),
        KroneckerPlusLowRank(rank=2),
        InHalf(CountSketch(50)),
    ]
    sizes: list[list[Method]] = [
        [LowRank(budget), CountSketch(budget), DiagonalPlusLowRank(rank=budget - 1)]
        for budget in BUDGETS
    ]
    sizes[0].append(DiagonalPlusLowRank(rank=49))
    other: list[Method] = [
        Kronecker(correction="eigen"),
        Kronecker(rank=64, merge="stack"),
        KroneckerPlusLowRank(rank=7),
    ]
    blocks: list[Method] = [BlockDiagonal(budget) for budget in (50, *BUDGETS)]
    # Other factors of the same size: what they cost and lose is in benchmarks/families.py.
    families: list[Method] = [Nystrom(10), LowRank(10, shrink=True), DenseSketch(10)]
    families += [OSNAP(10), SRHT(10)]
    small: list[Method] = [LowRank(1), CountSketch(1)]
    return [_strongest(), thin, together, sizes[0], other, blocks, *sizes[1:], families, small]


def _base(preset: str, smoke: bool) -> Experiment:
    """A run without a regularizer."""
    if preset == "toy":
        stream, training = Toy(), Training(epochs=250, batch_size=100, lr=1e-3)
        if smoke:
            stream = Toy(train=100, validation=100, test=100)
            training = dataclasses.replace(training, epochs=2)
        return Experiment("frontier", preset, stream, MLP((2, 128, 64, 2)), training)
    digits = PermutedMNIST(length=LENGTH[preset])
    model = MLP((784, 1024, 512, 256, 10), bias=False, init="xavier")
    if smoke:
        digits = dataclasses.replace(
            digits,
            source="generated" if mnist.missing() else "mnist",
            length=2,
            validation=100,
            train_size=200,
            test_size=100,
        )
        model = MLP((784, 16, 10), bias=False, init="xavier")
    # One epoch at the paper's 10⁻⁴ would not learn a task.
    return Experiment("frontier", preset, digits, model, Training(epochs=1, lr=5e-4))


def _held(base: Experiment, method: Method) -> Experiment:
    """A run with a regularizer."""
    approximation = method
    if isinstance(method, InHalf):
        base, approximation = dataclasses.replace(base, storage="bfloat16"), method.approximation
    assert isinstance(approximation, Approximation)
    if isinstance(approximation, BY_ROWS) and isinstance(base.stream, PermutedMNIST):
        base = dataclasses.replace(base, limit=ROWS)
    regularizer = Regularizer(EWC(), approximation, history=Sum())
    return dataclasses.replace(base, regularizer=regularizer)


def _tuned(base: Experiment, method: Method, smoke: bool) -> Cell:
    """A method whose strength is searched for: factors of √10, growing until the best lies inside.

    Searches are in full precision, and for longer streams on ten tasks: they take most of the time. What is
    best for ten need not be best for fifty, for no method.
    """
    found = _held(base, method)
    searched = dataclasses.replace(found, storage="float32")
    if smoke:
        return Cell(found, Tuning(searched, range(6, 7), SEEDS[:1], widest=(6, 6)))
    assert found.regularizer is not None
    if isinstance(base.stream, Toy):
        # seeds differ by more than neighbouring strengths: a short search ends anywhere
        return Cell(found, Tuning(searched, GRID, floor=base))
    grid = short_grid(found.regularizer)
    ten = _base(SEARCHED, smoke)
    searched = dataclasses.replace(searched, preset=SEARCHED, stream=ten.stream)
    # one seed: a search takes hours
    return Cell(found, Tuning(searched, grid, SEEDS[:1], floor=ten))
