"""The command that makes (or resumes) what is shown, with the options it was run with."""

import functools
import json
import shlex
from collections.abc import Container, Mapping, Sequence
from typing import Any

from holdfast.approximation import APPROXIMATIONS
from holdfast.configuration import key_of
from holdfast.jobs import RunExperiment
from holdfast.recipes import RECIPES
from holdfast.recipes.recipe import ENDS, Request
from holdfast.report.selection import cell
from holdfast.report.settings import Setting
from holdfast.report.standard import usual

__all__ = ["command"]

_OWN_OPTION = ("stream.source", "stream.train_size")  # or none is needed


def command(
    recipe: str,
    reported: Mapping[str, Sequence[Setting]],
    preset: str | None,
    searched: Container[str] = (),
) -> str:
    """One command line; settings that were run at different scales need one after the other.

    Args:
        recipe: Name of the recipe.
        reported: By preset, the settings that are shown.
        preset: A preset, ``"all"`` that were run, or None for the bare command.
        searched: The cells whose strength was searched for as they are. The recipes' own searches are in
            full precision; another one was asked for.
    """
    plain = f"holdfast reproduce {recipe}"
    if preset is None:
        return plain
    if preset != "all":
        return " && ".join(
            _lines(f"{plain} --preset {preset}", reported.get(preset, ()), searched)
        )
    known = RECIPES[recipe].presets if recipe in RECIPES else reported
    every = [setting for settings in reported.values() for setting in settings]
    together = _lines(f"{plain} --preset all", every, searched)
    if len(together) == 1 and reported.keys() >= known.keys():
        return together[0]
    return " && ".join(
        line
        for name, settings in reported.items()
        for line in _lines(f"{plain} --preset {name}", settings, searched)
    )


def _lines(start: str, settings: Sequence[Setting], searched: Container[str]) -> list[str]:
    """A command per set of options, the recipe's own scale first; one more for methods with more seeds."""
    seeds: dict[tuple[str, ...], dict[str, int]] = {}
    planned = frozenset().union(*(_planned(s.recipe, s.preset) for s in settings))
    for setting in settings:
        options = _options(setting)
        if setting.storage != "float32" and cell(setting) in searched:
            options += ("--set", f"storage={setting.storage}")
        counts = seeds.setdefault(options, {})
        name = setting.approximation or ENDS
        counts[name] = max(counts.get(name, 0), len(setting.runs))
    lines = []
    for options, counts in sorted(seeds.items(), key=lambda item: (len(item[0]), item[0])):
        if "--smoke" in options:
            lines.append(" ".join([start, *options]))
            continue
        least, *more = sorted(set(counts.values()))
        # at another scale than the recipe's own, what was left out is not to be made
        some = sorted(counts) if options and planned - counts.keys() else []
        lines.append(" ".join([start, "--seeds", str(least), *_only(some), *options]))
        for number in more:
            chosen = [name for name in sorted(counts) if counts[name] == number]
            lines.append(" ".join([start, "--seeds", str(number), *_only(chosen), *options]))
    return lines or [start]


def _only(names: Sequence[str]) -> list[str]:
    return [f"--only {name}" for name in names]


@functools.cache
def _planned(recipe: str, preset: str) -> frozenset[str]:
    """The approximations a preset is made of, and whether it has the ends of the scale."""
    if recipe not in RECIPES or preset not in RECIPES[recipe].presets:
        return frozenset()
    jobs = RECIPES[recipe].jobs(Request((preset,), seeds=1), lambda _: None)
    runs = [job.experiment for job in jobs if isinstance(job, RunExperiment)]
    return frozenset(
        ENDS if run.regularizer is None else key_of(APPROXIMATIONS, run.regularizer.approximation)
        for run in runs
        if run.regularizer is not None or run.role == "report"
    )


def _options(setting: Setting) -> tuple[str, ...]:
    """What a setting was run with beside its preset, as far as there is an option for it."""
    example = usual(setting.recipe, setting.preset)
    small = usual(setting.recipe, setting.preset, smoke=True)
    if example is None or small is None:
        return ()
    ours, options = setting.experiment, []
    if _frame(ours) != _frame(example) and _frame(ours) == _frame(small):
        example = small
        options.append("--smoke")
    if ours["training"]["epochs"] != example["training"]["epochs"]:
        options += ["--epochs", str(ours["training"]["epochs"])]
    size = ours["stream"].get("train_size")
    if size is not None and size != example["stream"].get("train_size"):
        options += ["--train-size", str(size)]
    for field in ("model", "stream"):
        options += _changes(field, ours[field], example[field])
    return tuple(options)


def _changes(path: str, ours: Any, example: Any) -> list[str]:
    """Fields that differ from the recipe's own, as options that set them."""
    if ours == example or path in _OWN_OPTION:
        return []
    if (
        isinstance(ours, Mapping)
        and isinstance(example, Mapping)
        and ours.keys() == example.keys()
    ):
        return [
            word for name in ours for word in _changes(f"{path}.{name}", ours[name], example[name])
        ]
    return ["--set", shlex.quote(f"{path}={json.dumps(ours, ensure_ascii=False)}")]


def _frame(experiment: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Network and stream, but for what has an option of its own or does not matter."""
    stream = experiment["stream"]
    return experiment["model"], {
        k: v for k, v in stream.items() if f"stream.{k}" not in _OWN_OPTION
    }
