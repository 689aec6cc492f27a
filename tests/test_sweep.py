"""Sweeps: resumed, estimated, within a budget, and robust to what fails."""

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import holdfast as hf
from holdfast import boundaries, results
from holdfast.approximation import LowRank, Nystrom
from holdfast.display import Lines, Live, duration, for_console
from holdfast.execution import execute
from holdfast.experiment import Experiment
from holdfast.importance import EWC
from holdfast.jobs import Job, RunExperiment, kind_of
from holdfast.models import MLP
from holdfast.recipes import RECIPES, Request
from holdfast.regularizer import Regularizer
from holdfast.reproduction import check_writable, explain, reproduce
from holdfast.streams import Toy
from holdfast.sweep import Estimator, Summary, _Sweep, sweep
from holdfast.training import Training

TINY = Experiment(
    "toy",
    "paper",
    Toy(length=2, train=20, validation=10, test=10),
    MLP((2, 4, 2)),
    Training(epochs=1, batch_size=10),
)


def tiny(seed: int, **changes: object) -> RunExperiment:
    return RunExperiment(dataclasses.replace(TINY, seed=seed, **changes))  # type: ignore[arg-type]


def lines() -> tuple[Lines, io.StringIO]:
    out = io.StringIO()
    return Lines(Console(file=out, width=200)), out


def run(wanted: Sequence[Job], folder: Path, **options: object) -> tuple[Summary, str]:
    display, out = lines()
    return sweep(lambda: wanted, folder, display, **options), out.getvalue()  # type: ignore[arg-type]


def test_a_sweep_runs_resumes_and_survives_bad_jobs(tmp_path: Path) -> None:
    diverging = tiny(0, training=Training(epochs=1, batch_size=10, lr=1e38))
    jobs = [diverging, dataclasses.replace(tiny(0), boundaries=True), tiny(1), tiny(2)]
    summary, text = run(jobs, tmp_path, jobs=2)
    assert (summary.ran, summary.kept, summary.left) == (3, 0, [])
    assert [label for label, _ in summary.failed] == [diverging.label]
    assert "diverged" in summary.failed[0][1]
    found = results.load_all(tmp_path)
    assert sorted(found) == sorted(job.id for job in jobs[1:])
    assert {result.machine["threads"] for result in found.values()} == {1}
    maps = boundaries.path_of(tmp_path, jobs[1].id)
    assert maps.exists()
    assert "[4/4]" in text  # also when the bad job is the last to end

    # what is there is kept; what is broken or lacks its picture is run again, to the same numbers
    broken = results.path_of(tmp_path, TINY_SEED_1)
    before = broken.read_text()
    broken.write_text(before[:100])
    maps.unlink()
    summary, _ = run(jobs[1:], tmp_path)
    assert (summary.ran, summary.kept, summary.failed) == (2, 1, [])
    again, first = json.loads(broken.read_text()), json.loads(before)
    assert all(again[k] == first[k] for k in ("accuracy", "test", "validation", "initial"))
    assert maps.exists()


def test_what_a_run_decides_comes_before_what_waits(tmp_path: Path) -> None:
    """The recipe is asked again as soon as a search has got on, not when nothing else is left."""
    held = hf.Regularizer(hf.EWC(), hf.Diagonal())
    search, decided, waits = tiny(7, role="tune", regularizer=held), tiny(1), [tiny(2), tiny(3)]

    def source() -> list[Job]:
        return [search, *([decided] if search.done(tmp_path) else []), *waits]

    display, out = lines()
    assert sweep(source, tmp_path, display).ran == 4
    ended = [line.split("seed ")[1][0] for line in out.getvalue().splitlines() if "seed " in line]
    assert ended == ["7", "1", "2", "3"]


TINY_SEED_1 = dataclasses.replace(TINY, seed=1)


SLOW = tiny(0, training=Training(epochs=50, batch_size=10))


def test_what_ends_in_time_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.sweep.WORTH_STARTING", 1000.0)  # too late for anything else
    quick = tiny(1)
    estimator = Estimator({SLOW.kind: [1000.0], quick.kind: [0.5]})
    summary, _ = run([SLOW, quick], tmp_path, budget=100.0, estimator=estimator)
    assert summary.ran == 1
    assert summary.left == [SLOW.label]
    assert list(results.load_all(tmp_path)) == [quick.id]


def waiting(folder: Path, jobs: list[RunExperiment], *running: RunExperiment) -> _Sweep:
    """A sweep of two processes in the middle of its work, an hour before the end of its budget."""
    display, _ = lines()
    estimator = Estimator({job.kind: [10_000.0] for job in (*jobs, *running)})
    state = _Sweep(lambda: jobs, folder, display, estimator, time.monotonic() + 3600, 2)
    state.pending = list(jobs)
    for slot, job in enumerate(running):
        process = types.SimpleNamespace(slot=slot, job=job, fraction=0.0)
        state.processes.append(process)  # type: ignore[arg-type]
    return state


def leave_checkpoint(job: RunExperiment, folder: Path, epochs: int) -> None:
    """Stop a run after so many epochs."""
    left = epochs

    def stop(_: float) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        execute(job.experiment, progress=stop, folder=folder, patience=0.0)


def test_where_nothing_ends_in_time_the_run_that_is_furthest_goes_on(tmp_path: Path) -> None:
    other = tiny(1, training=SLOW.experiment.training)
    pictures = dataclasses.replace(tiny(2, training=SLOW.experiment.training), boundaries=True)
    state = waiting(tmp_path, [pictures, SLOW, other])
    assert state.choose() is SLOW  # a run with pictures leaves no checkpoint
    leave_checkpoint(other, tmp_path, 60)
    assert other.spent(tmp_path) > 0
    assert state.choose() is other
    assert waiting(tmp_path, [pictures]).choose() is None
    state.deadline = time.monotonic() + 1.0
    assert state.choose() is None  # too late to get anywhere


def test_what_a_checkpoint_holds_need_not_fit(tmp_path: Path) -> None:
    leave_checkpoint(SLOW, tmp_path, 60)
    expected = 3600 + SLOW.spent(tmp_path) / 2
    state = waiting(tmp_path, [SLOW])
    state.estimator = Estimator({SLOW.kind: [expected / 1.1]})
    assert state.fits(SLOW)
    assert not state.fits(tiny(1, training=SLOW.experiment.training))


def test_a_budget_shorter_than_a_run_gets_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped at the end of the budget; its checkpoint stays, and is said to."""
    monkeypatch.setattr("holdfast.sweep.WORTH_STARTING", 1.0)
    long = tiny(0, training=Training(epochs=10**5, batch_size=1))
    leave_checkpoint(long, tmp_path, 1)
    estimator = Estimator({long.kind: [1e6]})
    begun = time.monotonic()
    summary, text = run([long], tmp_path, budget=4.0, estimator=estimator)
    assert 3 < time.monotonic() - begun < 60
    assert summary.left == [long.label]
    assert f"stopped {long.label} (its checkpoint is kept): the same command goes on" in text
    assert long.spent(tmp_path) > 0


class TestSharedBeginning:
    """A first task is not learnt by two processes at a time."""

    FIRST = tiny(0, training=Training(epochs=4, batch_size=10))
    SAME = tiny(0, training=FIRST.experiment.training, mode="joint")
    OTHER = tiny(1, training=FIRST.experiment.training)

    def test_waits_or_does_something_else(self, tmp_path: Path) -> None:
        state = waiting(tmp_path, [self.SAME, self.OTHER], self.FIRST)
        assert state.choose() is self.OTHER
        state.pending.remove(self.OTHER)
        assert state.choose() is None
        leave_checkpoint(self.FIRST, tmp_path, 2)  # not all of the first task
        assert state.choose() is None
        leave_checkpoint(self.FIRST, tmp_path, 3)
        assert self.FIRST.begun(tmp_path)
        assert state.choose() is self.SAME

    def test_waits_for_nothing_that_will_not_come(self, tmp_path: Path) -> None:
        state = waiting(tmp_path, [self.SAME], self.FIRST)
        state.processes[0].fraction = 0.5  # beyond its first task, which it has not kept
        assert state.choose() is self.SAME
        state.processes[0].fraction = 0.0
        state.estimator = Estimator({self.FIRST.kind: [5.0]})  # not worth to wait for
        assert state.choose() is self.SAME
        state = waiting(tmp_path, [self.SAME], dataclasses.replace(self.FIRST, boundaries=True))
        assert state.choose() is self.SAME  # pictures: what is not kept
        state = waiting(tmp_path, [self.SAME], self.FIRST)
        state.processes.clear()  # it failed
        assert state.choose() is self.SAME

    def test_gives_the_same_results(self, tmp_path: Path) -> None:
        jobs = [
            RunExperiment(
                dataclasses.replace(
                    job.experiment,
                    stream=Toy(length=2, train=400, validation=10, test=10),
                    training=Training(epochs=300, batch_size=1),  # seconds on any machine
                )
            )
            for job in (self.FIRST, self.SAME)
        ]
        there: list[bool] = []

        class Seen(Lines):
            def started(self, slot: int, label: str) -> None:
                there.append(jobs[0].begun(tmp_path))

        summary = sweep(lambda: jobs, tmp_path, Seen(Console(file=io.StringIO())), jobs=2)
        assert summary.ran == 2
        assert there == [False, True]
        found, alone = results.load_all(tmp_path)[jobs[1].id], execute(jobs[1].experiment)
        assert (found.accuracy, found.test) == (alone.accuracy, alone.test)


def test_a_misjudged_run_is_stopped_at_the_end_of_the_budget(tmp_path: Path) -> None:
    endless = tiny(0, training=Training(epochs=10**6, batch_size=1))
    begun = time.monotonic()
    summary, text = run([endless], tmp_path, budget=6.0)
    assert time.monotonic() - begun < 60
    assert summary.left == [endless.label]
    assert f"stopped {endless.label} (begins again): the same command goes on" in text
    assert not list(tmp_path.rglob("*.json"))
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_killed_worker_costs_one_job(tmp_path: Path) -> None:
    endless = tiny(0, training=Training(epochs=10**6, batch_size=1))

    def kill_when_running() -> None:
        for _ in range(600):
            time.sleep(0.1)
            for entry in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    words = entry.read_bytes().split(b"\0")
                except OSError:  # it has ended
                    continue
                if b"holdfast.worker" in words and str(tmp_path).encode() in words:
                    os.kill(int(entry.parent.name), signal.SIGKILL)
                    return

    killer = threading.Thread(target=kill_when_running)
    killer.start()
    summary, _ = run([endless, tiny(1)], tmp_path)
    killer.join()
    assert summary.ran == 1
    assert [label for label, _ in summary.failed] == [endless.label]
    assert "its process was killed" in summary.failed[0][1]


def test_a_folder_that_cannot_be_written_stops_the_sweep(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file stands in the way")
    with pytest.raises(OSError, match="paper no regularizer seed 0"):
        run([tiny(0), tiny(1)], tmp_path)


def test_deciding_jobs_bring_new_ones(tmp_path: Path) -> None:
    asked = []

    def source() -> list[Job]:
        first = tiny(0, role="tune")
        asked.append(first.done(tmp_path))
        return [first, tiny(1)] if first.done(tmp_path) else [first]

    display, _ = lines()
    summary = sweep(source, tmp_path, display)
    assert summary.ran == 2
    assert asked[0] is False
    assert asked[-1] is True


def test_wrong_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="number of processes is 1 or larger, got 0"):
        run([], tmp_path, jobs=0)
    with pytest.raises(ValueError, match="time budget is larger than 0"):
        run([], tmp_path, budget=0.0)


def test_estimates() -> None:
    def job(epochs: int, **options: Any) -> RunExperiment:
        training = dataclasses.replace(TINY.training, epochs=epochs)
        return RunExperiment(dataclasses.replace(TINY, training=training, **options))

    estimator = Estimator()
    assert estimator.expect(job(1)) is None
    for seconds in (2.0, 4.0, 90.0):
        estimator.record(job(1), seconds)
    assert estimator.expect(job(1)) == 4.0
    estimator.record(job(1, mode="joint", regularizer=None), 8.0)
    assert estimator.expect(job(10)) == 40.0  # of its own family, scaled
    for rank, seconds in ((1, 60.0), (2, 70.0)):
        estimator.record(job(10, regularizer=Regularizer(EWC(), LowRank(rank))), seconds)
    other = job(10, regularizer=Regularizer(EWC(), LowRank(3)))
    assert estimator.expect(other) == 65.0  # of the same kind at other sizes
    another_kind = job(1, regularizer=Regularizer(EWC(), Nystrom(3)))
    assert estimator.expect(another_kind) == 6.0  # of the same network
    slowest = job(10, model=MLP((2, 5, 2)))  # an unknown family
    assert estimator.expect(slowest) == 80.0
    assert kind_of(TINY) == kind_of(TINY_SEED_1)
    assert kind_of(TINY) == kind_of(dataclasses.replace(TINY, preset="another"))
    assert kind_of(TINY) != kind_of(dataclasses.replace(TINY, training=Training(epochs=2)))
    another = dataclasses.replace(TINY, stream=Toy(length=4))
    assert RunExperiment(another).extent / RunExperiment(TINY).extent == 4 / TINY.stream.length


def test_ctrl_c_leaves_everything_resumable(tmp_path: Path) -> None:
    """The whole command, interrupted as a terminal would."""
    command = [sys.executable, "-m", "holdfast.cli", "reproduce", "toy", "--smoke", "--no-extras"]
    command += ["--preset", "paper", "--out", str(tmp_path), "--jobs", "1"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell that runs the tests in the background makes them, and this, deaf to it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    assert first.startswith("[1/")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command goes on" in errors
    assert "Traceback" not in errors
    assert 1 <= len(results.load_all(tmp_path)) < 12  # whole, and not all
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_folder_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "0123456789abcdef.json").write_text('{"format": 99}')
    display, _ = lines()
    with pytest.raises(results.ForeignResult, match="not mixed: choose another --out"):
        reproduce(RECIPES["toy"], Request(("paper",)), tmp_path, display)


def test_unwritable_folders_are_noticed_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        check_writable(tmp_path / "file" / "below")
    check_writable(tmp_path / "new" / "folder")
    assert not list((tmp_path / "new" / "folder").iterdir())


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (28, "the disk is full"),
        (13, "no permission"),
        (20, "a file stands where"),
        (5, "are kept"),
    ],
)
def test_write_errors_are_explained(number: int, advice: str) -> None:
    text = explain(OSError(number, os.strerror(number)), Path("out"))
    assert text.startswith("cannot write results to out: ")
    assert advice in text


def test_displays() -> None:
    out = io.StringIO()
    assert isinstance(for_console(Console(file=out)), Lines)
    terminal = Console(file=out, force_terminal=True, width=120)
    display = for_console(terminal)
    assert isinstance(display, Live)
    with display:
        display.total(0, 2, None)
        display.started(0, "run [a]")
        display.progress(0, 0.5)
        display.finished(0, "run [a]", "93.0%", 1.5)
        display.total(1, 2, 75.0)
        display.started(0, "run [b]")
        display.message("something [odd]", bad=True)
    text = out.getvalue()
    for expected in ("run [a]", "93.0%", "about 1 min 15 s left", "something [odd]"):
        assert expected in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.4, "59 s"), (61, "1 min 01 s"), (3661, "1 h 01 min"), (-5, "0 s")],
)
def test_durations_in_words(seconds: float, text: str) -> None:
    assert duration(seconds) == text
