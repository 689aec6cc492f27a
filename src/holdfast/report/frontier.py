"""The report of the frontier: accuracy against memory and against time."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from holdfast.report import sections, tasks
from holdfast.report.blocks import Block, Column, Figure, Section, Table, amount, number
from holdfast.report.budgets import best_at_every_budget
from holdfast.report.choice import choice
from holdfast.report.comparison import count, method, statistics, strength
from holdfast.report.figures import colour, focus, height, legend, line, panel, tidy
from holdfast.report.loading import Study
from holdfast.report.measures import (
    finals,
    floats,
    mean_accuracy,
    median_seconds,
    summary,
    work_seconds,
    work_tests,
)
from holdfast.report.naming import epochs, names
from holdfast.report.settings import Setting, words
from holdfast.report.standard import scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

__all__ = ["floats", "frontier_sections", "times_plain"]

TITLES = {
    "ten-tasks": "Ten permutations of MNIST",
    "twenty-tasks": "Twenty permutations of MNIST",
    "fifty-tasks": "Fifty permutations of MNIST",
    "toy": "Five tasks in the plane",
}
_MARKERS = ("o", "s", "^", "D")  # of families that share a colour
_TICKS = (0.005, 0.02, 0.05, 0.2, 0.5, 1, 2, 5, 10, 25, 50)  # floats per parameter
_LINES = ("-", "--", ":", "-.")  # from few epochs to many


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
    named = names(settings)
    blocks: list[Block] = [
        _figure(study, preset, settings, named),
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
    alike = len({scale(s.experiment) for s in settings}) == 1
    same = "Same stream, epochs, search and seeds" if alike else "Same search and seeds"
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
        f"{same} for every method.",
        study.command(preset),
    )


def _figure(
    study: Study, preset: str, settings: Sequence[Setting], named: Mapping[Setting, str]
) -> Figure:
    held = [s for s in settings if s.approximation is not None]
    said = "; ".join(
        f"{named[s]} {mean_accuracy(s):.1f} per cent at {floats(s):.1f} floats" for s in held
    )
    tall = height({_family(s, settings) for s in settings})
    panels = [
        panel(
            f"frontier-{preset}",
            f"Average accuracy against floats per parameter, {_title(preset)}: {said}",
            partial(_memory, settings=settings, named=named, title=_title(preset)),
            height=tall,
        ),
        panel(
            f"frontier-time-{preset}",
            f"Average accuracy against the time of a run, {_title(preset)}",
            partial(
                _time,
                settings=settings,
                times=times_plain(study, preset, settings),
                title=_title(preset),
            ),
            height=tall,
        ),
    ]
    return Figure(
        f"frontier-{preset}",
        f"Accuracy against memory and time: {preset}",
        panels,
        "Mean over seeds with one standard deviation. Left: 32-bit numbers per parameter beside the "
        "anchor, on a logarithmic scale; dashed: nothing is held (far below the others it is in the "
        "legend alone); dotted: all tasks at once. Right: "
        "processor time of training and consolidation, beside that of a plain run, in which nothing is held; "
        "runs from machines of different speed are made alike by the time their tests took.",
    )


def _memory(
    canvas: "Canvas", settings: Sequence[Setting], named: Mapping[Setting, str], title: str
) -> None:
    axes = canvas.subplots()
    _draw(axes, settings, [floats(s) for s in settings])
    for setting in settings:
        if setting.approximation is None:
            mean = mean_accuracy(setting)
            label = f"{named[setting]} {mean:.1f}"
            width = 0.8 + 0.8 * _lengths(settings).index(epochs(setting))
            axes.axhline(mean, color=colour(None), ls=line(setting), lw=width, label=label)
    focus(axes, (mean_accuracy(s) for s in settings if s.approximation is not None))
    axes.set_xscale("log")
    least = min((floats(s) for s in settings if floats(s) > 0), default=1.0)
    ticks = [tick for tick in _TICKS if tick >= least / 2]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("floats per parameter")
    axes.set_ylabel("average accuracy, %")
    axes.set_title(title)
    tidy(axes)
    legend(canvas)


def _time(
    canvas: "Canvas", settings: Sequence[Setting], times: Sequence[float | None], title: str
) -> None:
    axes = canvas.subplots()
    known = [(s, x) for s, x in zip(settings, times, strict=True) if x is not None]
    _draw(axes, [s for s, _ in known], [x for _, x in known])
    axes.set_xlabel("time of training and consolidation, × that of a plain run")
    axes.set_ylabel("average accuracy, %")
    axes.set_title(title)
    tidy(axes)
    legend(canvas)


def _lengths(settings: Sequence[Setting]) -> list[int]:
    """Epochs a task, ascending."""
    return sorted({epochs(s) for s in settings})


def _family(setting: Setting, settings: Sequence[Setting]) -> str:
    """Members that differ in their budget alone are joined by a line."""
    if setting.approximation is None:
        return setting.label
    variant = list(setting.variant)
    variant += [setting.storage] if setting.storage != "float32" else []
    variant += [f"from {setting.limit:,} examples"] if setting.limit is not None else []
    if len(_lengths(settings)) > 1:
        variant.append(f"{epochs(setting)} epoch{'s' * (epochs(setting) > 1)}")
    return ", ".join([words(setting.approximation), *variant])


def _draw(axes: "Axes", settings: Sequence[Setting], places: Sequence[float]) -> None:
    """A point with its spread per method, joined within a family in the order of their budgets."""
    families: dict[str, list[tuple[float, Setting]]] = {}
    for setting, place in zip(settings, places, strict=True):
        if setting.approximation is not None:
            families.setdefault(_family(setting, settings), []).append((place, setting))
    used: dict[str, int] = {}
    for name, members in families.items():
        first = members[0][1]
        values = [summary(list(finals(s).values())) for _, s in members]
        known = [(x, v) for (x, _), v in zip(members, values, strict=True) if v is not None]
        shade, length = colour(first.approximation), _lengths(settings).index(epochs(first))
        axes.errorbar(
            [x for x, _ in known],
            [v.mean for _, v in known],
            yerr=[v.std if v.count > 1 else 0 for _, v in known],
            color=shade,
            label=name,
            marker=_MARKERS[used.setdefault(shade, 0) % len(_MARKERS)],
            ls=_LINES[length % len(_LINES)],
            mfc="none" if length else shade,  # hollow: learnt for longer
            ms=4,
            capsize=2,
            lw=1.2,
        )
        used[shade] += 1
