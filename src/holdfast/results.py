"""Results of experiments: one JSON file each, named by the experiment, written whole or not at all."""

import dataclasses
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import torch

from holdfast import metrics
from holdfast.experiment import Experiment

__all__ = ["FORMAT", "BrokenResult", "ForeignResult", "Result", "atomic", "load", "load_all"]

FORMAT = 1  # raised whenever a file of the old format would be misread


class BrokenResult(ValueError):
    """A result file that is damaged; running its experiment again replaces it."""


class ForeignResult(ValueError):
    """A result file of another format version, which must not be mixed with this one's."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run measured. Accuracies are fractions, tasks are counted from 0.

    A run that only chooses a strength is not tested: its lists of test accuracies are empty.

    Attributes:
        experiment: What was run.
        accuracy: ``accuracy[task][epoch]`` lists the test accuracies on tasks 0 to ``task``.
        validation: ``validation[-1]``: validation accuracies on all tasks after the last was learnt; older
            files have a row for every task.
        test: ``test[task]``: test accuracies on all tasks after ``task`` was learnt; in long streams on those
            seen and the next.
        initial: Test accuracies on all tasks of the untrained network.
        seconds: Processor time of training, consolidation and evaluation; the total by the clock.
        penalty_bytes: Memory of the largest penalty of the run.
        floats_per_parameter: The same in 32-bit numbers per parameter of the network.
        versions: Versions of holdfast, torch and Python.
        machine: Threads used and cores present.
    """

    experiment: Experiment
    accuracy: list[list[list[float]]]
    validation: list[list[float]]
    test: list[list[float]]
    initial: list[float]
    seconds: dict[str, float]
    penalty_bytes: int
    floats_per_parameter: float
    versions: dict[str, str]
    machine: dict[str, int]

    @property
    def tasks(self) -> int:
        """How many tasks were learnt."""
        return len(self.validation[-1])

    @property
    def outcome(self) -> str:
        """The average accuracy after the last task, for people; of a search, on validation data."""
        if self.test:
            return f"{metrics.average_accuracy(self.test):.1%}"
        return f"{sum(self.validation[-1]) / self.tasks:.1%} on validation data"

    def to_json(self) -> dict[str, Any]:
        """The content of the result file."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {
            "format": FORMAT,
            "id": self.experiment.id,
            **fields,
            "experiment": self.experiment.to_json(),
        }

    def save(self, folder: Path) -> Path:
        """Write ``runs/<id>.json`` below ``folder``, atomically."""
        path = path_of(folder, self.experiment)
        text = json.dumps(self.to_json(), ensure_ascii=False, separators=(",", ":"))
        with atomic(path) as file:
            file.write(text.encode())
        return path


def versions() -> dict[str, str]:
    """The versions a result depends on."""
    return {
        "holdfast": metadata.version("holdfast"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def machine() -> dict[str, int]:
    """Threads in use and cores present."""
    return {"threads": torch.get_num_threads(), "cores": os.cpu_count() or 1}


def path_of(folder: Path, experiment: Experiment) -> Path:
    """Where the result of an experiment is kept."""
    return Path(folder) / "runs" / f"{experiment.id}.json"


@contextmanager
def atomic(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears under its name when it is complete, and leaves nothing behind when it fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes it private; results are meant to be shared
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load(path: Path) -> Result:
    """Read and check one result file.

    Raises:
        BrokenResult: The file is damaged, incomplete or does not belong to its name.
        ForeignResult: The file has another format version.
    """
    try:
        data = json.loads(path.read_bytes())
    except ValueError as error:  # not UTF-8, or not JSON
        raise BrokenResult(f"{path} is not complete JSON ({error})") from error
    if not isinstance(data, dict) or "format" not in data:
        raise BrokenResult(f"{path} is not a result file: it has no 'format'")
    if data["format"] != FORMAT:
        raise ForeignResult(
            f"{path} has result format {data['format']!r}, this version reads and writes {FORMAT}; "
            "results of two formats are not mixed: choose another --out, or move the folder away"
        )
    try:
        experiment = Experiment.from_json(data["experiment"])
        names = [f.name for f in dataclasses.fields(Result) if f.name != "experiment"]
        result = Result(experiment, **{name: data[name] for name in names})
        _check_shapes(result)
        _check_costs(result)
    except KeyError as error:
        raise BrokenResult(f"{path} lacks the field {error}") from error
    except (ValueError, TypeError) as error:
        raise BrokenResult(f"{path}: {error}") from error
    if not data.get("id") == experiment.id == path.stem:
        raise BrokenResult(
            f"{path} holds the experiment {experiment.id} under the id {data.get('id')!r}: "
            "name, id and experiment must agree"
        )
    return result


def load_all(
    folder: Path, report: Callable[[BrokenResult], None] | None = None
) -> dict[str, Result]:
    """All valid results of a folder by id.

    Args:
        folder: The results folder, with ``runs`` below it; it need not exist.
        report: Called for every broken file; without it a broken file is raised.
    """
    found = {}
    for path in sorted((Path(folder) / "runs").glob("*.json")):
        try:
            found[path.stem] = _read(path)
        except BrokenResult as error:
            if report is None:
                raise
            report(error)
    return found


def _read(path: Path) -> Result:
    try:
        return load(path)
    except OSError as error:  # no permission, a folder of that name
        raise BrokenResult(f"{path} cannot be read ({error.strerror})") from error


def _check_costs(result: Result) -> None:
    """Refuse seconds, bytes and versions that the report could not show."""
    known = ("training", "consolidation", "evaluation", "total")
    if not isinstance(result.seconds, dict) or sorted(result.seconds) != sorted(known):
        raise ValueError(f"seconds: expected {', '.join(known)}, got {result.seconds!r}")
    numbers = {f"seconds of {name}": value for name, value in result.seconds.items()}
    numbers |= {name: getattr(result, name) for name in ("penalty_bytes", "floats_per_parameter")}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ValueError(f"{name}: expected a number of at least 0, got {value!r}")
    for name in ("versions", "machine"):
        if not isinstance(getattr(result, name), dict):
            raise ValueError(f"{name}: expected names and values, got {getattr(result, name)!r}")


def _check_shapes(result: Result) -> None:
    """Refuse accuracies whose number does not follow from the experiment."""
    if not result.validation or not result.validation[-1]:
        raise ValueError("validation: expected one accuracy per task, got none")
    tasks, epochs = result.tasks, result.experiment.training.epochs
    if [len(row) for row in result.validation] not in ([tasks], [tasks] * tasks):
        raise ValueError(f"validation: expected {tasks} accuracies after the last task")
    untested = result.experiment.role == "tune" and not result.test
    rows = 0 if untested else tasks
    if len(result.initial) != rows:
        raise ValueError(f"initial: expected {rows} accuracies, got {len(result.initial)}")
    counts = enumerate(map(len, result.test))
    if len(result.test) != rows or any(
        n not in (tasks, min(task + 2, tasks)) for task, n in counts
    ):
        raise ValueError(
            f"test: expected {rows} lists of {tasks} accuracies, or of those on seen tasks and the next"
        )
    shape = [[len(seen) for seen in part] for part in result.accuracy]
    if shape != [[task + 1] * epochs for task in range(rows)]:
        raise ValueError(
            f"accuracy: expected {rows} tasks of {epochs} epochs, in task k one accuracy for each "
            "of the tasks 0 to k"
        )
    numbers = [result.initial, *result.validation, *result.test]
    numbers += [seen for rows in result.accuracy for seen in rows]
    for number in (n for row in numbers for n in row):
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= 1:
            raise ValueError(f"an accuracy is a fraction from 0 to 1, got {number!r}")
