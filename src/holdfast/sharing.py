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
from holdfast.results import BrokenResult, ForeignResult, Result

__all__ = ["Elsewhere"]


class Elsewhere:
    """What the results folders of other studies hold, by the work that was done.

    Args:
        folder: The results folder of a study.
        others: Where else to look. No folder needs to exist.
    """

    def __init__(self, folder: Path, others: Iterable[Path] = ()) -> None:
        self._folder = folder
        self._paths: dict[str, list[Path]] = {}
        self._seen: set[Path] = set()
        self._asked: set[str] = set()  # jobs for which there was nothing in what is seen
        for place in dict.fromkeys(place.absolute() for place in (folder, *others)):
            self._look(place)

    def _look(self, place: Path) -> set[str]:
        """Take note of results that are new in a folder; returns the work that they are."""
        found = set()
        for path in sorted(set(place.glob("runs/*.json")) - self._seen):
            self._seen.add(path)
            try:
                experiment = Experiment.from_json(json.loads(path.read_bytes())["experiment"])
            except (OSError, ValueError, TypeError, KeyError):
                continue  # not a result, or a damaged one: whose folder it is, reports it
            self._paths.setdefault(experiment.work.id, []).append(path)
            found.add(experiment.work.id)
        return found

    def take_over(self, jobs: Iterable[Job]) -> list[Result]:
        """Copy into the folder what it lacks and another name or folder has; returns those results.

        A run that also keeps pictures is not taken over: they are not in its result.
        """
        taken, new = [], self._look(self._folder.absolute())
        for job in jobs:
            if not isinstance(job, RunExperiment) or job.boundaries:
                continue
            if job.id in self._asked and job.work not in new:
                continue
            self._asked.add(job.id)
            if job.done(self._folder):
                continue
            found = self._whole(job.work)
            if found is not None:
                taken.append(dataclasses.replace(found, experiment=job.experiment))
                taken[-1].save(self._folder)
        return taken

    def _whole(self, work: str) -> Result | None:
        """The first valid result of some work."""
        for path in self._paths.get(work, []):
            try:
                return results.load(path)
            except (OSError, BrokenResult, ForeignResult):
                continue
        return None
