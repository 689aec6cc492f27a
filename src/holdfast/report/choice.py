"""How strengths were chosen: every search of every preset, as a curve and as a row."""

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from holdfast.recipes import RECIPES
from holdfast.report.blocks import Block, Cell, Column, Figure, Missing, Section, Table, number
from holdfast.report.comparison import count, method, statistics, strength_text
from holdfast.report.figures import COLOURS, colour, height, legend, panel, power, tidy
from holdfast.report.loading import Study
from holdfast.report.measures import finals, summary
from holdfast.report.naming import names
from holdfast.report.selection import Selection, cell
from holdfast.report.settings import Setting, words

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

__all__ = ["choice", "sensitivity", "step"]

_LINES = ("-", "--", ":", "-.")  # of curves that share a colour
_MARKERS = (".", "s", "^", "D")
_CURVES = 14  # of one panel
_NEAR = 5  # points between the lowest curve and what is still worth showing below


def choice(study: Study) -> Section:
    """The strengths of every preset that searched for them, and the curves they were chosen from."""
    title, blocks = "Choosing the strength", list[Block]()
    for preset in study.presets:
        if searches := _searches(study, preset):
            blocks += [sensitivity(study, preset), _table(study, preset, searches)]
    return Section("choice", title, blocks or [_missing(study)])


def _missing(study: Study) -> Missing:
    known = RECIPES[study.recipe].presets if study.recipe in RECIPES else {"fair": ""}
    preset = "fair" if "fair" in known else next(iter(known))
    command = f"{study.command()} --preset {preset} --seeds {study.enough}"
    return Missing("No strength was tuned here.", command)


def _searches(study: Study, preset: str) -> list[Selection]:
    """All searches of a preset: of every history, anchor, size and scale, whatever was reported."""
    found = [s for s in study.selections.values() if s.setting.preset == preset]
    return sorted(found, key=lambda selection: selection.setting.order)


def _names(searches: Sequence[Selection]) -> dict[Setting, str]:
    """A search is of all strengths, so no strength is part of its name."""
    return {s: name.split(", λ")[0] for s, name in names(s.setting for s in searches).items()}


def step(selection: Selection) -> str:
    """The factor from one strength to the next, read from the grid."""
    powers = [math.log10(strength) for strength, _ in selection.grid if strength > 0]
    steps = {round(2 * (b - a)) for a, b in itertools.pairwise(powers)}
    if len(steps) != 1:
        return "various factors" if steps else ""
    halves = steps.pop()
    if halves == 1:
        return "factors of √10"
    return f"factors of {strength_text(10 ** (halves / 2))}"


def _table(study: Study, preset: str, searches: Sequence[Selection]) -> Table:
    reported = {cell(s): s for s in study.reported(preset) if _chosen(study, s)}
    named, rows = _names(searches), []
    for selection in searches:
        best = dict(selection.grid)[selection.chosen]
        grid = [strength for strength, _ in selection.grid]
        setting = reported.get(cell(selection.setting))
        span = f"{strength_text(grid[0])} to {strength_text(grid[-1])}"
        rows.append(
            [
                method(selection.setting, named[selection.setting]),
                Cell(strength_text(selection.chosen), selection.chosen),
                number(best.mean),
                Cell(span, grid[0], step(selection)),
                count(len(grid)),
                _optimum(selection),
                count(best.count),
                statistics(summary(list(finals(setting).values())) if setting else None),
                count(len(setting.runs) if setting else 0),
            ]
        )
    return Table(
        f"choice-{preset}",
        f"Strengths tried on validation data: `{preset}`",
        [
            Column("Method", numeric=False),
            Column("Best λ", help="Chosen, where it lies inside the grid"),
            Column("Validation", help="Mean final validation accuracy at the best strength, %"),
            Column("Grid", help="Strengths that were tried, and the factor between them"),
            Column("Strengths"),
            Column(
                "Optimum", numeric=False, help="Whether the best strength lies inside the grid"
            ),
            Column("Tuning seeds", help="They are not the reporting seeds"),
            Column(
                "Test accuracy",
                help="With that λ, on the reporting seeds: mean ± standard deviation, %",
            ),
            Column("Seeds"),
        ],
        rows,
        "The choice looks at the validation data of all tasks, which a learner of a real stream "
        "would not have: it shows the best each method can do, by the same rule for all.",
        study.one_by_one(preset) if study.tried_aside(preset) else study.command(preset),
    )


def _optimum(selection: Selection) -> Cell:
    if selection.useless:
        return Cell("worse than holding nothing", "2", tone="bad")
    if selection.inside:
        return Cell("inside", "0", tone="good")
    if len(selection.grid) == 1:
        return Cell("one strength so far", "1", tone="open")
    return Cell("at the end of the grid so far", "1", tone="open")


def _said(selection: Selection) -> str:
    end = "" if selection.inside else " so far"
    return f"is best at {strength_text(selection.chosen)}{end}"


def _chosen(study: Study, setting: Setting) -> bool:
    selection = study.selections.get(cell(setting))
    return selection is not None and selection.chosen == setting.strength


def sensitivity(study: Study, preset: str) -> Figure:
    """Validation accuracy over the grid of strengths, with the chosen ones marked."""
    searches = _searches(study, preset)
    panels = []
    for importance in dict.fromkeys(s.setting.importance for s in searches):
        every = [s for s in searches if s.setting.importance == importance]
        named, groups = _names(every), _panels(every)
        for place, members in enumerate(groups, start=1):
            part = f", {place} of {len(groups)}" if len(groups) > 1 else ""
            title = f"{words(importance)}, {preset}{part}"
            chosen = [f"{named[s.setting]} {_said(s)}" for s in members]
            panels.append(
                panel(
                    f"sensitivity-{preset}-{importance}" + f"-{place}" * bool(part),
                    f"Validation accuracy over the strength for {title}: {'; '.join(chosen)}",
                    partial(_grid, members=members, named=named, title=title),
                    height=height(named[s.setting] for s in members),
                )
            )
    return Figure(
        f"sensitivity-{preset}",
        f"Sensitivity to the strength: {preset}",
        panels,
        "Mean final validation accuracy over all tasks, on the tuning seeds. Ringed: the choice, where the "
        "search has come to its end.",
    )


def _panels(searches: Sequence[Selection]) -> list[list[Selection]]:
    """Curves for one panel each: whole families, as many as can be told apart."""
    families: dict[str | None, list[Selection]] = {}
    for selection in searches:
        families.setdefault(selection.setting.approximation, []).append(selection)
    found: list[list[Selection]] = []
    for family in families.values():
        if found and len(found[-1]) + len(family) <= _CURVES:
            found[-1] += family
        else:
            found.append(list(family))
    return found


def _grid(
    canvas: "Canvas", members: Sequence[Selection], named: dict[Setting, str], title: str
) -> None:
    from matplotlib.ticker import MaxNLocator

    axes = canvas.subplots()
    used: dict[str, int] = {}
    for selection in members:
        setting = selection.setting
        shade = colour(setting.approximation, setting.rank)
        place = used.setdefault(shade, 0) % len(_LINES)
        used[shade] += 1
        x = np.log10([strength for strength, _ in selection.grid])
        y = [values.mean for _, values in selection.grid]
        axes.plot(
            x, y, _LINES[place], marker=_MARKERS[place], ms=3, color=shade, label=named[setting]
        )
        if not selection.inside or selection.useless:
            continue
        best = [strength for strength, _ in selection.grid].index(selection.chosen)
        axes.plot(x[best], y[best], "o", ms=9, mfc="none", mec=shade, mew=1.4)
    lowest = min(values.mean for s in members for _, values in s.grid)
    for floor in {s.floor for s in members if s.floor is not None and s.floor > lowest - _NEAR}:
        axes.axhline(floor, color=COLOURS["soft"][0], ls=":", label=f"Nothing held {floor:.1f}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(lambda value, _: power(value))
    axes.set_xlabel("strength λ")
    axes.set_ylabel("validation accuracy, %")
    axes.set_title(title)
    tidy(axes, grid="both")
    legend(canvas)
