"""Pieces of work that a sweep hands to its processes, as values that travel as JSON."""

import dataclasses
import functools
import json
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import nn

from holdfast import boundaries, fisher_study, results
from holdfast.checkpoint import Checkpoints, first_task_id
from holdfast.configuration import register, to_json
from holdfast.execution import execute
from holdfast.experiment import Experiment
from holdfast.fisher_study import FisherStudy
from holdfast.streams.toy import WINDOW

__all__ = ["JOBS", "Estimator", "Job", "RunExperiment", "RunFisherStudy", "kind_of"]

Progress = Callable[[float], None]


class Job(ABC):
    """One piece of work with files of its own; finished when they are there."""

    @property
    @abstractmethod
    def id(self) -> str:
        """A name that no other job has."""

    @property
    @abstractmethod
    def label(self) -> str:
        """A short description for people."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """Jobs of one kind take about the same time."""

    @property
    def families(self) -> Sequence[str]:
        """Jobs of one family take about the same time per :attr:`extent`; from the closest to the widest."""
        return (self.kind,)

    @property
    def extent(self) -> float:
        """How much there is to do, in any unit."""
        return 1.0

    @property
    def work(self) -> str:
        """A name for what is done, whatever it is done for: a job of the same work need not be run again."""
        return self.id

    @property
    def decides(self) -> bool:
        """Whether the recipe may ask for other jobs once this one is finished."""
        return False

    @property
    def resumable(self) -> bool:
        """Whether a stopped job goes on where it was, if it had run for long enough."""
        return False

    @property
    def beginning(self) -> str | None:
        """A name for the work it begins with, if jobs of the same name can take it over from one of them."""
        return None

    def begun(self, folder: Path) -> bool:
        """Whether :attr:`beginning` is there to be taken over."""
        return False

    def spent(self, folder: Path) -> float:
        """Seconds of its work that are behind, in a checkpoint."""
        return 0.0

    @abstractmethod
    def done(self, folder: Path) -> bool:
        """Whether its files are in the folder, complete and valid."""

    @abstractmethod
    def run(self, folder: Path, progress: Progress) -> str:
        """Do the work, write the files, and return what came out in a few words."""


@dataclasses.dataclass(frozen=True)
class RunExperiment(Job):
    """Run an experiment.

    Attributes:
        experiment: What to run.
        boundaries: Also keep the decision map after every task (two inputs, two outputs).
    """

    experiment: Experiment
    boundaries: bool = False

    @property
    def id(self) -> str:
        return self.experiment.id

    @property
    def label(self) -> str:
        return self.experiment.label

    @property
    def kind(self) -> str:
        return kind_of(self.experiment)

    @property
    def families(self) -> Sequence[str]:
        return _families_of(self.experiment)

    @property
    def extent(self) -> float:
        # epochs in all; a stream that may be of any length says so in ``length``
        return float(
            self.experiment.training.epochs * getattr(self.experiment.stream, "length", 1)
        )

    @property
    def work(self) -> str:
        return self.id if self.boundaries else self.experiment.work.id

    @property
    def decides(self) -> bool:
        return self.experiment.role == "tune"

    @property
    def resumable(self) -> bool:
        return not self.boundaries  # maps of a task are not in a checkpoint

    @property
    def beginning(self) -> str | None:
        return first_task_id(self.experiment) if self.resumable else None

    def begun(self, folder: Path) -> bool:
        return self.resumable and Checkpoints(folder, self.experiment).first_task_learnt()

    def spent(self, folder: Path) -> float:
        return Checkpoints(folder, self.experiment).spent() if self.resumable else 0.0

    def done(self, folder: Path) -> bool:
        if self.boundaries and not boundaries.path_of(folder, self.id).exists():
            return False
        path = results.path_of(folder, self.experiment)
        if not path.exists():
            return False
        try:
            results.load(path)
        except results.BrokenResult:
            return False
        return True

    def run(self, folder: Path, progress: Progress) -> str:
        maps: list[NDArray[np.uint8]] = []

        def after_task(model: nn.Module) -> None:
            maps.append(boundaries.decision_map(model, WINDOW))

        result = execute(
            self.experiment,
            progress=progress,
            after_task=after_task if self.boundaries else None,
            folder=folder if self.resumable else None,
        )
        if self.boundaries:  # before the result: a result says that all is there
            boundaries.save(folder, self.id, maps, WINDOW)
        result.save(folder)
        Checkpoints(folder, self.experiment).remove()
        return result.outcome


@dataclasses.dataclass(frozen=True)
class RunFisherStudy(Job):
    """Compare approximations of one network's importance matrix."""

    study: FisherStudy
    seed: int = 0

    @property
    def id(self) -> str:
        return f"fisher-{self.seed}"

    @property
    def label(self) -> str:
        return f"importance matrix, network {self.seed}"

    @property
    def kind(self) -> str:
        return "fisher"

    def done(self, folder: Path) -> bool:
        return fisher_study.is_done(folder, self.study, self.seed)

    def run(self, folder: Path, progress: Progress) -> str:
        found = self.study.run(self.seed, progress)
        found.save(folder)
        return f"stable rank {found.stable_rank['frobenius']:.2f}"


@functools.lru_cache(maxsize=4096)  # asked for every waiting job whenever progress is shown
def kind_of(experiment: Experiment) -> str:
    """What decides the duration of an experiment: all of it but its names, seed, role and strength."""
    neutral = dataclasses.replace(experiment.work, seed=0, role="report")
    if experiment.role == "single":
        neutral = dataclasses.replace(neutral, role="single")
    if neutral.regularizer is not None:
        regularizer = dataclasses.replace(neutral.regularizer, strength=1.0)
        neutral = dataclasses.replace(neutral, regularizer=regularizer)
    return neutral.id


@functools.lru_cache(maxsize=4096)
def _families_of(experiment: Experiment) -> tuple[str, ...]:
    """What decides how long an epoch takes, more or less: the matrix, its kind, the network."""
    held = experiment.regularizer
    matrix = {"name": None} if held is None else to_json(held.approximation)
    rest = [to_json(experiment.model), experiment.mode]
    exact = [matrix, experiment.storage, experiment.limit]
    return tuple(json.dumps([*rest, *more]) for more in (exact, [matrix["name"]], []))


class Estimator:
    """How long a job will take, from those that have run.

    Args:
        known: Seconds of jobs by their kind.
    """

    def __init__(self, known: Mapping[str, Sequence[float]] | None = None) -> None:
        self._seconds = {kind: list(seconds) for kind, seconds in (known or {}).items()}
        self._rates: dict[str, list[float]] = {}  # seconds per unit of extent, by family

    def record(self, job: Job, seconds: float) -> None:
        """Remember how long a job took."""
        self._seconds.setdefault(job.kind, []).append(seconds)
        for family in job.families:
            self._rates.setdefault(family, []).append(seconds / job.extent)

    def expect(self, job: Job) -> float | None:
        """Seconds for a job: the median of its kind, else of its closest family, else of the slowest."""
        if job.kind in self._seconds:
            return statistics.median(self._seconds[job.kind])
        for family in job.families:
            if family in self._rates:
                return statistics.median(self._rates[family]) * job.extent
        slowest = max(map(statistics.median, self._rates.values()), default=None)
        return None if slowest is None else slowest * job.extent


JOBS = register(Job, "job", {"experiment": RunExperiment, "fisher": RunFisherStudy})
