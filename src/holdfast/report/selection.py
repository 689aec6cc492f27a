"""The strength the `fair` preset chose, read back from its tuning runs."""

import json
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from holdfast.recipes.tuning import MARGIN
from holdfast.report.measures import Summary, summary
from holdfast.report.settings import Setting
from holdfast.report.standard import scale

__all__ = ["Selection", "cell", "searched", "selections"]


@dataclass(frozen=True)
class Selection:
    """Validation accuracy (per cent) over the grid of strengths, for one method of one preset."""

    setting: Setting
    grid: tuple[tuple[float, Summary], ...]
    floor: float | None = None
    """That of holding nothing, on the same seeds; None where that was not run."""

    @property
    def chosen(self) -> float:
        """The strength with the highest mean; the smaller of two equals."""
        return max(self.grid, key=lambda point: (point[1].mean, -point[0]))[0]

    @property
    def inside(self) -> bool:
        """Whether the best strength is not at an end of the grid."""
        return self.grid[0][0] < self.chosen < self.grid[-1][0]

    @property
    def useless(self) -> bool:
        """Whether even the best strength is worse than holding nothing: all of them are too large."""
        best = dict(self.grid)[self.chosen].mean
        return self.floor is not None and best < self.floor - 100 * MARGIN


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
    floors: dict[tuple[str, str], float] = {}
    for setting in settings:
        if setting.role != "tune":
            continue
        if setting.strength is not None:
            found.setdefault(cell(setting), []).append(setting)
        elif (values := _validation(setting)) is not None:
            floors[setting.preset, scale(setting.experiment)] = values.mean
    chosen = {}
    for key, members in found.items():
        points = []
        for member in sorted(members, key=lambda s: s.strength or 0.0):
            values = _validation(member)
            assert member.strength is not None
            assert values is not None
            points.append((member.strength, values))
        floor = floors.get((members[0].preset, scale(members[0].experiment)))
        chosen[key] = Selection(members[0], tuple(points), floor)
    return chosen


def searched(setting: Setting, selections: Iterable[Selection]) -> str | None:
    """The preset on whose validation data the setting's strength is the best; None if it is so on none.

    A longer stream may take over what was found on a shorter one, and half precision what was in full.
    """
    presets = {
        found.setting.preset
        for found in selections
        if found.chosen == setting.strength
        and not found.useless
        and _method(found.setting) == _method(setting)
        and (found.setting.preset != setting.preset or _stream(found.setting) == _stream(setting))
    }
    return setting.preset if setting.preset in presets else min(presets, default=None)


def _method(setting: Setting) -> str:
    """What identifies a method whatever its strength, its precision and its stream."""
    apart = ("role", "preset", "stream", "storage", "regularizer")
    rest = {k: v for k, v in setting.experiment.items() if k not in apart}
    regularizer = setting.experiment.get("regularizer") or {}
    return json.dumps(
        [rest, {k: v for k, v in regularizer.items() if k != "strength"}], sort_keys=True
    )


def _stream(setting: Setting) -> object:
    return {k: v for k, v in setting.experiment["stream"].items() if k != "source"}


def _validation(setting: Setting) -> Summary | None:
    return summary([100 * float(np.mean(run.result.validation[-1])) for run in setting.runs])
