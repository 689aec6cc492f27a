"""Reports of the studies on images, from made-up results of the real recipes."""

from pathlib import Path

import numpy as np
import pytest

from holdfast import results
from holdfast.experiment import Experiment
from holdfast.recipes import RECIPES, Request
from holdfast.report import write
from holdfast.report.paper import paper_seeds
from holdfast.results import Result
from holdfast.streams import CIFAR100Shift


@pytest.fixture(autouse=True)
def _no_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path / "none"))


def made_up(experiment: Experiment) -> Result:
    """Accuracies that follow from the experiment's id."""
    random = np.random.default_rng(int(experiment.id, 16))
    stream = experiment.stream
    tasks = len(stream.classes) if isinstance(stream, CIFAR100Shift) else stream.length
    epochs = experiment.training.epochs

    def draw(*shape: int) -> list:
        return random.uniform(0.5, 1, shape).tolist()

    return Result(
        experiment,
        accuracy=[draw(epochs, task + 1) for task in range(tasks)],
        validation=draw(tasks, tasks),
        test=draw(tasks, tasks),
        initial=draw(tasks),
        seconds={"training": 1.0, "consolidation": 1.0, "evaluation": 1.0, "total": 3.0},
        penalty_bytes=1000,
        floats_per_parameter=1.0,
        versions=results.versions(),
        machine=results.machine(),
    )


def fill(folder: Path, recipe: str, preset: str) -> None:
    """Two seeds of a preset; searches end wherever their numbers lead them."""
    known: dict[str, Result] = {}

    def score(experiment: Experiment) -> float | None:
        found = known.get(experiment.id)
        return None if found is None else float(np.mean(found.validation[-1]))

    request = Request((preset,), 2, settings=("training.epochs=1",))
    while True:
        jobs = RECIPES[recipe].jobs(request, score)
        new = [job.experiment for job in jobs if job.id not in known]
        if not new:
            return
        for experiment in new:
            known[experiment.id] = made_up(experiment)
            known[experiment.id].save(folder)


def test_permuted_mnist(tmp_path: Path) -> None:
    for preset in ("original-code", "sketch-size"):
        fill(tmp_path, "permuted-mnist", preset)
    page = write(tmp_path).read_text()
    text = (tmp_path / "report.md").read_text()
    assert "| `original-code` | 10 | 1 | all | 100 | 0.0001 | 2 |" in text
    assert "| `sketch-size` | 10 | 1 | all | 100 | 0.0001 | 2 |" in text
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


def test_the_seeds_of_the_paper_are_those_of_its_files() -> None:
    assert paper_seeds("permuted-mnist", "original-code") == range(40, 45)
    assert paper_seeds("permuted-mnist", "fair") == range(5)
    assert paper_seeds("toy", "original-code") == range(5)
