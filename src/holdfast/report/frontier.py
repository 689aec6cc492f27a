"""The report of the frontier: accuracy against memory and against time."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from holdfast.report import sections, tasks
from holdfast.report.blocks import Block, Cell, Column, Missing, Section, Table, amount, number
from holdfast.report.budgets import best_at_every_budget
from holdfast.report.choice import choice
from holdfast.report.comparison import count, method, statistics, strength
from holdfast.report.frontier_figure import frontier_figure
from holdfast.report.loading import Study
from holdfast.report.measures import (
    finals,
    floats,
    median_seconds,
    summary,
    work_seconds,
    work_tests,
)
from holdfast.report.naming import epochs, names
from holdfast.report.selection import searched
from holdfast.report.settings import Setting
from holdfast.report.standard import main_scales, scale

__all__ = ["floats", "frontier_sections", "times_plain"]

TITLES = {
    "ten-tasks": "Ten permutations of MNIST",
    "twenty-tasks": "Twenty permutations of MNIST",
    "fifty-tasks": "Fifty permutations of MNIST",
    "toy": "Five tasks in the plane",
}


def times_plain(study: Study, preset: str, settings: Sequence[Setting]) -> list[float | None]:
    """Time of training and consolidation, beside that of holding nothing at the same scale."""
    plain = {
        scale(s.experiment): work_tests(s)
        for s in study.baselines(preset, every_scale=True)
        if s.mode == "sequential"
    }
    return [_over(work_tests(s), plain.get(scale(s.experiment))) for s in settings]


def _over(tests: float | None, plain: float | None) -> float | None:
    return tests / plain if tests is not None and plain else None


def frontier_sections(study: Study) -> list[Section]:
    """All sections, in order."""
    return [
        Section(
            "summary", "Summary", sections.present([tasks.scale(study), *sections.runs(study)])
        ),
        *(_preset(study, preset) for preset in sorted(study.presets, key=_place)),
        choice(study),
        sections.reading(study),
    ]


def _place(preset: str) -> tuple[int, str]:
    known = list(TITLES)
    return known.index(preset) if preset in known else len(known), preset


def _title(preset: str) -> str:
    return TITLES.get(preset, preset)


def _preset(study: Study, preset: str) -> Section:
    found = [*study.sized(preset), *study.baselines(preset, every_scale=True)]
    if not found:
        nothing = Missing("Nothing was reported yet.", study.command(preset))
        return Section(f"frontier-{preset}", _title(preset), [nothing])
    main = main_scales(study.settings)[preset]

    def order(setting: Setting) -> tuple[Any, ...]:
        own = scale(setting.experiment)
        return own != main, epochs(setting), own, floats(setting), setting.order

    settings = sorted(found, key=order)
    # the scale of the usual ones goes without saying
    usual = [s for s in settings if scale(s.experiment) == main]
    named = names(settings) | names(usual)
    blocks: list[Block] = [
        frontier_figure(
            preset, _title(preset), settings, named, times_plain(study, preset, settings)
        ),
        best_at_every_budget(study, preset, settings, named),
        _table(study, preset, settings, named),
    ]
    return Section(f"frontier-{preset}", _title(preset), blocks)


def _table(
    study: Study, preset: str, settings: Sequence[Setting], named: Mapping[Setting, str]
) -> Table:
    rows = []
    for setting, times in zip(settings, times_plain(study, preset, settings), strict=True):
        rows.append(
            [
                method(setting, named[setting]),
                amount(floats(setting)),
                amount(4 * floats(setting)),
                statistics(summary(list(finals(setting).values()))),
                count(len(setting.runs)),
                count(epochs(setting)),
                _strength(study, setting),
                number(work_seconds(setting), 0),
                number(times, 1),
                number(median_seconds(setting, "consolidation"), 0),
            ]
        )
    return Table(
        f"frontier-{preset}",
        f"Average accuracy after the last task, per cent: `{preset}`",
        [
            Column("Method", numeric=False),
            Column("Floats", help="32-bit numbers per parameter, the anchor not counted"),
            Column("Bytes", help="Of the matrix per parameter: a bfloat16 takes two, an int8 one"),
            Column("Accuracy", help="Mean ± standard deviation over seeds"),
            Column("Seeds"),
            Column("Epochs", help="A task is learnt for"),
            Column("λ", help="The best on validation data, with seeds of its own"),
            Column("Seconds", help="Processor time of training and consolidation in one run"),
            Column(
                "× plain", help="Beside a run in which nothing is held, were it as fast a machine"
            ),
            Column("Matrix", help="Seconds of consolidation in it"),
        ],
        rows,
        " ".join(_note(study, preset, settings)),
        study.command(preset),
    )


def _strength(study: Study, setting: Setting) -> Cell:
    """λ, with a word where no search found it."""
    found = strength(setting)
    known = setting.strength is None or searched(setting, study.selections.values())
    return found if known else dataclasses.replace(found, note="not searched")


def _note(study: Study, preset: str, settings: Sequence[Setting]) -> Iterator[str]:
    """What the methods have in common, and where their strengths come from."""
    held = [s for s in settings if s.approximation is not None]
    sources = {searched(s, study.selections.values()) for s in held}
    aspects: dict[str, set[object]] = {
        "stream": {json.dumps(s.experiment["stream"], sort_keys=True) for s in settings},
        "epochs": {epochs(s) for s in settings},
        "search": {*sources},
        "seeds": {s.seeds for s in settings},
    }
    if None in sources:
        del aspects["search"]
    if same := [aspect for aspect, kinds in aspects.items() if len(kinds) == 1]:
        all_but_last = [", ".join(same[:-1])] if same[1:] else []
        yield f"The same {' and '.join([*all_but_last, same[-1]])} for every method."
    for source in sorted(source for source in sources if source not in (None, preset)):
        which = "λ" if len(sources) == 1 else "λ that was not searched here"
        yield f"{which} is the one that is best on `{source}`."
    if any(s.storage != "float32" for s in held):
        yield "What is stored in half precision has the λ that is best in full."
