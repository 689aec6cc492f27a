"""Result files: whole or absent, checked when read."""

import dataclasses
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast import results
from holdfast.experiment import Experiment
from holdfast.models import MLP
from holdfast.results import BrokenResult, ForeignResult, Result
from holdfast.streams import Toy
from holdfast.training import Training


def result(seed: int = 0) -> Result:
    experiment = Experiment(
        "toy", "paper", Toy(length=2), MLP((2, 3, 2)), Training(epochs=2), seed=seed
    )
    return Result(
        experiment,
        accuracy=[[[0.5], [0.75]], [[0.5, 1.0], [0.25, 1.0]]],
        validation=[[0.75, 0.5], [0.25, 1.0]],
        test=[[0.75, 0.5], [0.25, 1.0]],
        initial=[0.5, 0.5],
        seconds={"training": 1.0, "consolidation": 0.0, "evaluation": 0.1, "total": 1.2},
        penalty_bytes=100,
        floats_per_parameter=1.5,
        versions=results.versions(),
        machine=results.machine(),
    )


def test_a_result_comes_back(tmp_path: Path) -> None:
    path = result().save(tmp_path)
    assert path == tmp_path / "runs" / f"{result().experiment.id}.json"
    assert results.load(path) == result()
    data = json.loads(path.read_text())
    assert data["format"] == 1
    assert data["id"] == path.stem
    assert set(data["versions"]) == {"holdfast", "torch", "python"}
    assert set(data["machine"]) == {"threads", "cores"}
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("lengths", [(4, 4, 4, 4), (2, 3, 4, 4), (4, 3, 4, 4)])
def test_tests_may_end_with_the_next_task(lengths: tuple[int, ...], tmp_path: Path) -> None:
    """In some rows or in all: a run may have been begun when all tasks were tested."""
    experiment = Experiment("toy", "paper", Toy(length=4), MLP((2, 3, 2)), Training(epochs=1))
    test = [[0.5] * n for n in lengths]
    made = dataclasses.replace(
        result(),
        experiment=experiment,
        accuracy=[[[0.5] * (task + 1)] for task in range(4)],
        validation=[[0.5] * 4],
        test=test,
        initial=[0.5] * 4,
    )
    assert results.load(made.save(tmp_path)).test == test


def test_all_results_of_a_folder(tmp_path: Path) -> None:
    assert results.load_all(tmp_path / "nowhere") == {}
    both = [result(0), result(1)]
    for one in both:
        one.save(tmp_path)
    assert results.load_all(tmp_path) == {one.experiment.id: one for one in both}


def edited(**changes: Any) -> Callable[[str], str]:
    return lambda text: json.dumps({**json.loads(text), **changes})


BROKEN: dict[str, tuple[Callable[[str], str], str]] = {
    "half written": (lambda text: text[: len(text) // 2], "not complete JSON"),
    "empty": (lambda text: "", "not complete JSON"),
    "not text": (lambda text: "\x00\xff", "not complete JSON"),
    "a list": (lambda text: "[1]", "no 'format'"),
    "no test": (
        lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "test"}),
        "lacks the field 'test'",
    ),
    "another id": (edited(id="0" * 16), "name, id and experiment must agree"),
    "an epoch too few": (
        edited(accuracy=[[[0.5]], [[0.5, 1.0], [0.25, 1.0]]]),
        "expected 2 tasks of 2 epochs",
    ),
    "a test too few": (edited(test=[[0.5], [0.5, 0.5]]), "test: expected 2 lists of 2"),
    "a task too few": (edited(test=[[0.5, 0.5]]), "test: expected 2 lists of 2"),
    "not tested": (edited(test=[], initial=[], accuracy=[]), "initial: expected 2 accuracies"),
    "no validation": (edited(validation=[]), "validation: expected one accuracy per task"),
    "validation of one task": (
        edited(validation=[[0.5, 0.5], [0.5]]),
        "validation: expected 1 accuracies",
    ),
    "no number": (edited(initial=[0.5, None]), "fraction from 0 to 1, got None"),
    "per cent": (edited(initial=[50, 50]), "fraction from 0 to 1, got 50"),
    "a wrong type": (edited(initial=3), "."),
    "an unknown experiment": (edited(experiment={"recipe": "toy"}), "missing preset"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_told_and_skipped(case: str, tmp_path: Path) -> None:
    damage, message = BROKEN[case]
    path = result().save(tmp_path)
    good = result(1)
    good.save(tmp_path)
    path.write_text(damage(path.read_text()), encoding="latin-1")
    with pytest.raises(BrokenResult, match=message) as caught:
        results.load(path)
    assert str(path) in str(caught.value)
    told: list[BrokenResult] = []
    assert results.load_all(tmp_path, told.append) == {good.experiment.id: good}
    assert len(told) == 1
    with pytest.raises(BrokenResult):
        results.load_all(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seconds", {}),
        ("seconds", None),
        ("seconds", {"training": 1.0, "consolidation": 0.0, "evaluation": 0.1, "total": "long"}),
        ("penalty_bytes", -1),
        ("floats_per_parameter", None),
        ("versions", None),
        ("machine", []),
    ],
)
def test_costs_that_no_report_could_show_are_broken(
    field: str, value: Any, tmp_path: Path
) -> None:
    path = result().save(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(BrokenResult, match=field):
        results.load(path)


def test_an_experiment_under_another_name_is_broken(tmp_path: Path) -> None:
    path = result().save(tmp_path)
    path.rename(path.with_stem("f" * 16))
    with pytest.raises(BrokenResult, match="must agree"):
        results.load(path.with_stem("f" * 16))


def test_another_format_is_not_mixed(tmp_path: Path) -> None:
    path = result().save(tmp_path)
    path.write_text(edited(format=2)(path.read_text()))
    with pytest.raises(ForeignResult, match=r"format 2, this version reads and writes 1.*--out"):
        results.load_all(tmp_path, lambda error: None)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = result().save(tmp_path)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        result().save(tmp_path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> None:
        with results.atomic(tmp_path / "file") as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert os.listdir(tmp_path) == []
