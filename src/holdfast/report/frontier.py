"""The report of the frontier: accuracy against memory and against time."""

from collections.abc import Mapping, Sequence

from holdfast.report import sections, tasks
from holdfast.report.blocks import Block, Column, Section, Table, amount, number
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
from holdfast.report.settings import Setting
from holdfast.report.standard import scale

__all__ = ["floats", "frontier_sections", "times_plain"]

TITLES = {
    "ten-tasks": "Ten permutations of MNIST",
    "twenty-tasks": "Twenty permutations of MNIST",
    "fifty-tasks": "Fifty permutations of MNIST",
    "toy": "Five tasks in the plane",
}


def times_plain(study: Study, preset: str, settings: Sequence[Setting]) -> list[float | None]:
    """Time of training and consolidation, beside that of a run of the tables in which nothing is held."""
    baselines = study.baselines(preset)
    plain = next((work_tests(s) for s in baselines if s.mode == "sequential"), None)
    found = [work_tests(setting) for setting in settings]
    return [None if tests is None or not plain else tests / plain for tests in found]


def frontier_sections(study: Study) -> list[Section]:
    """All sections, in order."""
    return [
        Section("summary", "Summary", [tasks.scale(study), *sections.runs(study)]),
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
    settings = sorted(found, key=lambda s: (epochs(s), floats(s), s.order))
    if not settings:
        return Section(f"frontier-{preset}", _title(preset), [])
    # how long the usual ones learn goes without saying
    usual = [s for s in settings if epochs(s) == epochs(settings[0])]
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
                strength(setting),
                number(work_seconds(setting), 0),
                number(times, 1),
                number(median_seconds(setting, "consolidation"), 0),
            ]
        )
    same = ["stream"] + ["epochs"] * (len({scale(s.experiment) for s in settings}) == 1)
    same += ["search"] + ["seeds"] * (len({tuple(sorted(finals(s))) for s in settings}) == 1)
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
            Column("λ", help="Chosen on validation data, with seeds of its own"),
            Column("Seconds", help="Processor time of training and consolidation in one run"),
            Column(
                "× plain", help="Beside a run in which nothing is held, were it as fast a machine"
            ),
            Column("Matrix", help="Seconds of consolidation in it"),
        ],
        rows,
        f"The same {', '.join(same[:-1])} and {same[-1]} for every method; what is stored in half precision "
        "has the λ that is best in full.",
        study.command(preset),
    )
