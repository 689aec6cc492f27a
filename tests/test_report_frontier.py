"""The report of the frontier: bytes, budgets, scales and searches."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import fake_results
from holdfast import report
from holdfast.experiment import Experiment
from holdfast.recipes import RECIPES
from holdfast.report.budgets import BUDGETS, within
from holdfast.report.frontier import times_plain
from holdfast.report.frontier_figure import spread
from holdfast.report.loading import read
from holdfast.report.measures import finals, summary
from holdfast.results import Result

FLOATS = {"diagonal": 1.0, "kronecker": 2.305, "kronecker_plus_low_rank": 4.3}
LEVEL = {"diagonal": 0.8, "kronecker": 0.95, "low_rank": 0.9, "count_sketch": 0.85}


@pytest.fixture(autouse=True)
def _no_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path / "none"))


def make(experiment: Experiment) -> Result:
    """Accuracy and memory by approximation; a longer run is a little better."""
    held = experiment.to_json()["regularizer"]
    if held is None:
        return fake_results.made_up(experiment, 0.9 if experiment.mode == "joint" else 0.5)
    part = held["approximation"]
    level = LEVEL.get(part["name"], 0.7) + 0.01 * (experiment.training.epochs > 1)
    floats = FLOATS.get(part["name"], float(part.get("size", part.get("rank", 1))))
    floats /= 2 if experiment.storage == "bfloat16" else 1
    made = fake_results.made_up(experiment, level)
    test = [[level] * len(row) for row in made.test]
    return dataclasses.replace(
        made, test=test, floats_per_parameter=floats + 1, penalty_bytes=int(4e6 * (floats + 1))
    )


def written(folder: Path, epochs: Sequence[int] = (1,)) -> str:
    for number in epochs:
        settings = [f"training.epochs={number}"]
        fake_results.reproduced(folder, "frontier", "twenty-tasks", 3, settings, make=make)
    report.write(folder)
    return (folder / "report.md").read_text()


def table(text: str, title: str) -> list[str]:
    start = text.index(f"**{title}**")
    return text[start : text.index("Made by", start)].splitlines()


def test_the_best_at_every_budget(tmp_path: Path) -> None:
    text = written(tmp_path)
    rows = [row for row in table(text, "The best at every budget: `twenty-tasks`") if "≤" in row]
    best = {row.split(" | ")[0]: row.split(" | ")[1] for row in rows}
    assert best["| ≤ 1"] == "Diagonal"
    assert best["| ≤ 2.3"].startswith("Kronecker")
    assert best["| ≤ 50"].startswith("Kronecker")
    assert "95.0 ± 0.0" in rows[-1]
    assert set(best) <= {f"| ≤ {budget:g}" for budget in BUDGETS}


def test_a_budget_counts_what_nothing_costs(tmp_path: Path) -> None:
    base = dataclasses.replace(RECIPES["frontier"].example("ten-tasks"), regularizer=None)
    for mode in ("sequential", "joint"):
        make(dataclasses.replace(base, mode=mode)).save(tmp_path)  # type: ignore[arg-type]
    study = read(tmp_path)
    (only,) = within(study.reported("ten-tasks"), 0)
    assert only.label == "No regularisation"


def test_half_the_bytes_are_half_the_floats(tmp_path: Path) -> None:
    found = RECIPES["frontier"].example("ten-tasks")
    for storage in ("float32", "bfloat16"):
        make(dataclasses.replace(found, storage=storage)).save(tmp_path)  # type: ignore[arg-type]
    report.write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    rows = table(text, "Average accuracy after the last task, per cent: `ten-tasks`")
    assert any(row.startswith("| EWC · Kronecker | 2.3 | 9.2 |") for row in rows)
    assert any(row.startswith("| EWC · Kronecker, bfloat16 | 1.2 | 4.6 |") for row in rows)


def test_scales_are_told_apart_in_tables_and_figures(tmp_path: Path) -> None:
    text = written(tmp_path, (1, 5))
    rows = table(text, "Average accuracy after the last task, per cent: `twenty-tasks`")
    for label in ("", ", 5 epochs"):
        assert sum(row.startswith(f"| EWC · Rank 50{label} |") for row in rows) == 1
    drawn = (tmp_path / "figures" / "frontier-twenty-tasks.svg").read_text()
    assert "Low rank<" in drawn
    assert "Low rank, 5 epochs<" in drawn
    best = table(text, "The best at every budget: `twenty-tasks`")
    assert sum(row.startswith("| ≤ 50 |") for row in best) == 2
    assert "The same stream, search and seeds for every method" in text
    assert "--epochs 5`" in text


def test_what_is_alike_is_looked_at(tmp_path: Path) -> None:
    assert "The same stream, epochs, search and seeds for every method" in written(tmp_path)
    study = read(tmp_path)
    run = study.sized("twenty-tasks")[0].runs[-1]
    (tmp_path / "runs" / f"{run.id}.json").unlink()
    report.write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "The same stream, epochs and search for every method" in text


def test_one_longer_run_has_nothing_to_be_compared_with(tmp_path: Path) -> None:
    written(tmp_path)
    alone = RECIPES["frontier"].example("twenty-tasks")
    training = dataclasses.replace(alone.training, epochs=5)
    make(dataclasses.replace(alone, training=training)).save(tmp_path)
    report.write(tmp_path)
    best = table((tmp_path / "report.md").read_text(), "The best at every budget: `twenty-tasks`")
    assert sum(row.startswith("| ≤ 50 |") for row in best) == 1
    assert not any("epochs" in row for row in best)


def test_every_search_is_shown(tmp_path: Path) -> None:
    fake_results.reproduced(tmp_path, "frontier", "ten-tasks", 1, make=make)
    report.write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    study = read(tmp_path)
    rows = table(text, "Strengths tried on validation data: `ten-tasks`")
    rows = [row for row in rows if row.startswith("| EWC")]
    assert len(rows) == len(study.selections)
    assert len({row.split(" | ")[0] for row in rows}) == len(rows)
    for label in ("Rank 5", "Rank 10", "Rank 25", "Rank 50", "Sketched (t = 5)"):
        assert any(row.startswith(f"| EWC · {label} |") for row in rows)
    drawn = "".join(
        path.read_text() for path in (tmp_path / "figures").glob("sensitivity-ten-tasks-ewc*.svg")
    )
    for label in ("Rank 5<", "Rank 25<", "Sketched (t = 10)<", "Diagonal + rank 9<"):
        assert label in drawn


def test_the_legend_begins_with_the_best(tmp_path: Path) -> None:
    written(tmp_path)
    drawn = (tmp_path / "figures" / "frontier-twenty-tasks.svg").read_text()
    names = [
        "Kronecker products<",
        "Low rank<",
        "Sketched<",
        "Diagonal<",
        "No regularisation ",
    ]
    places = [drawn.index(name) for name in names]
    assert places == sorted(places)
    assert "× a plain run" in drawn  # beside it: time


def test_what_was_chosen_later_replaces_what_was_reported_before(tmp_path: Path) -> None:
    fake_results.reproduced(tmp_path, "frontier", "twenty-tasks", 2, best=3.0, make=make)
    study = read(tmp_path)
    old = next(s for s in study.sized("twenty-tasks") if s.label == "Rank 50")
    experiment = old.runs[0].result.experiment
    assert experiment.regularizer is not None
    weaker = dataclasses.replace(experiment.regularizer, strength=1.0)
    make(dataclasses.replace(experiment, regularizer=weaker)).save(tmp_path)
    found = [s for s in read(tmp_path).sized("twenty-tasks") if s.label == "Rank 50"]
    assert [s.strength for s in found] == [1000.0]


def test_time_does_not_depend_on_the_machine(tmp_path: Path) -> None:
    """A run on a machine half as fast, and one from when every task was followed by validation."""
    base = RECIPES["frontier"].example("ten-tasks")
    plain = dataclasses.replace(base, regularizer=None)

    def timed(experiment: Experiment, work: float, pace: float = 1.0, rows: int = 1) -> Result:
        made = make(experiment)
        tests = 55 + 45 + 10 * rows * 5_000 / 10_000  # seen, ahead, held out
        seconds = {"training": work / 2, "consolidation": work / 2, "evaluation": tests / 10}
        seconds = {part: value * pace for part, value in seconds.items()}
        held_out = made.validation[:rows]
        return dataclasses.replace(made, validation=held_out, seconds={**seconds, "total": work})

    timed(plain, 20.0, rows=10).save(tmp_path)
    timed(base, 60.0, pace=2.0).save(tmp_path)
    study = read(tmp_path)
    (held,) = study.sized("ten-tasks")
    assert times_plain(study, "ten-tasks", [held]) == [pytest.approx(3.0)]


def two_streams(folder: Path) -> Experiment:
    """One method on twenty tasks of all images, and on three."""
    usual = RECIPES["frontier"].example("twenty-tasks")
    shorter = dataclasses.replace(usual.stream, length=3, train_size=2_000)
    small = dataclasses.replace(usual, stream=shorter)
    for seed in range(2):
        for found in (usual, small):
            make(dataclasses.replace(found, seed=seed)).save(folder)
            plain = dataclasses.replace(found, regularizer=None, seed=seed)
            made = make(plain)
            pace = 2.0 if found is usual else 20.0
            seconds = {name: value * pace for name, value in made.seconds.items()}
            tested = {"evaluation": made.seconds["evaluation"]}
            dataclasses.replace(made, seconds=seconds | tested).save(folder)
    return small


def test_two_streams_are_not_one_curve(tmp_path: Path) -> None:
    two_streams(tmp_path)
    report.write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "The same stream" not in text
    drawn = (tmp_path / "figures" / "frontier-twenty-tasks.svg").read_text()
    assert "Kronecker products<" in drawn
    legend = re.findall(r">([^<>]+)</text>", drawn)
    assert "Kronecker products, 3 tasks," in legend  # a long name takes two lines
    assert "No regularisation, 3 tasks," in legend


def test_time_is_beside_that_of_the_same_stream(tmp_path: Path) -> None:
    small = two_streams(tmp_path)
    study = read(tmp_path)
    usual, other = sorted(study.sized("twenty-tasks"), key=lambda s: -s.runs[0].result.tasks)
    at_usual, at_other = times_plain(study, "twenty-tasks", [usual, other])
    assert at_usual is not None
    assert at_other is not None
    assert at_usual == pytest.approx(10 * at_other)
    longer = dataclasses.replace(small, training=dataclasses.replace(small.training, epochs=3))
    make(longer).save(tmp_path)
    study = read(tmp_path)
    (alone,) = (s for s in study.sized("twenty-tasks") if s.experiment["training"]["epochs"] == 3)
    assert times_plain(study, "twenty-tasks", [alone]) == [None]


def test_where_the_strengths_come_from_is_said(tmp_path: Path) -> None:
    searched = RECIPES["frontier"].example("ten-tasks")
    found = RECIPES["frontier"].example("twenty-tasks")
    assert searched.regularizer is not None
    assert found.regularizer is not None

    def strong(experiment: Experiment, strength: float, **changes: Any) -> Experiment:
        regularizer = experiment.regularizer
        assert regularizer is not None
        regularizer = dataclasses.replace(regularizer, strength=strength)
        return dataclasses.replace(experiment, regularizer=regularizer, **changes)

    for strength, level in ((1.0, 0.8), (10.0, 0.9), (100.0, 0.8)):
        tuned = strong(searched, strength, role="tune", seed=100)
        fake_results.made_up(tuned, level).save(tmp_path)
    make(strong(found, 10.0)).save(tmp_path)
    report.write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "λ is the one that is best on `ten-tasks`." in text
    assert "not searched" not in text
    # tried by hand: not what the table shows, and not what the recipe makes
    make(strong(found, 3.0, role="tune", seed=100)).save(tmp_path)
    report.write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    tried = text[text.index("Strengths tried on validation data: `twenty-tasks`") :]
    assert "one strength so far" in tried
    assert "Made by `holdfast run frontier --preset twenty-tasks" in tried
    assert "1 run of them one by one: holdfast run frontier" in text
    assert "λ is the one that is best on `ten-tasks`." in text
    # and a strength that no search found is marked
    (tmp_path / "runs" / f"{strong(found, 10.0).id}.json").unlink()
    make(strong(found, 31.0)).save(tmp_path)
    report.write(tmp_path)
    assert "| 31 (not searched) |" in (tmp_path / "report.md").read_text()


def test_nothing_reported_is_said(tmp_path: Path) -> None:
    tuned = dataclasses.replace(RECIPES["frontier"].example("ten-tasks"), role="tune")
    make(tuned).save(tmp_path)
    report.write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "*Nothing was reported yet.*" in text
    assert "The scale of every number below" not in text
    assert "is best at 1 so far" in text or "so far](figures" in text


def test_rows_of_plain_values_are_told_apart(tmp_path: Path) -> None:
    found = RECIPES["frontier"].example("ten-tasks")
    longer = dataclasses.replace(found, training=dataclasses.replace(found.training, epochs=3))
    for experiment in (found, longer, dataclasses.replace(found, storage="bfloat16", limit=100)):
        make(experiment).save(tmp_path)
    rows = report.rows(tmp_path)
    told = ("tasks", "epochs", "images", "storage", "limit", "floats_per_parameter")
    assert len({tuple(row[name] for name in told) for row in rows}) == 3
    assert sorted(row["floats_per_parameter"] for row in rows) == pytest.approx(
        [1.1525, 2.305, 2.305]
    )


def test_nothing_is_above_all(tmp_path: Path) -> None:
    found = RECIPES["frontier"].example("toy")
    for seed, level in enumerate((0.7, 1.0, 1.0)):
        fake_results.made_up(dataclasses.replace(found, seed=seed), level).save(tmp_path)
    (setting,) = read(tmp_path).settings
    values = summary(list(finals(setting).values()))
    assert values is not None
    assert values.mean + values.std > 100
    assert values.mean + spread(values)[1] == pytest.approx(100)
