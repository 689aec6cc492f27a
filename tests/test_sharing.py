"""The same work under another name is taken over."""

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from holdfast import results
from holdfast.display import Lines
from holdfast.execution import execute
from holdfast.experiment import Experiment
from holdfast.jobs import RunExperiment
from holdfast.models import MLP
from holdfast.recipes import RECIPES, Request
from holdfast.reproduction import reproduce
from holdfast.sharing import Elsewhere
from holdfast.streams import Toy
from holdfast.sweep import Estimator, sweep
from holdfast.training import Training

DONE = Experiment(
    "toy",
    "paper",
    Toy(length=2, train=20, validation=10, test=10),
    MLP((2, 4, 2)),
    Training(epochs=1, batch_size=10),
)
SAME = dataclasses.replace(DONE, recipe="frontier", preset="other")


def test_the_same_work_is_copied_under_its_own_name(tmp_path: Path) -> None:
    execute(DONE).save(tmp_path / "toy")
    elsewhere = Elsewhere(tmp_path / "frontier", [tmp_path / "toy", tmp_path / "none"])
    assert [r.experiment for r in elsewhere.take_over([RunExperiment(SAME)])] == [SAME]
    found = results.load_all(tmp_path / "frontier")
    assert list(found) == [SAME.id]
    assert found[SAME.id].test == execute(SAME).test
    assert not elsewhere.take_over([RunExperiment(SAME)])  # it is there


def test_other_work_pictures_and_damaged_files_are_not(tmp_path: Path) -> None:
    path = execute(DONE).save(tmp_path / "toy")
    (path.parent / "odd.json").write_text("[]")
    elsewhere = Elsewhere(tmp_path / "frontier", [tmp_path / "toy"])
    wanted = [
        RunExperiment(dataclasses.replace(SAME, seed=1)),
        RunExperiment(dataclasses.replace(SAME, training=Training(epochs=2, batch_size=10))),
        RunExperiment(SAME, boundaries=True),
    ]
    assert not elsewhere.take_over(wanted)
    path.write_text(path.read_text().replace('"initial":[', '"initial":[2,'))
    assert not elsewhere.take_over([RunExperiment(SAME)])
    assert not (tmp_path / "frontier").exists()


def test_a_damaged_file_hides_no_whole_one(tmp_path: Path) -> None:
    bad = execute(DONE).save(tmp_path / "one")
    bad.write_text(bad.read_text().replace('"total":', '"sum":'))  # what it holds could be read
    with pytest.raises(results.BrokenResult):
        results.load(bad)
    execute(DONE).save(tmp_path / "two")
    own = results.path_of(tmp_path / "toy", SAME)
    own.parent.mkdir(parents=True)
    own.write_text("{")  # what is broken is no reason to do the work again
    elsewhere = Elsewhere(tmp_path / "toy", [tmp_path / "one", tmp_path / "two"])
    assert len(elsewhere.take_over([RunExperiment(SAME)])) == 1
    assert results.load(own).experiment == SAME


def test_a_reproduction_says_what_it_takes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs of one study, renamed, serve the next as far as they are the same; so do their seconds."""
    known: list[str] = []
    monkeypatch.setattr(Estimator, "record", lambda self, job, seconds: known.append(job.kind))
    request = Request(("paper",), smoke=True)
    planned = RECIPES["toy"].jobs(request, lambda _: None)
    one = next(j for j in planned if isinstance(j, RunExperiment) and not j.boundaries)
    renamed = dataclasses.replace(one.experiment, recipe="frontier", preset="toy")
    execute(renamed).save(tmp_path / "frontier")
    out = io.StringIO()
    display = Lines(Console(file=out, width=200))
    summary = reproduce(RECIPES["toy"], request, tmp_path / "toy", display, budget=1e-6)
    assert "1 run of other studies or presets is the same work and is taken over" in out.getvalue()
    assert summary.kept == 1
    assert known == [one.kind]


@pytest.mark.parametrize("processes", [1, 2])
def test_the_same_work_is_done_once_in_a_sweep(processes: int, tmp_path: Path) -> None:
    """Two presets ask for it: who comes second waits for the first, and takes it over."""
    longer = dataclasses.replace(DONE, training=Training(epochs=40, batch_size=10))
    other = dataclasses.replace(longer, seed=1)
    jobs = [RunExperiment(e) for e in (longer, dataclasses.replace(longer, preset="fair"), other)]
    elsewhere = Elsewhere(tmp_path)

    def source() -> list[RunExperiment]:
        elsewhere.take_over(jobs)
        return jobs

    summary = sweep(source, tmp_path, Lines(Console(file=io.StringIO())), jobs=processes)
    assert (summary.ran, summary.kept, summary.failed, summary.left) == (2, 1, [], [])
    found = results.load_all(tmp_path)
    assert len(found) == 3
    assert found[jobs[0].id].test == found[jobs[1].id].test
