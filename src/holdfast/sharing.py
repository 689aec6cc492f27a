"""Work that another study has done already is taken over, not done again.

Two studies may ask for the same run under different names: the ends of the scale, or a method that both
compare. What a run gives does not depend on its names, so a result that differs in nothing else is copied.
"""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from holdfast import results
from holdfast.experiment import Experiment
from holdfast.jobs import Job, RunExperiment
from holdfast.results import BrokenResult, ForeignResult

__all__ = ["Elsewhere"]


class Elsewhere:
    """What the results folders of other studies hold, by the work that was done.

    Args:
        folder: The results folder of a study.
        others: Where else to look. No folder needs to exist.
    """

    def __init__(self, folder: Path, others: Iterable[Path] = ()) -> None:
        self._folder = folder
        self._paths: dict[str, Path] = {}
        folders = [folder, *others]
        for path in (path for place in folders for path in sorted(place.glob("runs/*.json"))):
            try:
                experiment = Experiment.from_json(json.loads(path.read_bytes())["experiment"])
            except (OSError, ValueError, TypeError, KeyError):
                continue  # not a result, or a damaged one: whose folder it is, reports it
            self._paths.setdefault(experiment.work.id, path)

    def take_over(self, jobs: Iterable[Job]) -> int:
        """Copy into the folder what it lacks and another has; returns how many runs that were.

        A run that also keeps pictures is not taken over: they are not in its result.
        """
        count = 0
        for job in jobs:
            if not isinstance(job, RunExperiment) or job.boundaries:
                continue
            path = self._paths.get(job.experiment.work.id)
            if path is None or results.path_of(self._folder, job.experiment).exists():
                continue
            try:
                found = results.load(path)
            except (OSError, BrokenResult, ForeignResult):
                continue
            dataclasses.replace(found, experiment=job.experiment).save(self._folder)
            count += 1
        return count
