"""A stopped run goes on to the bit; the first task is learnt once for all methods."""

import dataclasses
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import holdfast as hf
from holdfast import execution
from holdfast.checkpoint import Checkpoints, first_task_id, remove_beginnings
from holdfast.execution import execute
from holdfast.experiment import Experiment
from holdfast.jobs import RunExperiment
from holdfast.models import MLP, WideResNet
from holdfast.results import Result
from holdfast.streams import CIFAR100Shift, PermutedMNIST
from holdfast.training import Training

SKETCH = hf.Regularizer(hf.EWC(), hf.CountSketch(5), 10.0)
IMAGES = Experiment(  # dropout, BatchNorm and augmentation: everything that has a state
    "test",
    "test",
    CIFAR100Shift(source="generated", validation=2, train_size=4, test_size=2),
    WideResNet(depth=10, width=1, classes=5),
    Training(epochs=2, batch_size=16, reset="never"),
    SKETCH,
)
DIGITS = Experiment(
    "test",
    "test",
    PermutedMNIST(source="generated", length=3, validation=100, train_size=200, test_size=50),
    MLP((784, 12, 10)),
    Training(epochs=2, batch_size=50, reset="epoch"),
    dataclasses.replace(SKETCH, approximation=hf.Diagonal(), anchor="each"),
)


class Stopped(Exception):
    """Stands for Ctrl-C, a kill, or the end of the time."""


def run(
    experiment: Experiment, folder: Path | None, stop_after: int | None = None, **options: Any
) -> tuple[Result, list[Tensor]]:
    """The result and the weights after every task; or stopped after so many epochs."""
    weights: list[Tensor] = []
    left = stop_after

    def progress(_: float) -> None:
        nonlocal left
        if left is not None:
            left -= 1
            if left == 0:
                raise Stopped

    def after_task(model: nn.Module) -> None:
        weights.append(torch.cat([t.flatten().float() for t in model.state_dict().values()]))

    options = {"patience": 0.0, **options}
    return execute(
        experiment, progress=progress, after_task=after_task, folder=folder, **options
    ), weights


def measured(result: Result) -> list[object]:
    return [result.accuracy, result.validation, result.test, result.initial, result.penalty_bytes]


@pytest.mark.parametrize(
    ("experiment", "epochs"),
    [(IMAGES, 4), (DIGITS, 6), (dataclasses.replace(DIGITS, regularizer=None, mode="joint"), 6)],
)
def test_stopped_anywhere_and_continued_gives_the_same(
    experiment: Experiment, epochs: int, tmp_path: Path
) -> None:
    whole, weights = run(experiment, None)
    for stop in range(1, epochs + 1, 2):
        folder = tmp_path / str(stop)
        with pytest.raises(Stopped):
            run(experiment, folder, stop)
        found, last = run(experiment, folder)
        assert measured(found) == measured(whole)
        assert torch.equal(last[-1], weights[-1])


def test_stopped_again_and_again(tmp_path: Path) -> None:
    whole, weights = run(DIGITS, None)
    for _ in range(5):
        with pytest.raises(Stopped):
            run(DIGITS, tmp_path, 1)
    found, last = run(DIGITS, tmp_path)
    assert measured(found) == measured(whole)
    assert torch.equal(last[-1], weights[-1])
    assert found.seconds["training"] > 0


def test_single_tasks_go_on_too(tmp_path: Path) -> None:
    alone = dataclasses.replace(DIGITS, regularizer=None, role="single")
    whole, _ = run(alone, None)
    with pytest.raises(Stopped):
        run(alone, tmp_path, 3)
    assert measured(run(alone, tmp_path)[0]) == measured(whole)


@pytest.mark.parametrize("experiment", [IMAGES, DIGITS])
def test_the_first_task_is_shared_and_nothing_changes(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert experiment.regularizer is not None
    stronger = dataclasses.replace(experiment.regularizer, strength=50.0)
    others = [
        dataclasses.replace(experiment, regularizer=stronger, preset="other"),
        dataclasses.replace(experiment, regularizer=None),
        dataclasses.replace(experiment, regularizer=None, mode="joint"),
    ]
    unshared = [run(other, None) for other in others]
    run(experiment, tmp_path)
    learnt: list[int] = []
    learn = execution.learn

    def counted(*arguments: Any, **options: Any) -> None:
        learnt.append(arguments[2].epochs - options["done"])
        learn(*arguments, **options)

    monkeypatch.setattr(execution, "learn", counted)
    for other, (whole, weights) in zip(others, unshared, strict=True):
        learnt.clear()
        found, last = run(other, tmp_path)
        assert learnt[0] == 0
        assert all(learnt[1:])
        assert measured(found) == measured(whole)
        assert torch.equal(last[-1], weights[-1])


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"training": dataclasses.replace(DIGITS.training, epochs=3)},
        {"model": MLP((784, 13, 10))},
        {"stream": dataclasses.replace(DIGITS.stream, train_size=150)},
    ],
)
def test_what_changes_the_first_task_is_not_shared(changes: dict[str, Any]) -> None:
    assert first_task_id(dataclasses.replace(DIGITS, **changes)) != first_task_id(DIGITS)


def test_the_seconds_before_a_checkpoint_count(tmp_path: Path) -> None:
    whole, _ = run(DIGITS, tmp_path)
    state = Checkpoints(tmp_path, dataclasses.replace(DIGITS, regularizer=None)).load()
    assert state is not None
    assert state.task == 0
    spent = state.record["seconds"]
    assert 0 < spent["training"] < whole.seconds["training"]
    assert spent["training"] + spent["evaluation"] <= spent["total"]
    again, _ = run(dataclasses.replace(DIGITS, regularizer=None), tmp_path)
    assert again.seconds["training"] > spent["training"]


def test_a_finished_first_task_is_kept_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.execution.SHARED", 0.0)
    run(DIGITS, tmp_path, patience=1e5)
    names = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert names == [f"{first_task_id(DIGITS)}.safetensors"]


def test_a_long_epoch_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.execution.LONG", 0.0)
    for more, reached in ((1, (0, 1)), (3, (1, 2))):
        with pytest.raises(Stopped):
            run(DIGITS, tmp_path, more, patience=1e5)
        state = Checkpoints(tmp_path, DIGITS).load()
        assert state is not None
        assert (state.task, state.epochs) == reached


def test_what_is_there_is_told_from_the_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Checkpoints(tmp_path, DIGITS)
    assert (kept.spent(), kept.first_task_learnt()) == (0.0, False)
    with pytest.raises(Stopped):
        run(DIGITS, tmp_path, 1)
    assert kept.spent() > 0
    assert not kept.first_task_learnt()
    with pytest.raises(Stopped):
        run(DIGITS, tmp_path, 2)
    first = kept.spent()
    assert kept.first_task_learnt()
    assert Checkpoints(tmp_path, dataclasses.replace(DIGITS, regularizer=None)).first_task_learnt()
    with pytest.raises(Stopped):
        run(DIGITS, tmp_path, 1)
    assert kept.spent() > first
    monkeypatch.setattr("holdfast.results.versions", lambda: {"holdfast": "9"})
    assert (kept.spent(), kept.first_task_learnt()) == (0.0, False)


def test_short_runs_leave_nothing(tmp_path: Path) -> None:
    run(DIGITS, tmp_path, patience=1e5)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_only_the_latest_penalty_is_kept(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        run(DIGITS, tmp_path, 6)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == sorted(
        [
            f"{DIGITS.id}-penalty-2.safetensors",
            f"{DIGITS.id}.safetensors",
            f"{first_task_id(DIGITS)}.safetensors",
        ]
    )


def test_a_finished_job_removes_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Stopped):
        run(DIGITS, tmp_path, 5)
    RunExperiment(DIGITS).run(tmp_path, lambda _: None)
    names = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert names == [f"{first_task_id(DIGITS)}.safetensors"]


@pytest.mark.parametrize("bad", ["own", "penalty", "versions", "a bit of own", "a bit of penalty"])
def test_a_damaged_checkpoint_is_said_and_not_used(
    bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = run(DIGITS, None)
    with pytest.raises(Stopped):
        run(DIGITS, tmp_path, 6)
    folder = tmp_path / "checkpoints"
    if bad == "versions":
        monkeypatch.setattr("holdfast.results.versions", lambda: {"holdfast": "9"})
    else:
        suffix = "-penalty-2" if "penalty" in bad else ""
        path = folder / f"{DIGITS.id}{suffix}.safetensors"
        content = bytearray(path.read_bytes())
        if "bit" in bad:
            content[-100] ^= 1
        path.write_bytes(content if "bit" in bad else content[:-100])
    with pytest.warns(UserWarning, match="is not used"), pytest.raises(Stopped):
        run(DIGITS, tmp_path, 4)
    with warnings.catch_warnings():  # what was computed again has replaced it
        warnings.simplefilter("error")
        found, _ = run(DIGITS, tmp_path)
    assert measured(found) == measured(whole)


def test_a_checkpoint_that_another_process_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = run(DIGITS, None)
    with pytest.raises(Stopped):
        run(DIGITS, tmp_path, 3)

    def gone(*_: object, **__: object) -> None:
        raise FileNotFoundError("gone")

    monkeypatch.setattr("holdfast.checkpoint.safe_open", gone)
    with pytest.warns(UserWarning, match="gone"):
        found, _ = run(DIGITS, tmp_path)
    assert measured(found) == measured(whole)


def test_beginnings_can_be_removed(tmp_path: Path) -> None:
    remove_beginnings(tmp_path, ["first-0"])
    run(DIGITS, tmp_path)
    folder = tmp_path / "checkpoints"
    names = [path.name for path in folder.iterdir() if path.name.startswith("first")]
    assert names == [f"{first_task_id(DIGITS)}.safetensors"]
    Checkpoints(tmp_path, DIGITS).remove()
    being_written, abandoned = folder / ".some.safetensors.x7", folder / ".some.safetensors.x8"
    for path in (being_written, abandoned):
        path.touch()
    os.utime(abandoned, (0, 0))  # of a process that was killed
    remove_beginnings(tmp_path, ["first-0"])
    assert sorted(p.name for p in folder.iterdir()) == sorted([being_written.name, *names])
    being_written.unlink()
    remove_beginnings(tmp_path, [first_task_id(DIGITS)])
    assert not folder.exists()


def test_nothing_there(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path, DIGITS).load() is None
    Checkpoints(tmp_path, DIGITS).remove()


class TestLaterFields:
    """Fields that came later: absent from the identity where they say nothing."""

    def test_ids_stay(self) -> None:
        assert "limit" not in DIGITS.to_json()
        assert "storage" not in DIGITS.to_json()
        limited = dataclasses.replace(DIGITS, limit=10, storage="bfloat16")
        assert limited.to_json()["limit"] == 10
        assert limited.id != DIGITS.id
        for experiment in (DIGITS, limited):
            assert Experiment.from_json(experiment.to_json()) == experiment
        assert "from 10 examples bfloat16" in limited.label

    @pytest.mark.parametrize(
        ("changes", "message"),
        [({"limit": 0}, "limit is 1 or larger"), ({"storage": "int4"}, "unknown storage")],
    )
    def test_refuses(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(DIGITS, **changes)

    def test_limit_and_storage_reach_the_penalty(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[hf.Penalty] = []
        consolidate = hf.Regularizer.consolidate

        def kept(*arguments: Any, **options: Any) -> hf.Penalty:
            made.append(consolidate(*arguments, **options))
            return made[-1]

        monkeypatch.setattr(hf.Regularizer, "consolidate", kept)
        sketched = dataclasses.replace(DIGITS, regularizer=SKETCH)
        full, _ = run(sketched, None)
        half, _ = run(dataclasses.replace(sketched, limit=10, storage="bfloat16"), None)
        assert [task.examples for task in made[1].tasks] == [200, 200]
        assert [task.examples for task in made[3].tasks] == [10, 10]
        assert half.penalty_bytes < 0.6 * full.penalty_bytes
