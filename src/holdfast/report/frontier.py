"""The report of the frontier: accuracy against memory and against time."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from holdfast.report import sections, tasks
from holdfast.report.blocks import Column, Figure, Missing, Section, Table, number
from holdfast.report.comparison import count, method, statistics, strength
from holdfast.report.figures import colour, panel, tidy
from holdfast.report.loading import Study
from holdfast.report.measures import finals, median_seconds, summary
from holdfast.report.settings import Setting, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

__all__ = ["floats", "frontier_sections", "plain_seconds"]

TITLES = {
    "ten-tasks": "Ten permutations of MNIST",
    "twenty-tasks": "Twenty permutations of MNIST",
    "fifty-tasks": "Fifty permutations of MNIST",
    "toy": "Five tasks in the plane",
}


def floats(setting: Setting) -> float:
    """Floats per parameter of the matrix alone: without the anchor, which every method has."""
    if setting.approximation is None:
        return 0.0
    return max(run.result.floats_per_parameter for run in setting.runs) - 1


def plain_seconds(study: Study, preset: str) -> float | None:
    """Seconds of a run in which nothing is held."""
    for setting in study.reported(preset):
        if setting.approximation is None and setting.mode == "sequential":
            return median_seconds(setting, "total")
    return None


def frontier_sections(study: Study) -> list[Section]:
    """All sections, in order."""
    found = [_preset(study, preset) for preset in TITLES if preset in study.presets]
    missing = [
        Missing(f"The preset `{preset}` was not run.", f"{study.command()} --preset {preset}")
        for preset in TITLES
        if preset not in study.presets
    ]
    summary = [tasks.scale(study), sections.runs(study)[0], *missing]
    return [
        Section("summary", "Summary", summary),
        *found,
        sections.choice(study),
        sections.reading(),
    ]


def _preset(study: Study, preset: str) -> Section:
    settings = sorted(study.reported(preset), key=lambda s: (floats(s), s.order))
    return Section(
        f"frontier-{preset}",
        TITLES[preset],
        [_figure(study, preset, settings), _table(study, preset, settings)],
    )


def _table(study: Study, preset: str, settings: Sequence[Setting]) -> Table:
    plain = plain_seconds(study, preset)
    rows = []
    for setting in settings:
        total = median_seconds(setting, "total")
        rows.append(
            [
                method(setting),
                number(floats(setting), 1),
                statistics(summary(list(finals(setting).values()))),
                count(len(setting.runs)),
                strength(setting),
                number(total, 0),
                number(total / plain if plain else None, 2),
                number(median_seconds(setting, "consolidation"), 0),
            ]
        )
    return Table(
        f"frontier-{preset}",
        f"Average accuracy after the last task, per cent: `{preset}`",
        [
            Column("Method", numeric=False),
            Column("Floats", help="Per parameter, the anchor not counted"),
            Column("Accuracy", help="Mean ± standard deviation over seeds"),
            Column("Seeds"),
            Column("λ", help="Chosen on validation data, with seeds of its own"),
            Column("Seconds", help="Of one run, on a machine that also did other work"),
            Column("× plain", help="Seconds beside those of a run in which nothing is held"),
            Column("Matrix", help="Seconds of consolidation in it"),
        ],
        rows,
        "Same stream, epochs, grid of strengths and seeds for every method.",
        study.command(preset),
    )


def _figure(study: Study, preset: str, settings: Sequence[Setting]) -> Figure:
    held = [s for s in settings if s.approximation is not None]
    said = "; ".join(f"{s.label} {_mean(s):.1f} per cent at {floats(s):.1f} floats" for s in held)
    panels = [
        panel(
            f"frontier-{preset}",
            f"Average accuracy against floats per parameter, {TITLES[preset]}: {said}",
            partial(_memory, settings=settings, title=TITLES[preset]),
            height=4.4,
        ),
        panel(
            f"frontier-seconds-{preset}",
            f"Average accuracy against the seconds of a run, {TITLES[preset]}",
            partial(_seconds, settings=settings, title=TITLES[preset]),
            height=4.4,
        ),
    ]
    return Figure(
        f"frontier-{preset}",
        f"Accuracy against memory and time: {preset}",
        panels,
        "Mean over seeds with one standard deviation. Left: floats per parameter beside the anchor, on "
        "a logarithmic scale; dashed: nothing is held; dotted: all tasks at once. Right: seconds of "
        "a whole run, consolidation included.",
    )


def _mean(setting: Setting) -> float:
    values = list(finals(setting).values())
    return sum(values) / len(values)


def _memory(canvas: "Canvas", settings: Sequence[Setting], title: str) -> None:
    axes = canvas.subplots()
    _draw(axes, settings, [floats(s) for s in settings])
    for setting in settings:
        if setting.approximation is None:
            line = ":" if setting.mode == "joint" else "--"
            mean = _mean(setting)
            axes.axhline(
                mean, color=colour(None), ls=line, lw=1, label=f"{setting.label} {mean:.1f}"
            )
    axes.set_xscale("log")
    ticks = [1, 2, 5, 10, 25, 50]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("floats per parameter")
    axes.set_ylabel("average accuracy, %")
    axes.set_title(title)
    tidy(axes)
    canvas.legend(loc="outside lower center", ncols=2)


def _seconds(canvas: "Canvas", settings: Sequence[Setting], title: str) -> None:
    axes = canvas.subplots()
    _draw(axes, settings, [median_seconds(s, "total") for s in settings])
    axes.set_xlabel("seconds of a run")
    axes.set_ylabel("average accuracy, %")
    axes.set_title(title)
    tidy(axes)
    canvas.legend(loc="outside lower center", ncols=2)


def _family(setting: Setting) -> str:
    """Members that differ in their budget alone are joined by a line."""
    parameters = setting.part("approximation")
    fields = (parameters.get("correction"), parameters.get("merge"))
    variant = [str(field) for field in fields if field in ("eigen", "stack")]
    return ", ".join([words(setting.approximation), *variant])


def _draw(axes: "Axes", settings: Sequence[Setting], places: Sequence[float]) -> None:
    """A point with its spread per method, joined within a family in the order of their budgets."""
    families: dict[str, list[tuple[float, Setting]]] = {}
    for setting, place in zip(settings, places, strict=True):
        if setting.approximation is not None:
            families.setdefault(_family(setting), []).append((place, setting))
    for name, members in families.items():
        values = [summary(list(finals(s).values())) for _, s in members]
        known = [(x, v) for (x, _), v in zip(members, values, strict=True) if v is not None]
        axes.errorbar(
            [x for x, _ in known],
            [v.mean for _, v in known],
            yerr=[v.std if v.count > 1 else 0 for _, v in known],
            color=colour(members[0][1].approximation),
            label=name,
            marker="o" if "," not in name else "s",
            ms=4,
            capsize=2,
            lw=1.2,
        )
