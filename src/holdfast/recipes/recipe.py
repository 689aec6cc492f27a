"""What a recipe is: from a request to jobs, in order of importance."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from holdfast.approximation import APPROXIMATIONS
from holdfast.configuration import key_of, lookup
from holdfast.experiment import Experiment
from holdfast.jobs import Job, RunExperiment
from holdfast.settings import change_all

__all__ = ["ENDS", "Recipe", "Request", "Score"]

ENDS = "ends"  # the two ends of the scale: no regularizer, joint training

Score = Callable[[Experiment], float | None]
"""The mean validation accuracy over all tasks after the last one, or None if it has not been run."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What the caller of a recipe wants.

    Attributes:
        presets: Names of presets.
        seeds: The number of reported seeds, counted from 0.
        smoke: Everything once, as small as it gets: it shows that all parts work, not what they find.
        extras: Also what stands beside the paper's own table.
        settings: Changes of fields, ``field=value``, applied to every experiment that has the field.
        only: Names of approximations, and ``"ends"`` for runs without a regularizer: what is not among them
            is left out. Empty leaves nothing out.
    """

    presets: tuple[str, ...]
    seeds: int = 5
    smoke: bool = False
    extras: bool = True
    settings: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.only:
            lookup("approximation", {**APPROXIMATIONS, ENDS: None}, name)
        if self.seeds < 1:
            raise ValueError(f"the number of seeds is 1 or larger, got {self.seeds}")

    def adjust(self, experiment: Experiment) -> Experiment:
        """The experiment with the requested settings."""
        return change_all(experiment, self.settings, skip_absent=True)

    def wants(self, job: Job) -> bool:
        """Whether the job is not left out."""
        if not self.only:
            return True
        if not isinstance(job, RunExperiment):
            return False
        held = job.experiment.regularizer
        if held is None and job.experiment.role == "tune":
            return True  # every search is measured by it
        return (ENDS if held is None else key_of(APPROXIMATIONS, held.approximation)) in self.only


class Recipe(ABC):
    """One study: its presets, and the jobs that make it."""

    name: ClassVar[str]
    summary: ClassVar[str]
    presets: ClassVar[Mapping[str, str]]  # name -> what it stands for

    @abstractmethod
    def jobs(self, request: Request, score: Score) -> Sequence[Job]:
        """All jobs that can be named now, the most important first.

        Asked again after runs that decide about others (the choice of a strength) are finished.
        """

    @abstractmethod
    def example(self, preset: str, smoke: bool = False) -> Experiment:
        """One experiment of a preset, to be changed and run on its own."""

    @property
    def default(self) -> str:
        """The preset that is meant where none is named."""
        return "paper" if "paper" in self.presets else next(iter(self.presets))

    def choose_presets(self, name: str) -> tuple[str, ...]:
        """The presets behind a name: itself, or all of them."""
        if name == "all":
            return tuple(self.presets)
        lookup(f"preset of {self.name}", {**self.presets, "all": ""}, name)
        return (name,)
