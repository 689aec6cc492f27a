"""The toy recipe: the right cells, in a useful order, each deviation a named field."""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable

import pytest

import holdfast as hf
from holdfast.experiment import Experiment
from holdfast.jobs import RunExperiment, RunFisherStudy
from holdfast.original_diagonal import OriginalDiagonal
from holdfast.recipes import RECIPES, Request
from holdfast.recipes.toy import beside, headline
from holdfast.recipes.tuning import GRID, SEEDS, Tuning, strength

TOY = RECIPES["toy"]


def nothing(experiment: Experiment) -> None:
    return None


def runs(
    request: Request, score: Callable[[Experiment], float | None] = nothing
) -> list[Experiment]:
    return [job.experiment for job in TOY.jobs(request, score) if isinstance(job, RunExperiment)]


def cell(e: Experiment) -> tuple[str, str]:
    data = e.to_json()["regularizer"]
    return data["importance"]["name"], data["approximation"]["name"]


@pytest.mark.parametrize("preset", TOY.presets)
def test_the_paper_table_has_twelve_cells(preset: str) -> None:
    cells = list(headline(preset))
    assert Counter(map(cell, cells)) == {
        (importance, approximation): 2 if approximation == "low_rank" else 1
        for importance in ("ewc", "mas")
        for approximation in ("diagonal", "block_diagonal", "count_sketch", "low_rank", "full")
    }
    ranks = [
        e.regularizer.approximation.rank
        for e in cells
        if e.regularizer and isinstance(e.regularizer.approximation, hf.LowRank)
    ]
    assert ranks == [1, 50, 1, 50]
    for e in cells:
        assert e.stream.train == 2000  # type: ignore[attr-defined]
        assert (e.training.epochs, e.training.batch_size, e.training.lr) == (250, 100, 1e-3)
        approximation = e.regularizer.approximation if e.regularizer else None
        assert getattr(approximation, "merge", "stack") == "stack"


def test_paper_is_the_text() -> None:
    for e in headline("paper"):
        assert e.regularizer is not None
        assert e.regularizer.strength == 1e3
        assert e.regularizer.history == hf.MovingAverage(new=0.5, start="first")
        assert e.regularizer.importance in (hf.EWC(labels="true"), hf.MAS(outputs="logits"))
        assert e.original_diagonal is None
        assert e.training.reset == "task"


def test_original_code_names_its_deviations() -> None:
    for e in headline("original-code"):
        assert e.regularizer is not None
        approximation, importance = e.regularizer.approximation, e.regularizer.importance
        assert e.regularizer.strength == 2e3
        assert e.regularizer.history == hf.MovingAverage(new=0.5, start="zero")
        assert e.training.reset == "epoch"
        if isinstance(approximation, hf.Diagonal):
            assert e.original_diagonal == OriginalDiagonal("batches")
            assert importance in (hf.EWC(labels="predicted"), hf.MAS(outputs="softmax"))
        else:
            assert e.original_diagonal is None
            assert importance in (hf.EWC(labels="true"), hf.MAS(outputs="softmax"))
        if isinstance(approximation, hf.BlockDiagonal):
            assert approximation.size == (10 if isinstance(importance, hf.EWC) else 50)


@pytest.mark.parametrize("preset", TOY.presets)
def test_baselines_stand_beside_every_table(preset: str) -> None:
    found = [(e.mode, e.role) for e in beside(preset) if e.regularizer is None]
    assert sorted(found) == [
        ("joint", "report"),
        ("sequential", "report"),
        ("sequential", "single"),
    ]


def test_what_the_paper_did_not_show() -> None:
    extras = [e for e in beside("paper") if e.regularizer is not None]
    shown = {
        (*cell(e), type(e.regularizer.history).__name__, e.regularizer.anchor)
        for e in extras
        if e.regularizer
    }
    for importance in ("ewc", "mas"):
        for approximation in ("diagonal", "count_sketch"):
            for way in (("Sum", "latest"), ("Mean", "latest"), ("MovingAverage", "each")):
                assert (importance, approximation, *way) in shown
    restarted = [cell(e) for e in extras if e.training.reset == "epoch"]
    assert restarted == [("ewc", "diagonal"), ("ewc", "count_sketch"), ("ewc", "full")]
    originals = [
        (cell(e)[0], e.original_diagonal)
        for e in beside("original-code")
        if e.regularizer and isinstance(e.regularizer.approximation, hf.Diagonal)
    ]
    examples = OriginalDiagonal("examples")
    assert originals == [("ewc", None), ("ewc", examples), ("mas", None), ("mas", examples)]


def test_the_most_useful_runs_come_first() -> None:
    order = runs(Request(("paper",), seeds=20))
    assert [e.seed for e in order[:60]] == [seed for seed in range(5) for _ in range(12)]
    assert {cell(e) for e in order[:60]} == set(map(cell, headline("paper")))
    assert [e.seed for e in order[60:240]] == [seed for seed in range(5, 20) for _ in range(12)]
    extras = order[240:]
    assert [e.seed for e in extras] == sorted(e.seed for e in extras)
    assert len(order) == len({e.id for e in order}) == 20 * (12 + len(list(beside("paper"))))


def test_extras_and_seeds_can_be_left_out() -> None:
    assert len(runs(Request(("paper",), seeds=1, extras=False))) == 12
    with pytest.raises(ValueError, match="the number of seeds is 1 or larger, got 0"):
        Request(("paper",), seeds=0)


def test_pictures_are_kept_of_two_seeds_of_the_table() -> None:
    jobs = TOY.jobs(Request(("paper",), seeds=5), nothing)
    pictured = [j.experiment for j in jobs if isinstance(j, RunExperiment) and j.boundaries]
    assert Counter(e.seed for e in pictured) == {0: 12, 1: 12}
    studies = [j for j in jobs if isinstance(j, RunFisherStudy)]
    assert [j.seed for j in studies] == [0, 1, 2, 3, 4]
    assert studies[0].study.training.epochs == 200
    assert len(studies[0].study.stream.tasks(0)) == 4


def test_settings_change_every_experiment_that_has_the_field() -> None:
    request = Request(
        ("paper",), seeds=1, settings=("training.epochs=7", "regularizer.strength=5")
    )
    found = runs(request)
    assert {e.training.epochs for e in found} == {7}
    assert {e.regularizer.strength for e in found if e.regularizer} == {5.0}
    assert any(e.regularizer is None for e in found)


def test_presets_by_name() -> None:
    assert TOY.choose_presets("fair") == ("fair",)
    assert TOY.choose_presets("all") == ("paper", "original-code", "fair")
    with pytest.raises(
        ValueError, match=r"unknown preset of toy 'papr'; known: paper.*did you mean"
    ):
        TOY.choose_presets("papr")
    assert TOY.example("original-code").preset == "original-code"
    with pytest.raises(ValueError, match="unknown preset of toy"):
        TOY.example("x")


# --- the search for a strength


def method() -> Experiment:
    return next(headline("fair"))


def peak(at: float) -> Callable[[Experiment], float]:
    """Scores that are best at one strength."""

    def score(e: Experiment) -> float:
        assert e.regularizer is not None
        ratio = e.regularizer.strength / at
        return 1 / (ratio + 1 / ratio)

    return score


def test_the_first_grid_has_seven_values_in_factors_of_root_ten() -> None:
    tuning = Tuning(method())
    first = tuning.experiments(nothing)
    strengths = sorted({e.regularizer.strength for e in first if e.regularizer})
    assert len(strengths) == 7
    ratios = [b / a for a, b in itertools.pairwise(strengths)]
    assert ratios == pytest.approx([10**0.5] * 6, rel=1e-5)
    assert {e.role for e in first} == {"tune"}
    assert sorted({e.seed for e in first}) == [100, 101, 102]
    assert tuning.chosen(nothing) is None


@pytest.mark.parametrize("exponent", [-3, 2, 3, 4, 6, 9, 10, 13])
def test_the_grid_grows_until_the_best_lies_inside(exponent: int) -> None:
    tuning, score = Tuning(method()), peak(strength(exponent))
    assert tuning.chosen(score) == strength(exponent)
    tried = sorted({e.regularizer.strength for e in tuning.experiments(score) if e.regularizer})
    assert tried[0] < strength(exponent) < tried[-1]
    first, last = min(GRID[0], exponent - 1), max(GRID[-1], exponent + 1)
    assert tried == [strength(k) for k in range(first, last + 1)]  # and no further


def test_the_search_waits_for_missing_runs_and_takes_the_smaller_of_equals() -> None:
    tuning = Tuning(method())
    inside = peak(strength(6))
    missing = tuning.experiments(nothing)[4]

    def incomplete(e: Experiment) -> float | None:
        return None if e == missing else inside(e)

    assert tuning.chosen(incomplete) is None
    assert len(tuning.experiments(incomplete)) == 21
    two = {strength(5), strength(7)}
    assert tuning.chosen(
        lambda e: 1.0 if e.regularizer and e.regularizer.strength in two else 0.0
    ) == strength(5)


def test_the_growth_has_an_end() -> None:
    tuning = Tuning(method(), widest=(1, 9))
    falling = peak(1e-30)
    tried = {e.regularizer.strength for e in tuning.experiments(falling) if e.regularizer}
    assert min(tried) == strength(1)
    assert tuning.chosen(falling) == strength(1)


class TestFloor:
    """A search that knows how well a network does that holds nothing."""

    BARE = dataclasses.replace(method(), regularizer=None)
    TUNING = Tuning(method(), floor=BARE)

    @staticmethod
    def deceiving(e: Experiment) -> float:
        """The best strength is 1; far above it chance makes another the best of its neighbours."""
        if e.regularizer is None:
            return 0.5
        return (
            0.9 if e.regularizer.strength == 1 else 0.4 - 0.01 * abs(e.regularizer.strength - 1e3)
        )

    def test_a_best_that_is_worse_than_nothing_is_not_believed(self) -> None:
        assert Tuning(method()).chosen(self.deceiving) == 1e3
        assert self.TUNING.chosen(self.deceiving) == 1
        tried = {
            e.regularizer.strength
            for e in self.TUNING.experiments(self.deceiving)
            if e.regularizer
        }
        assert min(tried) == strength(-1)

    def test_it_is_run_first_with_the_seeds_of_the_search(self) -> None:
        first = self.TUNING.experiments(nothing)[:3]
        assert first == [dataclasses.replace(self.BARE, seed=s, role="tune") for s in SEEDS]

    def test_nothing_is_chosen_without_it(self) -> None:
        def held(e: Experiment) -> float | None:
            return None if e.regularizer is None else peak(1e3)(e)

        assert self.TUNING.chosen(held) is None
        assert self.TUNING.chosen(lambda e: 0.0 if e.regularizer is None else peak(1e3)(e)) == 1e3

    def test_a_grid_that_begins_too_low_goes_up_first(self) -> None:
        best = 1e7

        def late(e: Experiment) -> float:
            if e.regularizer is None:
                return 0.5
            return (
                0.9 if e.regularizer.strength == best else 1e-3 * math.log(e.regularizer.strength)
            )

        assert self.TUNING.chosen(late) == best

    def test_chance_does_not_drive_it_to_nothing(self) -> None:
        def level(e: Experiment) -> float:
            return 0.5 if e.regularizer is None else 0.495 - 0.01 * (e.regularizer.strength != 1e3)

        assert self.TUNING.chosen(level) == 1e3
        tried = {e.regularizer.strength for e in self.TUNING.experiments(level) if e.regularizer}
        assert min(tried) == strength(GRID[0])

    def test_the_search_ends_where_nothing_helps(self) -> None:
        tuning = dataclasses.replace(self.TUNING, widest=(1, 9))
        useless = [e for e in tuning.experiments(lambda e: float(e.regularizer is None))]
        assert len(useless) == 3 + 3 * 9

    def test_it_is_wanted_whatever_else_is_left_out(self) -> None:
        request = Request(("fair",), only=("diagonal",))
        run = dataclasses.replace(self.BARE, role="tune")
        assert request.wants(RunExperiment(run))
        assert not request.wants(RunExperiment(self.BARE))


def test_fair_tunes_first_and_reports_with_other_seeds() -> None:
    request = Request(("fair",), seeds=20, extras=False)
    first = runs(request)
    assert {e.role for e in first} == {"tune"}
    assert len(first) == 12 * 7 * 3
    then = runs(request, peak(strength(5)))
    reported = [e for e in then if e.role == "report"]
    assert len(reported) == 12 * 20
    assert {e.regularizer.strength for e in reported if e.regularizer} == {strength(5)}
    assert not {e.seed for e in reported} & set(SEEDS)
    # a method that is tuned is reported while others are still being tuned
    done = method()

    def one(e: Experiment) -> float | None:
        assert e.regularizer is not None
        assert done.regularizer is not None
        same = (
            dataclasses.replace(e.regularizer, strength=done.regularizer.strength)
            == done.regularizer
        )
        return peak(strength(5))(e) if same else None

    assert len([e for e in runs(request, one) if e.role == "report"]) == 20


def test_smoke_is_small() -> None:
    request = Request(TOY.choose_presets("all"), seeds=1, smoke=True)
    found = runs(request, peak(1.0))
    assert len(found) < 120
    assert max(e.training.epochs for e in found) <= 2
    assert {e.preset for e in found} == {"paper", "original-code", "fair"}
