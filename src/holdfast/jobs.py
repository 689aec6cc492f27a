"""Pieces of work that a sweep hands to its processes, as values that travel as JSON."""

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import nn

from holdfast import boundaries, fisher_study, metrics, results
from holdfast.checkpoint import Checkpoints
from holdfast.configuration import register
from holdfast.execution import execute
from holdfast.experiment import Experiment
from holdfast.fisher_study import FisherStudy
from holdfast.streams.toy import WINDOW

__all__ = ["JOBS", "Job", "RunExperiment", "RunFisherStudy"]

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
    def decides(self) -> bool:
        """Whether the recipe may ask for other jobs once this one is finished."""
        return False

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
    def decides(self) -> bool:
        return self.experiment.role == "tune"

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
            folder=None if self.boundaries else folder,  # maps of a task are not in a checkpoint
        )
        if self.boundaries:  # before the result: a result says that all is there
            boundaries.save(folder, self.id, maps, WINDOW)
        result.save(folder)
        Checkpoints(folder, self.experiment).remove()
        return f"{metrics.average_accuracy(result.test):.1%}"


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


JOBS = register(Job, "job", {"experiment": RunExperiment, "fisher": RunFisherStudy})
