"""Figures that tell tasks apart: each task's accuracy at the end, and over the epochs."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from holdfast.report.blocks import Cell, Column, Figure, Table
from holdfast.report.figures import COLOURS, colour, focus, height, legend, line, panel, tidy
from holdfast.report.loading import Study
from holdfast.report.naming import names
from holdfast.report.settings import Setting, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

__all__ = ["at_the_end", "mean_and_spread", "over_epochs", "scale"]

SOFT = COLOURS["soft"][0]


def scale(study: Study) -> Table | None:
    """How large every preset was run: what stands beside its numbers; None where nothing is reported."""
    rows = []
    for preset in study.presets:
        sizes: dict[tuple[int, float, int, str, int], set[int]] = {}
        for setting in study.reported(preset):
            training, stream = (
                setting.experiment["training"],
                setting.runs[0].result.experiment.stream,
            )
            key = (
                setting.runs[0].result.tasks,
                training["lr"],
                training["epochs"],
                stream.learnt,
                training["batch_size"],
            )
            sizes.setdefault(key, set()).add(len(setting.seeds))
        for (tasks, lr, epochs, images, batch), seeds in sorted(sizes.items()):
            rows.append(
                [
                    Cell(f"`{preset}`", preset),
                    Cell(str(tasks), tasks),
                    Cell(str(epochs), epochs),
                    Cell(images, images),
                    Cell(str(batch), batch),
                    Cell(f"{lr:g}", lr),
                    Cell("–".join(map(str, sorted({min(seeds), max(seeds)}))), max(seeds)),
                ]
            )
    if not rows:
        return None
    columns = [
        Column("Preset", numeric=False),
        Column("Tasks"),
        Column("Epochs a task"),
        Column("Training examples", help="Of a task; the others of its data set are held out"),
        Column("Batch"),
        Column("Learning rate"),
        Column("Seeds", help="From the method with the fewest to that with the most"),
    ]
    return Table("scale", "The scale of every number below", columns, rows)


def at_the_end(study: Study, preset: str) -> Figure | None:
    """The accuracy of each task after the last one was learnt."""
    settings = study.shown(preset)
    if not settings:
        return None
    panels = []
    for importance in dict.fromkeys(s.importance for s in settings):
        members = [s for s in settings if s.importance == importance] + study.baselines(preset)
        ends = {s: _final(s) for s in members}
        said = "; ".join(
            f"{s.label} {ends[s][:, 0].mean():.1f} on the first and {ends[s][:, -1].mean():.1f} "
            "per cent on the last"
            for s in members
        )
        title = f"{words(importance)}, {preset}"
        panels.append(
            panel(
                f"tasks-{preset}-{importance}",
                f"Accuracy on each task at the end, {title}: {said}",
                partial(_tasks, ends=ends, title=title),
                height=height(names(members).values()),
            )
        )
    return Figure(
        f"tasks-{preset}",
        f"Each task after the last one: {preset}",
        panels,
        "Test accuracy of each task when all are learnt; mean over seeds, shaded: one standard "
        "deviation. On the left what is forgotten, on the right what could not be learnt. What holds nothing "
        "may leave the picture below.",
    )


def _final(setting: Setting) -> NDArray[np.float64]:
    """Seeds × tasks: the accuracy at the end, in per cent."""
    return 100 * np.array([run.result.test[-1] for run in setting.runs])


def _tasks(canvas: "Canvas", ends: dict[Setting, NDArray[np.float64]], title: str) -> None:
    axes = canvas.subplots()
    named = names(ends)
    for setting, values in ends.items():
        x = np.arange(1, values.shape[1] + 1)
        mean_and_spread(
            axes,
            x,
            values,
            colour(setting.approximation, setting.rank),
            f"{named[setting]} {values.mean():.1f}",
            line(setting),
            "o",
        )
    focus(axes, np.ravel([v.mean(axis=0) for s, v in ends.items() if s.approximation is not None]))
    axes.set_xlabel("task")
    axes.set_ylabel("accuracy at the end, %")
    axes.set_xticks(x)
    axes.set_title(title)
    tidy(axes)
    legend(canvas)


def mean_and_spread(
    axes: "Axes",
    x: NDArray[np.int_] | NDArray[np.float64],
    values: NDArray[np.float64],
    shade: str,
    label: str,
    style: str = "-",
    marker: str = "",
) -> None:
    """A line through the means of the columns, with a band of one standard deviation."""
    mean = values.mean(axis=0)
    axes.plot(x, mean, style, marker=marker, ms=3.5, color=shade, label=label)
    if len(values) > 1:
        std = values.std(axis=0, ddof=1)
        low, high = mean - std, np.minimum(mean + std, 100)
        axes.fill_between(x, low, high, color=shade, alpha=0.09, lw=0)


def over_epochs(study: Study, preset: str) -> Figure | None:
    """The accuracy of the first and of the last task after every epoch since it was begun."""
    settings = study.shown(preset)
    if not settings:
        return None
    panels = []
    for importance in dict.fromkeys(s.importance for s in settings):
        members = [s for s in settings if s.importance == importance] + study.baselines(preset)
        for task in (0, settings[0].runs[0].result.tasks - 1):
            members = [s for s in members if s.runs[0].result.tasks > task]
            title = f"{words(importance)}, {preset}: task {task + 1}"
            panels.append(
                panel(
                    f"task-{task + 1}-{preset}-{importance}",
                    f"Accuracy on task {task + 1} after every epoch, {words(importance)}, {preset}",
                    partial(_one_task, settings=members, task=task, title=title),
                    height=height(names(members).values()),
                )
            )
    return Figure(
        f"task-curves-{preset}",
        f"The first and the last task after every epoch: {preset}",
        panels,
        "Test accuracy of one task since it was begun; mean over seeds, shaded: one standard "
        "deviation. Vertical: a new task begins.",
    )


def _one_task(canvas: "Canvas", settings: Sequence[Setting], task: int, title: str) -> None:
    axes = canvas.subplots()
    named = names(settings)
    for setting in settings:
        runs = [run.result.accuracy for run in setting.runs]
        values = 100 * np.array(
            [[seen[task] for epochs in run[task:] for seen in epochs] for run in runs]
        )
        before = sum(len(epochs) for epochs in runs[0][:task])
        x = before + np.arange(1, values.shape[1] + 1)
        shade = colour(setting.approximation, setting.rank)
        label = f"{named[setting]} {values[:, -1].mean():.1f}"
        mean_and_spread(axes, x, values, shade, label, line(setting))
    ends = np.cumsum([len(epochs) for epochs in runs[0]])
    for end in ends[task:-1]:
        axes.axvline(end + 0.5, color=SOFT, lw=0.8, ls=":", zorder=1)
    axes.set_xlabel("epoch")
    axes.set_ylabel(f"accuracy on task {task + 1}, %")
    axes.set_title(title)
    tidy(axes)
    legend(canvas)
