"""What is usual for a preset: its history, its scale, and how many seeds decide."""

import functools
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from holdfast.recipes import RECIPES
from holdfast.report.settings import Setting

__all__ = ["enough_seeds", "main_history", "main_scales", "scale", "usual"]

# In the synthetic study the spread over seeds is 5 to 10 points: fewer decide nothing. Runs on images
# spread by a point or less and take hours: there the interval of three has to decide.
_ENOUGH = {"permuted-mnist": 3, "cifar100": 3, "frontier": 3}
_MANY = 20


def enough_seeds(recipe: str) -> int:
    """Paired seeds below which nothing is decided, whatever their interval."""
    return _ENOUGH.get(recipe, _MANY)


@functools.cache
def usual(recipe: str, preset: str, smoke: bool = False) -> Mapping[str, Any] | None:
    """The recipe's own example of a preset as JSON; None where there is no such preset."""
    known = RECIPES.get(recipe)
    if known is None or preset not in known.presets:
        return None
    return known.example(preset, smoke).to_json()


def main_history(recipe: str, preset: str) -> str:
    """Registry key of the history that a preset's main comparison is made with."""
    example = usual(recipe, preset)
    return "moving_average" if example is None else str(example["regularizer"]["history"]["name"])


def scale(experiment: Mapping[str, Any]) -> str:
    """What must be equal before two methods are compared: network, stream and training.

    When Adam starts anew is a part of the method here, and where the images lie is no difference.
    """
    stream = {k: v for k, v in experiment["stream"].items() if k != "source"}
    training = {k: v for k, v in experiment["training"].items() if k != "reset"}
    return json.dumps([experiment["model"], stream, training], sort_keys=True)


def main_scales(settings: Iterable[Setting]) -> dict[str, str]:
    """By preset, the scale of its tables: the recipe's own, or that of the most runs."""
    counts: dict[str, Counter[str]] = {}
    recipes: dict[str, str] = {}
    for setting in settings:
        if setting.role == "report":
            recipes[setting.preset] = setting.recipe
            found = counts.setdefault(setting.preset, Counter())
            found[scale(setting.experiment)] += len(setting.runs)
    chosen = {}
    for preset, found in counts.items():
        example = usual(recipes[preset], preset)
        own = "" if example is None else scale(example)
        chosen[preset] = own if own in found else max(found, key=lambda s: (found[s], s))
    return chosen
