"""The strength the `fair` preset chose, read back from its tuning runs."""

import json
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from holdfast.report.measures import Summary, summary
from holdfast.report.settings import Setting

__all__ = ["Selection", "cell", "selections"]


@dataclass(frozen=True)
class Selection:
    """Validation accuracy (per cent) over the grid of strengths, for one method of one preset."""

    setting: Setting
    grid: tuple[tuple[float, Summary], ...]

    @property
    def chosen(self) -> float:
        """The strength with the highest mean; the smaller of two equals."""
        return max(self.grid, key=lambda point: (point[1].mean, -point[0]))[0]

    @property
    def inside(self) -> bool:
        """Whether the best strength is not at an end of the grid."""
        return self.grid[0][0] < self.chosen < self.grid[-1][0]


def cell(setting: Setting) -> str:
    """What identifies a method whatever its strength, its role and its seed."""
    experiment = {k: v for k, v in setting.experiment.items() if k != "role"}
    if experiment.get("regularizer"):
        regularizer = {k: v for k, v in experiment["regularizer"].items() if k != "strength"}
        experiment["regularizer"] = regularizer
    return json.dumps(experiment, sort_keys=True)


def selections(settings: Iterable[Setting]) -> dict[str, Selection]:
    """One selection per tuned method, by :func:`cell`."""
    found: dict[str, list[Setting]] = {}
    for setting in settings:
        if setting.role == "tune" and setting.strength is not None:
            found.setdefault(cell(setting), []).append(setting)
    chosen = {}
    for key, members in found.items():
        points = []
        for member in sorted(members, key=lambda s: s.strength or 0.0):
            values = summary(
                [100 * float(np.mean(run.result.validation[-1])) for run in member.runs]
            )
            assert member.strength is not None
            assert values is not None
            points.append((member.strength, values))
        chosen[key] = Selection(members[0], tuple(points))
    return chosen
