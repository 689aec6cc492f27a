"""From cells of a table to the runs they need: first the search for a strength, then the seeds."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from holdfast.experiment import Experiment
from holdfast.jobs import Job, RunExperiment
from holdfast.recipes.recipe import Request, Score
from holdfast.recipes.tuning import Tuning

__all__ = ["Cell", "plan", "plan_presets"]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One method of a study.

    Attributes:
        experiment: What is reported, with any seed.
        tuning: The search that decides its strength; ``None`` takes it as it is.
    """

    experiment: Experiment
    tuning: Tuning | None = None

    def adjusted(self, request: Request) -> "Cell":
        """The cell with the requested settings, in its search as well."""
        tuning = self.tuning
        if tuning is not None:
            floor = None if tuning.floor is None else request.adjust(tuning.floor)
            method = request.adjust(tuning.method)
            if method.regularizer is None:
                raise ValueError(
                    "without a regularizer there is no strength to search for; --only ends runs "
                    "what holds nothing"
                )
            tuning = dataclasses.replace(tuning, method=method, floor=floor)
        return Cell(request.adjust(self.experiment), tuning)

    def searches(self, score: Score) -> list[Experiment]:
        """The runs of the search, as far as they can be named now."""
        return [] if self.tuning is None else self.tuning.experiments(score)

    def reported(self, score: Score) -> Experiment | None:
        """The experiment with its strength, or None while that is being searched for."""
        if self.tuning is None:
            return self.experiment
        strength = self.tuning.chosen(score)
        if strength is None:
            return None
        assert self.experiment.regularizer is not None
        regularizer = dataclasses.replace(self.experiment.regularizer, strength=strength)
        return dataclasses.replace(self.experiment, regularizer=regularizer)


def plan(cells: Iterable[Cell], seeds: Sequence[int], score: Score) -> list[Experiment]:
    """The runs of some cells: all searches, then every cell seed by seed; nothing is named twice."""
    cells = list(cells)
    wanted = [run for cell in cells for run in cell.searches(score)]
    ready = [found for cell in cells if (found := cell.reported(score)) is not None]
    wanted += [dataclasses.replace(found, seed=seed) for seed in seeds for found in ready]
    return list({run.id: run for run in wanted}.values())


def plan_presets(
    groups: Callable[[str, Request], Iterable[list[Cell]]],
    request: Request,
    score: Score,
    first_seed: Mapping[str, int] | None = None,
    *,
    in_turn: bool = False,
) -> list[Job]:
    """The jobs of several presets: the first group of cells of every preset, then the second, and so on.

    Args:
        groups: The cells of a preset, the most important first; only those are run without extras.
        request: What the caller wants.
        score: What the searches go by.
        first_seed: Where the reported seeds of a preset begin, if not at 0.
        in_turn: One cell after another, and one preset after another, where they differ much in cost:
            what has been run by any time is then complete.
    """
    wanted: dict[str, Experiment] = {}
    cells = [
        (index, preset, own)
        for preset in request.presets
        for index, own in enumerate(groups(preset, request))
        if index == 0 or request.extras
    ]
    for _, preset, own in cells if in_turn else sorted(cells, key=lambda cell: cell[0]):
        first = (first_seed or {}).get(preset, 0)
        seeds = range(first, first + request.seeds)
        own = [cell for cell in own if request.wants(RunExperiment(cell.experiment))]
        for part in [[cell] for cell in own] if in_turn else [own]:
            wanted |= {run.id: run for run in plan(part, seeds, score)}
    return [RunExperiment(run) for run in wanted.values()]
