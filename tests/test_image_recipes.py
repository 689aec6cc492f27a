"""The recipes on images: their presets as the protocol has them, and how a search leads to reported runs."""

import dataclasses
import io
import itertools
import re
from pathlib import Path

import pytest
from rich.console import Console

import holdfast as hf
from holdfast import memory
from holdfast.approximation import CountSketch, Diagonal
from holdfast.display import Lines
from holdfast.execution import execute
from holdfast.experiment import Experiment
from holdfast.history import MovingAverage, Sum
from holdfast.importance import EWC, MAS
from holdfast.jobs import RunExperiment
from holdfast.models import MLP
from holdfast.original_diagonal import OriginalDiagonal
from holdfast.recipes import RECIPES, Request
from holdfast.recipes.cells import Cell, plan
from holdfast.recipes.tuning import Tuning
from holdfast.report import write
from holdfast.reproduction import memory_note, reproduce
from holdfast.results import load_all
from holdfast.settings import change_all
from holdfast.streams import CIFAR100Shift, PermutedMNIST

MNIST, CIFAR = RECIPES["permuted-mnist"], RECIPES["cifar100"]
BOTH = [("permuted-mnist", p) for p in MNIST.presets] + [("cifar100", p) for p in CIFAR.presets]


@pytest.fixture(autouse=True)
def _no_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path))


def runs(
    recipe: str, preset: str, *, seeds: int = 1, smoke: bool = False, **options: object
) -> list[Experiment]:
    """All experiments of a preset if every search finds its best in the middle of its grid."""

    def score(experiment: Experiment) -> float:
        if experiment.regularizer is None:
            return 0.0
        return 1 / (1 + abs(experiment.regularizer.strength - 1e3))

    request = Request((preset,), seeds, smoke, **options)
    jobs = RECIPES[recipe].jobs(request, score)
    assert all(isinstance(job, RunExperiment) for job in jobs)
    return [job.experiment for job in jobs if isinstance(job, RunExperiment)]


def only(experiments: list[Experiment], **wanted: object) -> Experiment:
    found = [
        e
        for e in experiments
        if e.role == "report"
        and e.regularizer is not None
        and all(getattr(e.regularizer, k, getattr(e, k, None)) == v for k, v in wanted.items())
    ]
    assert len(found) == 1, [e.label for e in found]
    return found[0]


class TestOriginalCode:
    """PROTOCOL: what produced the printed numbers."""

    def test_protocol(self) -> None:
        for experiment in runs("permuted-mnist", "original-code", seeds=5):
            assert experiment.stream == PermutedMNIST(
                length=10, permutation="cumulative", train_on_validation=True
            )
            assert experiment.model == MLP((784, 1024, 512, 256, 10), bias=False, init="xavier")
            training = experiment.training
            assert (training.epochs, training.batch_size, training.lr) == (20, 100, 1e-4)
            assert training.reset == "epoch"
            assert not training.shuffle
            if experiment.role == "report":
                assert experiment.seed in range(40, 45)
            if experiment.regularizer is not None:
                assert experiment.regularizer.history == MovingAverage(new=0.75, start="zero")
                assert experiment.regularizer.anchor == "latest"

    @pytest.mark.parametrize(
        ("importance", "approximation", "strength", "original"),
        [
            (EWC(labels="predicted"), Diagonal(), 2e2, OriginalDiagonal("batches")),
            (EWC(), CountSketch(50), 2e4, None),
            (MAS(outputs="softmax"), Diagonal(), 2e3, OriginalDiagonal("batches")),
            (MAS(outputs="softmax"), CountSketch(50), 2e4, None),
        ],
    )
    def test_cells(
        self, importance: object, approximation: object, strength: float, original: object
    ) -> None:
        found = only(
            runs("permuted-mnist", "original-code"),
            importance=importance,
            approximation=approximation,
            original_diagonal=original,
        )
        assert found.regularizer is not None
        assert found.regularizer.strength == strength

    def test_the_network_has_the_paper_s_size(self) -> None:
        network = MNIST.example("original-code").model.build(0)
        assert sum(p.numel() for p in network.parameters()) == 1_460_736


def test_paper_grid_is_the_paper_s() -> None:
    searched = [e for e in runs("permuted-mnist", "paper") if e.role == "tune"]
    strengths = {e.regularizer.strength for e in searched if e.regularizer is not None}
    assert strengths == {1e2, 1e3, 1e4, 1e5, 1e6}
    importances = {e.regularizer.importance for e in searched if e.regularizer is not None}
    assert importances == {EWC(), MAS(outputs="softmax")}  # what its grid was searched with
    for experiment in runs("permuted-mnist", "paper"):
        assert not experiment.stream.train_on_validation
        if experiment.regularizer is not None:
            assert experiment.regularizer.history == MovingAverage(new=0.25)


def test_fair_compares_what_it_should() -> None:
    reported = [e for e in runs("permuted-mnist", "fair") if e.role == "report"]
    held = [e for e in reported if e.regularizer is not None]
    cells = {
        (
            repr(e.regularizer.importance),
            type(e.regularizer.approximation).__name__,
            type(e.regularizer.history).__name__,
            e.regularizer.anchor,
        )
        for e in held
        if e.regularizer is not None
    }
    names = ("Diagonal", "CountSketch", "LowRank")
    ewc, mas, sampled = repr(EWC()), repr(MAS()), repr(EWC(labels="sampled"))
    expected = {(ewc, "BlockDiagonal", "Sum", "latest")}
    expected |= {(ewc, a, "Sum", anchor) for a in names for anchor in ("latest", "each")}
    expected |= {(ewc, a, h, "latest") for a in names for h in ("MovingAverage", "Mean")}
    ours = (*names, "Kronecker")
    expected |= {(i, a, "Sum", "latest") for i in (ewc, mas, sampled) for a in ours}
    assert cells == expected
    assert {e.limit for e in held} == {None, 10_000}
    assert {e.mode for e in reported if e.regularizer is None} == {"sequential", "joint"}
    assert all(e.stream == PermutedMNIST() and e.training.epochs == 1 for e in reported)


def test_sketch_sizes() -> None:
    reported = [e for e in runs("permuted-mnist", "sketch-size") if e.role == "report"]
    assert {e.training.epochs for e in reported} == {2}
    sizes: dict[float, set[int]] = {}
    for e in reported:
        assert e.regularizer is not None
        if isinstance(e.regularizer.approximation, CountSketch):
            found = sizes.setdefault(e.regularizer.strength, set())
            found.add(e.regularizer.approximation.size)
    assert sizes == {1e4: {10, 20, 30, 40, 50}, 1e3: {10, 20, 30, 40, 50}}


def test_twenty_tasks_use_the_strengths_of_ten() -> None:
    experiments = runs("permuted-mnist", "twenty-tasks")
    for e in experiments:
        assert e.stream.length == (20 if e.role == "report" else 10)
        assert e.preset == ("twenty-tasks" if e.role == "report" else "fair")
    searched = {e.id for e in experiments if e.role == "tune"}
    assert searched <= {e.id for e in runs("permuted-mnist", "fair")}
    kinds = {type(e.regularizer.approximation).__name__ for e in experiments if e.regularizer}
    assert kinds == {"Kronecker", "Diagonal", "CountSketch", "LowRank"}  # the winner among them


class TestCIFAR:
    def test_protocol(self) -> None:
        experiments = runs("cifar100", "paper", seeds=2)
        for e in experiments:
            assert e.stream == CIFAR100Shift()
            assert (e.training.batch_size, e.training.lr) == (64, 1e-3)
            assert e.training.epochs >= 30
        network = CIFAR.example("paper").model.build(0)
        assert sum(p.numel() for p in network.parameters()) == 2_747_605

    @pytest.mark.parametrize(
        ("importance", "approximation", "strength", "original"),
        [
            (EWC(labels="predicted"), Diagonal(), 1e5, OriginalDiagonal()),
            (EWC(), Diagonal(), 1e5, None),
            (EWC(), CountSketch(50), 1e2, None),
            (MAS(outputs="softmax"), Diagonal(), 1e5, OriginalDiagonal()),
            (MAS(outputs="softmax"), Diagonal(), 1e5, None),
            (MAS(outputs="softmax"), CountSketch(50), 1e3, None),
            (MAS(), CountSketch(50), 1e3, None),
        ],
    )
    def test_cells(
        self, importance: object, approximation: object, strength: float, original: object
    ) -> None:
        found = only(
            runs("cifar100", "paper"),
            importance=importance,
            approximation=approximation,
            original_diagonal=original,
        )
        assert found.regularizer is not None
        assert found.regularizer.strength == strength

    def test_all_methods_of_a_seed_share_the_first_task(self) -> None:
        from holdfast.checkpoint import first_task_id

        experiments = runs("cifar100", "paper") + runs("cifar100", "fair")
        names = {first_task_id(e) for e in experiments if e.role == "report"}
        assert len(names) == 1


@pytest.mark.parametrize(("recipe", "preset"), BOTH)
def test_settings_reach_every_run_and_its_search(recipe: str, preset: str) -> None:
    changed = runs(recipe, preset, settings=("training.epochs=3", "stream.train_size=40"))
    assert {e.training.epochs for e in changed} == {3}
    assert {e.stream.train_size for e in changed} == {40}
    assert len({e.id for e in changed}) == len(changed)
    assert not {e.id for e in changed} & {e.id for e in runs(recipe, preset)}


@pytest.mark.parametrize(("recipe", "preset"), BOTH)
def test_every_experiment_becomes_json_and_comes_back(recipe: str, preset: str) -> None:
    for experiment in runs(recipe, preset):
        assert Experiment.from_json(experiment.to_json()) == experiment


@pytest.mark.parametrize(("recipe", "preset"), BOTH)
def test_without_extras_there_is_less(recipe: str, preset: str) -> None:
    few, many = (runs(recipe, preset, extras=extras) for extras in (False, True))
    assert 0 < len(few) < len(many)
    assert {e.id for e in few} <= {e.id for e in many}


@pytest.mark.parametrize(("recipe", "preset"), BOTH)
def test_smoke_is_small_and_needs_no_data(recipe: str, preset: str) -> None:
    experiments = runs(recipe, preset, smoke=True)
    assert len(experiments) <= 20
    assert {e.stream.source for e in experiments} == {"generated"}
    example = RECIPES[recipe].example(preset, smoke=True)
    assert isinstance(example.regularizer and example.regularizer.approximation, CountSketch)


@pytest.mark.parametrize(("recipe", "preset"), [("permuted-mnist", "fair"), ("cifar100", "paper")])
def test_a_smoke_run_runs(recipe: str, preset: str) -> None:
    result = execute(RECIPES[recipe].example(preset, smoke=True))
    assert len(result.test) == 2


def test_the_whole_smoke_of_cifar100(tmp_path: Path) -> None:
    """Every cell of both presets, a search among them; `paper` leaves to `fair` what it begins with."""
    out, lines = tmp_path / "results", Lines(Console(file=io.StringIO()))
    for preset in ("paper", "fair"):
        summary = reproduce(CIFAR, Request((preset,), 1, smoke=True), out, lines, jobs=1)
        assert (summary.failed, summary.left) == ([], [])
        begun = list((out / "checkpoints").glob("first-*")) if preset == "paper" else []
        assert summary.ran == {"paper": 9, "fair": 2}[preset]
        assert (out / "checkpoints").exists() == bool(begun)
    labels = {result.experiment.label for result in load_all(out).values()}
    assert len(labels) == 11
    assert any("tuning" in label for label in labels)
    assert write(out).exists()


def test_a_search_without_a_regularizer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no strength to search for; --only ends"):
        runs("permuted-mnist", "fair", settings=("regularizer=null",))


class TestCells:
    METHOD = dataclasses.replace(MNIST.example("fair", smoke=True))

    def test_searches_stand_before_what_waits_for_them(self) -> None:
        cell = Cell(self.METHOD, Tuning(self.METHOD, range(4, 7), (7,)))
        waiting = plan([cell], [0, 1], lambda _: None)
        assert [e.role for e in waiting] == ["tune"] * 3
        scores = iter(itertools.cycle([0.1, 0.9, 0.2]))
        known = {e.id: next(scores) for e in waiting}
        complete = plan([cell], [0, 1], lambda e: known.get(e.id))
        assert [e.seed for e in complete] == [7, 7, 7, 0, 1]
        assert [e.regularizer.strength for e in complete[3:] if e.regularizer] == [
            pytest.approx(10**2.5, rel=1e-5)
        ] * 2

    def test_nothing_is_named_twice(self) -> None:
        cell = Cell(self.METHOD, Tuning(self.METHOD, range(4, 7), (7,)))
        assert len(plan([cell, cell], [0], lambda _: None)) == 3

    def test_steps_of_two_grow_by_two(self) -> None:
        tuning = Tuning(self.METHOD, range(4, 9, 2), (7,))
        edge = {4: 0.9, 6: 0.5, 8: 0.1, 2: 0.3}

        def score(experiment: Experiment) -> float | None:
            assert experiment.regularizer is not None
            strengths = {10 ** (k / 2): v for k, v in edge.items()}
            return strengths.get(experiment.regularizer.strength)

        assert tuning.chosen(score) == 1e2
        assert [e.regularizer.strength for e in tuning.experiments(score) if e.regularizer] == [
            1e1, 1e2, 1e3, 1e4,
        ]  # fmt: skip


def test_sum_is_the_rule_of_fair() -> None:
    example = MNIST.example("fair")
    assert example.regularizer is not None
    assert example.regularizer.history == Sum()


def test_the_memory_of_the_largest_matrix_is_said_before_it_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "available", lambda _: 10**10)
    note = memory_note(runs("cifar100", "paper"), processes=2)
    assert note is not None
    assert "CountSketch(size=50" in note
    assert "2,747,605 parameters" in note
    assert "550 MB" in note
    assert memory_note([RECIPES["toy"].example("paper")], 2) is None
    assert memory_note([], 2) is None


@pytest.mark.parametrize(
    ("free", "advice"),
    [
        (10**9, "what fits is --jobs 1, or regularizer.approximation.size=45, or regularizer.ap"),
        (
            10**8,
            "what fits is regularizer.approximation.size=4, or regularizer.approximation=diag",
        ),
        (10**6, "not even a diagonal fits"),
    ],
)
def test_what_does_not_fit_is_refused_and_says_what_would(
    free: int, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda _: free)
    with pytest.raises(MemoryError) as caught:
        memory_note(runs("cifar100", "paper"), processes=2)
    assert "takes 550 MB while a task is consolidated, beside the penalty" in str(caught.value)
    assert f"2 at a time, {memory.readable(free)} are free: {advice}" in str(caught.value)


@pytest.mark.parametrize("free", [10**5, 10**6, 10**7])
@pytest.mark.parametrize(
    "approximation",
    [
        hf.OSNAP(size=2000, nonzeros=4),
        hf.SRHT(size=2000, block=2048),
        hf.LowRank(2000),
        hf.BlockDiagonal(2000),
        hf.Full(form="dense"),
        hf.Kronecker(),
    ],
    ids=str,
)
def test_what_is_said_to_fit_fits(
    approximation: hf.Approximation, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda _: free)
    experiment = dataclasses.replace(
        RECIPES["toy"].example("paper"), regularizer=hf.Regularizer(hf.EWC(), approximation)
    )
    try:
        memory_note([experiment], 1)
    except MemoryError as error:
        advised = re.findall(r"(regularizer\S+=\w+)", str(error))
        assert advised
        for setting in advised:
            memory_note([change_all(experiment, [setting])], 1)
