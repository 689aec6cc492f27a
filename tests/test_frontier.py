"""The frontier: the same rules for every approximation, and a report that sets accuracy against memory."""

import collections
import dataclasses
import math
from pathlib import Path

import pytest

from holdfast import report, results
from holdfast.approximation import (
    APPROXIMATIONS,
    SRHT,
    Approximation,
    BlockDiagonal,
    DenseSketch,
    Kronecker,
    Nystrom,
)
from holdfast.configuration import to_json
from holdfast.experiment import Experiment
from holdfast.jobs import RunExperiment
from holdfast.recipes import RECIPES, Request, Score
from holdfast.recipes.tuning import short_grid
from holdfast.streams import PermutedMNIST

FRONTIER = RECIPES["frontier"]


@pytest.fixture(autouse=True)
def _no_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path / "nothing"))


def middle(experiment: Experiment) -> float:
    """A search that finds its best in the middle of its first three values."""
    if experiment.regularizer is None:
        return -math.inf
    grid = short_grid(experiment.regularizer)
    return -abs(2 * math.log10(experiment.regularizer.strength) - grid[1])


def name(approximation: Approximation) -> str:
    return to_json(approximation)["name"]


def runs(preset: str, score: Score = middle, **options: object) -> list[Experiment]:
    jobs = FRONTIER.jobs(Request((preset,), **options), score)  # type: ignore[arg-type]
    return [job.experiment for job in jobs if isinstance(job, RunExperiment)]


@pytest.mark.parametrize("preset", FRONTIER.presets)
@pytest.mark.parametrize("best", [-1, 2, 5, 8])
def test_every_search_ends_with_the_best_inside_by_the_same_rule(preset: str, best: int) -> None:
    """Wherever a search begins, it ends with a worse value on either side, on the seeds of all others."""

    def score(experiment: Experiment) -> float:
        if experiment.regularizer is None:
            return -math.inf
        return -abs(2 * math.log10(experiment.regularizer.strength) - best)

    tuning: dict[object, set[int]] = collections.defaultdict(set)
    seeds: dict[object, set[int]] = collections.defaultdict(set)
    reported: dict[object, list[float]] = collections.defaultdict(list)
    for e in runs(preset, score, seeds=3):
        if e.regularizer is None:
            continue
        method, strength = e.regularizer.approximation, e.regularizer.strength
        if e.role == "tune":
            assert e.storage == "float32"
            assert e.preset == ("toy" if preset == "toy" else "ten-tasks")
            seeds[method].add(e.seed)
            tuning[method].add(round(2 * math.log10(strength)))
        else:
            reported[method, e.storage].append(strength)
    assert tuning.keys() == {method for method, _ in reported}
    assert len({frozenset(found) for found in seeds.values()}) == 1
    assert min(map(min, seeds.values())) >= 100
    for grid in tuning.values():
        assert grid == set(range(min(grid), max(grid) + 1))
        assert min(grid) < best < max(grid)
    for strengths in reported.values():
        assert strengths == [pytest.approx(10 ** (best / 2), rel=1e-5)] * 3


def test_the_methods_differ_in_the_approximation_alone() -> None:
    for preset in FRONTIER.presets:
        rest = {
            dataclasses.replace(e, regularizer=None, limit=None, storage="float32")
            for e in runs(preset)
            if e.role == "report" and e.mode == "sequential"
        }
        assert len({dataclasses.replace(e, seed=0) for e in rest}) == 1
        for e in runs(preset):
            by_rows = e.regularizer is not None and isinstance(
                e.regularizer.approximation, BlockDiagonal | DenseSketch | Nystrom | SRHT
            )
            assert (e.limit is not None) == (by_rows and isinstance(e.stream, PermutedMNIST))


def test_every_approximation_at_every_budget() -> None:
    methods = {e.regularizer.approximation for e in runs("ten-tasks", seeds=1) if e.regularizer}
    families = collections.Counter(type(method).__name__ for method in methods)
    assert families == {
        "Kronecker": 7,
        "KroneckerPlusLowRank": 2,
        "Diagonal": 1,
        "LowRank": 6,
        "CountSketch": 5,
        "DiagonalPlusLowRank": 4,
        "BlockDiagonal": 4,
        "Nystrom": 1,
        "DenseSketch": 1,
        "OSNAP": 1,
        "SRHT": 1,
    }
    unknown = APPROXIMATIONS.keys() - {name(method) for method in methods}
    assert unknown == {"full", "composite"}  # m rows do not fit; a composite is any of the others


def test_the_longest_streams_come_last() -> None:
    presets = tuple(FRONTIER.presets)
    jobs = FRONTIER.jobs(Request(presets, seeds=1), middle)
    lengths = [
        job.experiment.stream.length
        for job in jobs
        if isinstance(job, RunExperiment) and isinstance(job.experiment.stream, PermutedMNIST)
    ]
    assert lengths == sorted(lengths)  # the searches of all are on ten
    assert set(lengths) == {10, 20, 50}


def test_what_is_left_out_needs_no_search() -> None:
    assert {e.role for e in runs("ten-tasks", only=("ends",))} == {"report"}
    some = runs("ten-tasks", only=("nystrom",))
    assert {name(e.regularizer.approximation) for e in some if e.regularizer} == {"nystrom"}
    assert [e.role for e in some if e.regularizer is None] == ["tune"]
    assert not runs("ten-tasks", only=("full",))


def test_a_method_is_complete_before_the_next_begins() -> None:
    def first_only(experiment: Experiment) -> float | None:
        held = experiment.regularizer
        known = held is None or isinstance(held.approximation, Kronecker)
        return middle(experiment) if known else None

    jobs = FRONTIER.jobs(Request(("ten-tasks",), seeds=3), first_only)
    planned = [job.experiment for job in jobs if isinstance(job, RunExperiment)]
    assert [e.role for e in planned[:8]] == [*["tune"] * 4, *["report"] * 3, "tune"]
    assert planned[0].regularizer is None  # what every search is measured by
    assert [e.seed for e in planned[4:7]] == [0, 1, 2]


def test_from_runs_to_the_page(tmp_path: Path) -> None:
    out = tmp_path / "frontier"

    def score(experiment: Experiment) -> float | None:
        return 0.5 if results.path_of(out, experiment).exists() else None

    for _ in range(2):  # searches first, then what they decide
        for job in FRONTIER.jobs(Request(("toy", "ten-tasks"), seeds=2, smoke=True), score):
            if not job.done(out):
                job.run(out, lambda _: None)
    rows = report.rows(out)
    assert {row["approximation"] for row in rows} == {"kronecker", "kronecker_plus_low_rank"}
    page = report.write(out).read_text()
    assert "Five tasks in the plane" in page
    assert "Ten permutations of MNIST" in page
    assert "Li et al." not in page
    text = (out / "report.md").read_text()
    assert "| EWC · Kronecker + rank 2 |" in text
    assert "The preset `fifty-tasks` was not run." in text
    assert (out / "figures" / "frontier-toy.svg").exists()
    assert (out / "figures" / "frontier-ten-tasks.png").exists()


def test_long_streams_take_the_strengths_of_ten() -> None:
    """Their searches are those of ten tasks, so that only the reported runs are new."""
    short = {e.id for e in runs("ten-tasks", seeds=1)}
    for preset in ("twenty-tasks", "fifty-tasks"):
        new = [e for e in runs(preset, seeds=1) if e.id not in short]
        assert {e.role for e in new} == {"report"}
        assert {(e.preset, e.stream.length) for e in new} == {
            (preset, {"t": 20, "f": 50}[preset[0]])
        }
        first, *_ = held = [e for e in new if e.regularizer is not None]
        assert first.regularizer.approximation == Kronecker(rank=64)  # the default comes first
        whole = next(e for e in held if e.regularizer.approximation == Kronecker())
        assert whole.storage == "bfloat16"
