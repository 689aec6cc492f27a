"""Reports of the studies on images, from made-up results of the real recipes."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import fake_results
from fake_results import made_up
from holdfast.approximation import CountSketch
from holdfast.augmentation import Augmentation
from holdfast.experiment import Experiment
from holdfast.recipes import RECIPES, Request
from holdfast.report import rows as table
from holdfast.report import write
from holdfast.report.paper import paper_seeds
from holdfast.report.sketch_size import FIXED
from holdfast.results import Result
from holdfast.streams import CIFAR100Shift


@pytest.fixture(autouse=True)
def _no_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path / "none"))


def fill(folder: Path, recipe: str, preset: str, best: float = 3.0, seeds: int = 2) -> None:
    """A preset at one epoch a task."""
    fake_results.reproduced(folder, recipe, preset, seeds, ["training.epochs=1"], best)


@pytest.mark.parametrize("damage", ["nothing", "no npz", "a class is lacking"])
def test_a_report_does_without_pictures(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fetches nothing, and tells nothing wrong about data that it does not need."""
    monkeypatch.setattr("holdfast.data.cifar100._fetch", lambda *_: pytest.fail("fetched"))
    fill(tmp_path, "cifar100", "paper")
    place = tmp_path / "none" / "cifar100"
    place.mkdir(parents=True)
    if damage == "no npz":
        (place / "cifar100_10cls.npz").write_bytes(b"damaged")
    elif damage == "a class is lacking":
        x, y = np.zeros((9, 32, 32, 3), np.uint8), np.zeros(9, np.int64)
        parts = {f"{k}_{p}": v for p in ("train", "test") for k, v in (("x", x), ("y", y))}
        parts |= {f"fine_{p}": np.full(9, 30) for p in ("train", "test")}
        np.savez(place / "cifar100_10cls.npz", class_names=np.array(["dolphin"]), **parts)
    assert "Augmentation" not in write(tmp_path).read_text()


def test_permuted_mnist(tmp_path: Path) -> None:
    for preset in ("original-code", "sketch-size"):
        fill(tmp_path, "permuted-mnist", preset)
    page = write(tmp_path).read_text()
    text = (tmp_path / "report.md").read_text()
    assert "| `original-code` | 10 | 1 | all | 100 | 0.0001 | 2 |" in text
    assert "| `sketch-size` | 10 | 1 | all but 5,000 | 100 | 0.0001 | 2 |" in text
    assert "the weight of the OLD tasks" in text
    figures = {path.name for path in (tmp_path / "figures").glob("*.svg")}
    for name in ("tasks-original-code-ewc", "sketch-size-mas", "sketch-size-tasks-ewc-fixed"):
        assert f"{name}.svg" in figures
        assert f"{name}-" in page  # the ids inside the picture
    alt = next(line for line in text.splitlines() if "by the size of the sketch: fixed" in line)
    assert all(f"t = {size} " in alt for size in (10, 20, 30, 40, 50))
    assert "re-tuned λ" in alt


def test_a_study_without_sizes_says_how_to_run_it(tmp_path: Path) -> None:
    fill(tmp_path, "permuted-mnist", "original-code")
    write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "`holdfast reproduce permuted-mnist --preset sketch-size`" in text


def test_cifar100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, "cifar100", "paper")
    write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    figures = {path.name for path in (tmp_path / "figures").glob("*.svg")}
    assert {"task-1-paper-ewc.svg", "task-2-paper-mas.svg"} <= figures
    assert "## Images" not in text  # no data set here, and a report fetches none
    # A stand-in has images without a data set.
    example = RECIPES["cifar100"].example("paper", smoke=True)
    made_up(example).save(tmp_path / "smoke")
    write(tmp_path / "smoke")
    text = (tmp_path / "smoke" / "report.md").read_text()
    assert "One image of dolphin, apple, lamp, maple_tree, bicycle" in text
    assert (tmp_path / "smoke" / "figures" / "augmentation-task-2.png").exists()


def test_the_seeds_of_the_paper_are_those_of_its_files(tmp_path: Path) -> None:
    assert paper_seeds("permuted-mnist", "original-code") == range(40, 45)
    assert paper_seeds("toy", "original-code") == range(5)
    assert paper_seeds("permuted-mnist", "fair") is None
    assert paper_seeds("cifar100", "paper") is None  # ten runs, seeds unknown
    fill(tmp_path, "cifar100", "paper")
    write(tmp_path)
    assert "Seeds 0–4" not in (tmp_path / "report.md").read_text()


def test_the_fixed_strength_is_the_recipes_and_not_the_chosen_one(tmp_path: Path) -> None:
    fill(tmp_path, "permuted-mnist", "sketch-size", best=4.5)
    write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    alt = next(line for line in text.splitlines() if "by the size of the sketch: fixed" in line)
    assert "fixed λ = 10,000: t = 10" in alt
    assert "re-tuned λ: t = 10" in alt
    searched = {
        job.experiment.regularizer.strength
        for job in RECIPES["permuted-mnist"].jobs(Request(("sketch-size",), 1), lambda _: None)
        if job.experiment.role == "report"
    }
    assert searched == {FIXED}


def test_both_diagonals_and_both_ends_are_in_every_figure_of_cifar100(tmp_path: Path) -> None:
    fill(tmp_path, "cifar100", "paper")
    fill(tmp_path, "cifar100", "fair")
    write(tmp_path)
    kinds = ("Diagonal", "Diagonal, flattened", "Sketched (t = 50)")
    ends = ("Joint training", "No regularisation")
    for figure in ("curves-paper-ewc", "task-1-paper-ewc", "task-2-paper-mas"):
        drawn = (tmp_path / "figures" / f"{figure}.svg").read_text()
        for name in (*kinds, *ends):
            assert f">{name} " in drawn, (figure, name)
    for figure in ("curves-fair-ewc", "task-1-fair-ewc", "task-2-fair-ewc"):
        drawn = (tmp_path / "figures" / f"{figure}.svg").read_text()
        for name in ("Diagonal", "Sketched (t = 50)", "Rank 50", *ends):
            assert f">{name} " in drawn, (figure, name)
    text = (tmp_path / "report.md").read_text()
    assert "| EWC · Diagonal | 90.8 ± 1.5 |" in text
    assert "| EWC · Diagonal, flattened | 90.8 ± 1.5 |" in text
    assert "EWC · Sketched (t = 50) − Diagonal, flattened | +2.8 |" in text


def test_a_trial_of_fewer_tasks_has_no_curve_of_the_last(tmp_path: Path) -> None:
    example = RECIPES["cifar100"].example("paper")
    made_up(example).save(tmp_path)
    stream = example.stream
    assert isinstance(stream, CIFAR100Shift)
    short = dataclasses.replace(stream, classes=stream.classes[:1])
    plain = dataclasses.replace(example, regularizer=None, stream=short)
    made_up(plain).save(tmp_path)
    write(tmp_path)
    assert "No regularisation, 1 task " in (tmp_path / "figures/task-1-paper-ewc.svg").read_text()
    assert "No regularisation" not in (tmp_path / "figures/task-2-paper-ewc.svg").read_text()


def test_the_caption_says_what_the_augmentation_does(tmp_path: Path) -> None:
    example = RECIPES["cifar100"].example("paper", smoke=True)
    stream = example.stream
    assert isinstance(stream, CIFAR100Shift)
    stream = dataclasses.replace(stream, augmentation=Augmentation(translate=2, cutout=0))
    made_up(dataclasses.replace(example, stream=stream)).save(tmp_path)
    write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "mirrored, moved by up to 2 pixels. Importance" in text


def test_only_presets_of_the_recipe_are_recommended(tmp_path: Path) -> None:
    fill(tmp_path, "cifar100", "paper")
    write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "--preset fair" in text
    assert "original-code" not in text


def test_three_seeds_decide_where_runs_take_hours(tmp_path: Path) -> None:
    def make(experiment: Experiment) -> Result:
        held = experiment.regularizer
        sketched = held is not None and isinstance(held.approximation, CountSketch)
        return made_up(experiment, 0.9 if sketched else 0.7)

    for seeds in (2, 3):
        out = tmp_path / str(seeds)
        fake_results.reproduced(out, "permuted-mnist", "fair", seeds, make=make)
        write(out)
        text = (out / "report.md").read_text()
        assert ("Sketched better" in text) == (seeds == 3)
        assert "fewer than 3 seeds" in text
        assert "20 seeds" not in text


def test_a_search_stands_with_its_preset_and_its_grid(tmp_path: Path) -> None:
    fill(tmp_path, "permuted-mnist", "fair")
    fill(tmp_path, "permuted-mnist", "paper")
    write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    fair, paper = (_part(text, f"Strengths tried on validation data: `{p}`") for p in PRESETS)
    assert "factors of √10" in fair
    assert "factors of 10)" in paper
    assert "√10" not in paper
    for history in ("sum, labels true", "sum, labels sampled", "mean", "sum, anchor each"):
        assert f"| EWC · Rank 50, {history} |" in fair
    assert "| EWC · Block-diagonal (50 × 50), from 10,000 examples, sum |" in fair
    assert "| MAS · Sketched (t = 50) |" in paper
    figures = {path.stem for path in (tmp_path / "figures").glob("sensitivity*.svg")}
    assert {
        "sensitivity-fair-ewc-1",
        "sensitivity-fair-ewc-2",
    } <= figures  # too many curves for one
    assert figures >= {f"sensitivity-{end}" for end in ("fair-mas", "paper-ewc", "paper-mas")}


PRESETS = ("fair", "paper")


def _part(text: str, title: str) -> str:
    start = text.index(f"**{title}**")
    return text[start : text.index("Made by", start)]


def test_at_equal_memory_and_on_a_longer_stream(tmp_path: Path) -> None:
    levels = {"diagonal": 0.8, "count_sketch": 0.85, "low_rank": 0.9, "block_diagonal": 0.87}
    levels["kronecker"] = 0.79
    bytes_of = {"diagonal": 1000, "count_sketch": 9000, "low_rank": 9000, "block_diagonal": 9000}
    bytes_of["kronecker"] = 200

    def make(experiment: Experiment) -> Result:
        data = experiment.to_json()["regularizer"]
        name = data["approximation"]["name"] if data else ""
        each = data is not None and data["anchor"] == "each"
        level = levels.get(name, 0.5)
        if experiment.preset == "twenty-tasks" and name == "count_sketch":
            level = 0.6 if each else 0.65  # the order does not hold
        made = made_up(experiment, level)
        test = [[level - 0.01 * each] * len(row) for row in made.test]
        return dataclasses.replace(made, test=test, penalty_bytes=bytes_of.get(name, 0))

    for preset in ("fair", "twenty-tasks"):
        fake_results.reproduced(tmp_path, "permuted-mnist", preset, 2, make=make)
    write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    rows = _part(text, "At equal memory: `fair`").splitlines()[4:]
    rows = [row.split(" | ") for row in rows if row.startswith("| EWC")]
    assert [row[0].split(", ")[0] for row in rows] == [
        "| EWC · Kronecker",
        "| EWC · Diagonal",
        "| EWC · Block-diagonal (50 × 50)",
        "| EWC · Sketched (t = 50)",
        "| EWC · Rank 50",
    ]
    best = [row[-1].removesuffix(" |") for row in rows]
    assert best == ["this one", "this one", "Rank 50", "Rank 50", "this one"]
    order = _part(text, "The order after 10 and after 20 tasks")
    assert "| EWC · Sketched (t = 50) | 85.0 ± 0.0 | 3 | 65.0 ± 0.0 | 6 | −3 | 2 | 2 |" in order
    assert "| EWC · Diagonal | 80.0 ± 0.0 | 5 | 80.0 ± 0.0 | 3 | +2 | 2 | 2 |" in order
    assert "5 of 7 methods change their place" in text
    pairs = _part(text, "Paired differences of the average accuracy, points: `fair`")
    for pair in ("Rank 50 − Sketched", "Rank 50 − Diagonal", "Sketched (t = 50) − Block-diagonal"):
        assert f"EWC · {pair}" in pairs


def test_true_labels_stand_for_ewc_where_others_were_run_too(tmp_path: Path) -> None:
    def make(experiment: Experiment) -> Result:
        data = experiment.to_json()["regularizer"]
        sampled = data is not None and data["importance"].get("labels") == "sampled"
        return made_up(experiment, 0.6 if sampled else 0.9)

    fake_results.reproduced(tmp_path, "permuted-mnist", "fair", 2, make=make)
    shown = [row for row in table(tmp_path) if row["headline"] and row["importance"] == "ewc"]
    assert len(shown) == 5
    assert all(row["mean"] > 85 for row in shown), shown


def test_a_search_that_is_worse_than_nothing_is_not_called_finished(tmp_path: Path) -> None:
    fill(tmp_path, "permuted-mnist", "fair")
    write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "worse than holding nothing" not in text
    for path in (tmp_path / "runs").glob("*.json"):
        data = json.loads(path.read_text())
        if data["experiment"]["role"] == "tune" and data["experiment"]["regularizer"] is None:
            data["validation"] = [[0.97] * 10]
            path.write_text(json.dumps(data))
    write(tmp_path)
    table = _part(
        (tmp_path / "report.md").read_text(), "Strengths tried on validation data: `fair`"
    )
    assert table.count("| worse than holding nothing |") == table.count("| EWC") + table.count(
        "| MAS"
    )
    svg = (tmp_path / "figures" / "sensitivity-fair-mas.svg").read_text()
    assert "Nothing held 97.0" in svg
