"""The figures every study has: accuracies, differences, curves over epochs."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from holdfast import metrics
from holdfast.report.blocks import Figure
from holdfast.report.comparison import printed
from holdfast.report.figures import (
    COLOURS,
    colour,
    focus,
    height,
    legend,
    line,
    panel,
    tidy,
    wrapped,
)
from holdfast.report.loading import Study
from holdfast.report.measures import difference, finals, summary
from holdfast.report.naming import names
from holdfast.report.pairs import PAIRS
from holdfast.report.settings import Setting, words

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

__all__ = ["accuracies", "curves", "differences"]

Row = list[tuple[str, str, metrics.Summary]]  # preset, name of the pair, its differences
INK, SOFT, RULE = (COLOURS[name][0] for name in ("ink", "soft", "rule"))
_MARKS = {
    "paper": ("o", COLOURS["count_sketch"][0]),
    "original-code": ("s", COLOURS["diagonal"][0]),
    "fair": ("D", COLOURS["low_rank"][0]),
    "sketch-size": ("^", COLOURS["block_diagonal"][0]),
    "twenty-tasks": ("v", COLOURS["kronecker"][0]),
}
_STEP = 0.15  # inches between the presets of a row
_POINTS = 150  # of a curve: more cannot be seen, and every one is text in the page


def _importances(settings: Sequence[Setting]) -> list[str]:
    return list(dict.fromkeys(str(s.importance) for s in settings if s.importance is not None))


def accuracies(study: Study, preset: str) -> Figure | None:
    """Every seed, the mean with its 95 % interval, and the paper's number, per method."""
    settings = study.shown(preset)
    if not settings:
        return None
    panels = []
    for importance in _importances(settings):
        members = [s for s in settings if s.importance == importance] + study.baselines(preset)
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
    named = names(settings)
    axes.set_yticks(range(len(settings)), [wrapped(named[s]) for s in settings])
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
        found = [row for row in _compared(study, importance) if row]
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
                    height=1.5 + len(found) * _row_height(found),
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


def _compared(study: Study, importance: str) -> Iterator[Row]:
    """A row per pair, with every preset that both were run in."""
    for one, two in PAIRS:
        row = []
        for preset in study.presets:
            a = study.find(preset, importance, *one)
            row += _difference(preset, a, study.find(preset, importance, *two))
        yield row
    for other in study.companions:
        if other.importance == importance:
            sketch = study.find(other.preset, importance, "count_sketch")
            yield _difference(other.preset, sketch, other)


def _difference(preset: str, a: Setting | None, b: Setting | None) -> Row:
    values = difference(finals(a), finals(b)) if a and b else None
    if a is None or b is None or values is None:
        return []
    return [(preset, f"{_short(a)} − {_short(b)}", values)]


def _row_height(rows: Sequence[Sequence[object]]) -> float:
    """Inches of a row of the forest plot: room for all of its presets."""
    return max(0.5, _STEP * (0.8 + max(map(len, rows))))


def _short(setting: Setting) -> str:
    return setting.label.split(" (")[0]


def _forest(canvas: "Canvas", rows: Sequence[Row], title: str) -> None:
    from matplotlib.lines import Line2D

    axes = canvas.subplots()
    axes.axvline(0, color=SOFT, lw=1)
    seen: dict[str, Line2D] = {}
    step = _row_height(rows)
    for place, row in enumerate(rows):
        for offset, (preset, _, values) in enumerate(row):
            mark, shade = _MARKS.get(preset, ("P", COLOURS["full"][0]))
            y = place + _STEP / step * (offset - (len(row) - 1) / 2)
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
    canvas.legend(seen.values(), seen.keys(), loc="outside lower center", ncols=3)


def curves(study: Study, preset: str) -> Figure | None:
    """Average accuracy on the tasks seen so far after every epoch, mean and spread."""
    settings = study.shown(preset)
    if not settings:
        return None
    panels = []
    for importance in _importances(settings):
        members = [s for s in settings if s.importance == importance] + study.baselines(preset)
        panels.append(
            panel(
                f"curves-{preset}-{importance}",
                f"Average accuracy on the tasks seen so far over the epochs, {words(importance)}, "
                f"preset {preset}; at the end: " + "; ".join(_spoken(study, s) for s in members),
                partial(_curves, settings=members, title=f"{words(importance)}, {preset}"),
                height=height(names(members).values()),
            )
        )
    return Figure(
        f"curves-{preset}",
        f"Average accuracy after every epoch: {preset}",
        panels,
        "Mean over seeds of the average accuracy on the tasks seen so far; shaded: one standard "
        "deviation. Vertical: a new task begins. In the legend: the average accuracy at the end, also of "
        "what holds nothing and leaves the picture below.",
    )


def _curves(canvas: "Canvas", settings: Sequence[Setting], title: str) -> None:
    axes = canvas.subplots()
    named = names(settings)
    held: list[float] = []
    for setting in settings:
        ends = np.cumsum([len(epochs) for epochs in setting.runs[0].result.accuracy])
        x = _shown(ends)
        values = np.array([_curve(run.result.accuracy, x) for run in setting.runs])
        mean = values.mean(axis=0)
        held += mean.tolist() if setting.approximation is not None else []
        shade = colour(setting.approximation, setting.rank)
        strong = setting.approximation == "count_sketch"
        name = f"{named[setting]} {mean[-1]:.1f}"
        width = 2.2 if strong else 1.3
        axes.plot(x, mean, line(setting), color=shade, lw=width, label=name, zorder=3 + strong)
        if len(values) > 1:
            std = values.std(axis=0, ddof=1)
            low, high = mean - std, np.minimum(mean + std, 100)
            axes.fill_between(x, low, high, color=shade, alpha=0.09, lw=0)
    for end in ends[:-1]:
        axes.axvline(end + 0.5, color=SOFT, lw=0.8, ls=":", zorder=1)
    axes.set_xlim(left=1)
    axes.set_ylim(top=101)
    focus(axes, held)
    axes.set_xlabel("epoch")
    axes.set_ylabel("average accuracy, %")
    axes.set_title(title)
    tidy(axes)
    legend(canvas)


def _shown(ends: NDArray[np.int_]) -> NDArray[np.int_]:
    """The epochs (from 1) that a curve is drawn at; the last and the first of every task are."""
    spaced = np.linspace(1, ends[-1], _POINTS).astype(int)
    return np.unique(np.concatenate([spaced, ends, ends[:-1] + 1]))


def _curve(accuracy: Sequence[Sequence[Sequence[float]]], epochs: NDArray[np.int_]) -> list[float]:
    """Average accuracy on the tasks seen so far at some epochs, in per cent."""
    seen = [values for task in accuracy for values in task]
    chosen = [[seen[epoch - 1] for epoch in epochs]]
    return [100 * value for value in metrics.accuracy_curve(chosen)]
