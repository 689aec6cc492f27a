"""Unfinished runs on disk: a stopped run goes on where it was, to the bit.

The first task does not depend on what will hold on to it, so its checkpoint is shared by all methods: a
network that has learnt it once per seed serves them all, and the numbers are those of learning it every time.
"""

import dataclasses
import functools
import json
import os
import tempfile
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from holdfast import results, storage
from holdfast.experiment import Experiment
from holdfast.penalty import Penalty

__all__ = ["Checkpoints", "State", "first_task_id", "remove_beginnings"]

_KEY, _DIGEST = "holdfast-checkpoint", "sha256"  # of the file's metadata
_ABANDONED = 3600.0  # seconds after which a file that was never finished is nobody's any more


@dataclasses.dataclass
class State:
    """A run between two epochs.

    Attributes:
        task: The task that is being learnt.
        epochs: How many of its epochs are done.
        record: What was measured so far, as JSON values.
        tensors: Network, optimiser and random generators.
        penalty: What holds on to the tasks before.
    """

    task: int
    epochs: int
    record: dict[str, Any]
    tensors: dict[str, Tensor]
    penalty: Penalty | None


@functools.lru_cache(maxsize=4096)  # asked for every waiting job whenever a process is free
def first_task_id(experiment: Experiment) -> str:
    """One name for all experiments that learn the same first task in the same way."""
    neutral = dataclasses.replace(
        experiment.work,
        regularizer=None,
        original_diagonal=None,
        limit=None,
        storage="float32",
        mode="sequential",
        role="tune" if experiment.role == "tune" else "report",  # a search measures less
    )
    return f"first-{neutral.id}"


class Checkpoints:
    """The checkpoints of one experiment in a results folder.

    Args:
        folder: The results folder; the files go to ``checkpoints`` below it.
        experiment: Whose they are.
    """

    def __init__(self, folder: Path, experiment: Experiment) -> None:
        self._folder = Path(folder) / "checkpoints"
        self._own, self._first = experiment.id, first_task_id(experiment)
        self._epochs = experiment.training.epochs
        self._kept = 0  # tasks in the penalty file that this process knows to be right

    def save(self, state: State) -> None:
        """Keep a state instead of the last one; the files are whole at every moment."""
        self._folder.mkdir(parents=True, exist_ok=True)
        count = 0 if state.penalty is None else len(state.penalty.tasks)
        if state.penalty is not None and self._kept != count:
            state.penalty.save(self._penalty(count))
            self._kept = count
        header = {
            "task": state.task,
            "epochs": state.epochs,
            "record": state.record,
            "penalty": count,
            "versions": results.versions(),
        }
        self._write(self._path(state.task), state.tensors, header)
        for old in range(count):  # only now nothing refers to them
            self._penalty(old).unlink(missing_ok=True)

    def load(self) -> State | None:
        """The latest state: of this experiment, else of the first task; None if there is none."""
        for path in (self._path(1), self._path(0)):
            if not path.exists():
                continue
            try:
                return self._read(path)
            except (SafetensorError, OSError, KeyError, ValueError) as error:
                warnings.warn(
                    f"{path} is not used, what it held is computed again: {error}", stacklevel=2
                )
        return None

    def spent(self) -> float:
        """Seconds of work in the latest state; 0 if there is none that can be used."""
        for path in (self._path(1), self._path(0)):
            header = self._header(path)
            if header is not None:
                return float(header["record"]["seconds"]["total"])
        return 0.0

    def first_task_learnt(self) -> bool:
        """Whether the first task need not be learnt again."""
        header = self._header(self._path(0))
        return header is not None and bool(header["epochs"] >= self._epochs)

    def remove(self) -> None:
        """Forget the experiment's own states, once its result is safe; the first task's stays for others."""
        for path in self._folder.glob(f"{self._own}*"):
            path.unlink(missing_ok=True)

    def _path(self, task: int) -> Path:
        return self._folder / f"{self._first if task == 0 else self._own}.safetensors"

    def _penalty(self, tasks: int) -> Path:
        return self._folder / f"{self._own}-penalty-{tasks}.safetensors"

    def _header(self, path: Path) -> dict[str, Any] | None:
        """What a file says about itself, without its tensors; None if it is absent or of no use."""
        try:
            with safe_open(path, framework="pt") as file:
                return _usable(file.metadata())
        except (SafetensorError, OSError, KeyError, ValueError):
            return None

    def _read(self, path: Path) -> State:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            header = _usable(metadata)
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        if storage.digest(metadata[_KEY], tensors) != metadata[_DIGEST]:
            raise ValueError("it is damaged: its digest differs")
        penalty = None
        if header["penalty"]:
            penalty = storage.load(self._penalty(header["penalty"]))
            self._kept = header["penalty"]
        return State(header["task"], header["epochs"], header["record"], tensors, penalty)

    def _write(self, path: Path, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
        # A view of the flat vector would be written with all of it: every tensor gets its own memory.
        apart = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=self._folder)
        os.close(handle)
        try:
            text = json.dumps(header)
            marks = {_KEY: text, _DIGEST: storage.digest(text, apart)}
            save_file(apart, temporary, metadata=marks)
            with open(temporary, "rb+") as written:
                os.fsync(written.fileno())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def _usable(metadata: dict[str, str] | None) -> dict[str, Any]:
    """The header of a checkpoint that these versions have made."""
    header: dict[str, Any] = json.loads((metadata or {})[_KEY])
    if header["versions"] != results.versions():
        raise ValueError(f"it was made by other versions: {header['versions']}")
    return header


def remove_beginnings(folder: Path, names: Iterable[str]) -> None:
    """Remove first tasks that no run begins with any more, and what killed processes had begun to write."""
    place = Path(folder) / "checkpoints"
    for name in names:
        (place / f"{name}.safetensors").unlink(missing_ok=True)
    for path in place.glob(".*"):
        if time.time() - path.stat().st_mtime > _ABANDONED:
            path.unlink(missing_ok=True)
    if place.exists() and not any(place.iterdir()):
        place.rmdir()
