"""The figures every study has: accuracies, differences, curves over epochs, sensitivity to λ."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from holdfast import metrics
from holdfast.report.blocks import Figure, Panel
from holdfast.report.comparison import printed, strength_text
from holdfast.report.figures import COLOURS, colour, panel, power, tidy
from holdfast.report.loading import Study
from holdfast.report.measures import difference, finals, summary
from holdfast.report.pairs import PAIRS
from holdfast.report.selection import Selection, cell
from holdfast.report.settings import Setting, words

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

__all__ = ["accuracies", "curves", "differences", "sensitivity"]

INK, SOFT, RULE = (COLOURS[name][0] for name in ("ink", "soft", "rule"))
_MARKS = {
    "paper": ("o", COLOURS["count_sketch"][0]),
    "original-code": ("s", COLOURS["diagonal"][0]),
}
_POINTS = 150  # of a curve: more cannot be seen, and every one is text in the page


def _importances(settings: Sequence[Setting]) -> list[str]:
    return list(dict.fromkeys(str(s.importance) for s in settings if s.importance is not None))


def accuracies(study: Study, preset: str) -> Figure | None:
    """Every seed, the mean with its 95 % interval, and the paper's number, per method."""
    settings = [s for s in study.primaries if s.preset == preset]
    if not settings:
        return None
    baselines = [s for s in study.reported(preset) if s.importance is None]
    panels = []
    for importance in _importances(settings):
        members = [s for s in settings if s.importance == importance] + baselines
        title = f"{words(importance)}, {preset}"
        panels.append(
            panel(
                f"accuracy-{preset}-{importance}",
                f"Average accuracy of {words(importance)} by approximation, preset {preset}: "
                + "; ".join(_spoken(study, s) for s in members),
                partial(_dots, study=study, settings=members, title=title),
                height=0.9 + 0.36 * len(members),
            )
        )
    return Figure(
        f"accuracy-{preset}",
        f"Average accuracy after the last task: {preset}",
        panels,
        "Pale dots: seeds. Dot and bar: mean and its 95 % interval. Diamond: the paper's mean.",
    )


def _spoken(study: Study, setting: Setting) -> str:
    values = summary(list(finals(setting).values()))
    paper = printed(study, setting)
    return f"{setting.label} {values.mean if values else float('nan'):.1f} per cent" + (
        f" (paper {paper.value})" if paper else ""
    )


def _dots(canvas: "Canvas", study: Study, settings: Sequence[Setting], title: str) -> None:
    axes = canvas.subplots()
    for place, setting in enumerate(settings):
        values = list(finals(setting).values())
        shade, mean = colour(setting.approximation, setting.rank), summary(values)
        assert mean is not None
        axes.plot(values, [place] * len(values), "o", color=shade, ms=4, mew=0, alpha=0.28)
        if mean.count > 1:
            axes.plot([mean.low, mean.high], [place, place], color=shade, lw=2.4)
        axes.plot([mean.mean], [place], "o", color=shade, ms=7)
        paper = printed(study, setting)
        if paper:
            axes.plot([paper.value], [place], "D", ms=6, mfc="none", mec=INK, mew=1.2)
    axes.set_yticks(range(len(settings)), [s.label for s in settings])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_ylim(len(settings) - 0.5, -0.5)
    seen = [line.get_xdata(orig=True) for line in axes.lines if line.get_linestyle() == "None"]
    # Intervals of few seeds reach beyond what an accuracy can be: show where the values are.
    axes.set_xlim(min(np.min(x) for x in seen) - 3, min(max(np.max(x) for x in seen) + 3, 101))
    axes.set_xlabel("average accuracy, %")
    axes.set_title(title)
    axes.spines["left"].set_visible(False)
    tidy(axes, grid="x")


def differences(study: Study) -> Figure | None:
    """Forest plot: paired differences with 95 % intervals, all presets side by side."""
    panels = []
    for importance in _importances(study.primaries):
        found = []
        for one, two in PAIRS[:5]:
            row = []
            for preset in study.presets:
                a = study.find(preset, importance, *one)
                b = study.find(preset, importance, *two)
                values = difference(finals(a), finals(b)) if a and b else None
                if values is not None and a and b:
                    row.append((preset, f"{_short(a)} − {_short(b)}", values))
            if row:
                found.append(row)
        if found:
            panels.append(
                panel(
                    f"differences-{importance}",
                    f"Paired differences of {words(importance)} variants: "
                    + "; ".join(
                        f"{name}, {preset}: {values.mean:+.1f} points"
                        for row in found
                        for preset, name, values in row
                    ),
                    partial(_forest, rows=found, title=words(importance)),
                    height=1.3 + 0.5 * len(found),
                )
            )
    if not panels:
        return None
    return Figure(
        "differences",
        "Differences on the same seeds",
        panels,
        "Mean of the paired differences and its 95 % interval. Right of the line the first method "
        "is better.",
    )


def _short(setting: Setting) -> str:
    return setting.label.split(" (")[0]


def _forest(
    canvas: "Canvas", rows: Sequence[Sequence[tuple[str, str, metrics.Summary]]], title: str
) -> None:
    from matplotlib.lines import Line2D

    axes = canvas.subplots()
    axes.axvline(0, color=SOFT, lw=1)
    seen: dict[str, Line2D] = {}
    for place, row in enumerate(rows):
        for offset, (preset, _, values) in enumerate(row):
            mark, shade = _MARKS.get(preset, ("D", COLOURS["low_rank"][0]))
            y = place + 0.24 * (offset - (len(row) - 1) / 2)
            if values.count > 1:
                axes.plot([values.low, values.high], [y, y], color=shade, lw=1.8)
            (seen[preset],) = axes.plot([values.mean], [y], mark, color=shade, ms=5.5)
    axes.set_yticks(range(len(rows)), [row[0][1] for row in rows])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("difference of the average accuracy, points")
    axes.set_title(title)
    axes.spines["left"].set_visible(False)
    tidy(axes, grid="x")
    canvas.legend(seen.values(), seen.keys(), loc="outside lower center", ncols=len(seen))


def curves(study: Study, preset: str) -> Figure | None:
    """Average accuracy on the tasks seen so far after every epoch, mean and spread."""
    settings = [s for s in study.primaries if s.preset == preset]
    if not settings:
        return None
    plain = [s for s in study.reported(preset) if s.importance is None and s.mode != "joint"]
    panels = []
    for importance in _importances(settings):
        members = [s for s in settings if s.importance == importance] + plain
        panels.append(
            panel(
                f"curves-{preset}-{importance}",
                f"Average accuracy on the tasks seen so far over the epochs, {words(importance)}, "
                f"preset {preset}; at the end: " + "; ".join(_spoken(study, s) for s in members),
                partial(_curves, settings=members, title=f"{words(importance)}, {preset}"),
                height=4.0,
            )
        )
    return Figure(
        f"curves-{preset}",
        f"Average accuracy after every epoch: {preset}",
        panels,
        "Mean over seeds of the average accuracy on the tasks seen so far; shaded: one standard "
        "deviation. Dotted: a new task begins. In the legend: the average accuracy at the end.",
    )


def _curves(canvas: "Canvas", settings: Sequence[Setting], title: str) -> None:
    axes = canvas.subplots()
    for setting in settings:
        ends = np.cumsum([len(epochs) for epochs in setting.runs[0].result.accuracy])
        x = _shown(ends)
        values = np.array([_curve(run.result.accuracy, x) for run in setting.runs])
        mean = values.mean(axis=0)
        shade = colour(setting.approximation, setting.rank)
        strong = setting.approximation == "count_sketch"
        line = "--" if setting.importance is None else "-"
        name = f"{_short(setting)} {mean[-1]:.1f}"
        width = 2.2 if strong else 1.3
        axes.plot(x, mean, line, color=shade, lw=width, label=name, zorder=3 + strong)
        if len(values) > 1:
            std = values.std(axis=0, ddof=1)
            low, high = mean - std, np.minimum(mean + std, 100)
            axes.fill_between(x, low, high, color=shade, alpha=0.09, lw=0)
    for end in ends[:-1]:
        axes.axvline(end + 0.5, color=SOFT, lw=0.8, ls=":", zorder=1)
    axes.set_xlim(1, x[-1])
    axes.set_ylim(top=101)
    axes.set_xlabel("epoch")
    axes.set_ylabel("average accuracy, %")
    axes.set_title(title)
    tidy(axes)
    canvas.legend(loc="outside lower center", ncols=3, columnspacing=1.2, handlelength=1.4)


def _shown(ends: NDArray[np.int_]) -> NDArray[np.int_]:
    """The epochs (from 1) that a curve is drawn at; the last and the first of every task are."""
    spaced = np.linspace(1, ends[-1], _POINTS).astype(int)
    return np.unique(np.concatenate([spaced, ends, ends[:-1] + 1]))


def _curve(accuracy: Sequence[Sequence[Sequence[float]]], epochs: NDArray[np.int_]) -> list[float]:
    """Average accuracy on the tasks seen so far at some epochs, in per cent."""
    seen = [values for task in accuracy for values in task]
    chosen = [[seen[epoch - 1] for epoch in epochs]]
    return [100 * value for value in metrics.accuracy_curve(chosen)]


def sensitivity(study: Study) -> Figure | None:
    """Validation accuracy over the grid of strengths, with the chosen ones marked."""
    tuned = [study.selections[cell(s)] for s in study.primaries if cell(s) in study.selections]
    panels: list[Panel] = []
    for importance in _importances([s.setting for s in tuned]):
        members = sorted(
            (s for s in tuned if s.setting.importance == importance), key=lambda s: s.setting.order
        )

        said = "; ".join(f"{s.setting.label} chooses {strength_text(s.chosen)}" for s in members)
        panels.append(
            panel(
                f"sensitivity-{importance}",
                f"Validation accuracy over the strength for {words(importance)}: {said}",
                partial(_grid, members=members, title=words(importance)),
                height=4.0,
            )
        )
    if not panels:
        return None
    return Figure(
        "sensitivity",
        "Sensitivity to the strength",
        panels,
        "Mean final validation accuracy over all tasks, on the tuning seeds. Ringed: the choice.",
    )


def _grid(canvas: "Canvas", members: Sequence[Selection], title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes = canvas.subplots()
    for selection in members:
        setting = selection.setting
        shade = colour(setting.approximation, setting.rank)
        x = np.log10([strength for strength, _ in selection.grid])
        y = [values.mean for _, values in selection.grid]
        axes.plot(x, y, "-", marker=".", color=shade, label=setting.label)
        best = [strength for strength, _ in selection.grid].index(selection.chosen)
        axes.plot(x[best], y[best], "o", ms=9, mfc="none", mec=shade, mew=1.8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(lambda value, _: power(value))
    axes.set_xlabel("strength λ")
    axes.set_ylabel("validation accuracy, %")
    axes.set_title(title)
    tidy(axes, grid="both")
    canvas.legend(loc="outside lower center", ncols=3)
