"""The effect of the sketch's size: at one strength for all sizes, and at the best for each."""

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from holdfast.report.blocks import Figure
from holdfast.report.comparison import strength_text
from holdfast.report.figures import COLOURS, colour, panel, tidy
from holdfast.report.loading import Study
from holdfast.report.measures import finals
from holdfast.report.selection import cell
from holdfast.report.settings import Setting, words
from holdfast.report.tasks import mean_and_spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

__all__ = ["sketch_sizes"]

Curves = dict[str, dict[int, Setting]]  # what is done about λ -> size -> setting


def sketch_sizes(study: Study, preset: str) -> Figure | None:
    """Average accuracy over the size, and each task at the end by size; the diagonal dotted."""
    panels = []
    for importance in ("ewc", "mas"):
        members = [s for s in study.reported(preset) if s.importance == importance]
        diagonal = [s for s in members if s.approximation == "diagonal"]
        curves = _curves(study, [s for s in members if s.approximation == "count_sketch"])
        if not curves:
            continue
        said = "; ".join(
            f"{name}: "
            + ", ".join(f"t = {t} {_mean(s):.1f} per cent" for t, s in sorted(sizes.items()))
            for name, sizes in curves.items()
        )
        panels.append(
            panel(
                f"sketch-size-{importance}",
                f"Average accuracy of sketched {words(importance)} by the size of the sketch: {said}",
                partial(_average, curves=curves, diagonal=diagonal, title=words(importance)),
                height=4.0,
            )
        )
        for name, sizes in curves.items():
            panels.append(
                panel(
                    f"sketch-size-tasks-{importance}-{name.split()[0]}",
                    f"Accuracy on each task at the end by the size of the sketch, "
                    f"{words(importance)}, {name}",
                    partial(
                        _by_task,
                        sizes=sizes,
                        diagonal=diagonal,
                        title=f"{words(importance)}, {name}",
                    ),
                    height=4.0,
                )
            )
    if not panels:
        return None
    return Figure(
        "sketch-size",
        "The size of the sketch",
        panels,
        "Mean over seeds, shaded: one standard deviation. Dotted: the diagonal at its best strength.",
    )


def _mean(setting: Setting) -> float:
    return float(np.mean(list(finals(setting).values())))


def _curves(study: Study, sketched: list[Setting]) -> Curves:
    """Settings by size: those of the strength that most sizes share, and those of the chosen one."""
    chosen: dict[int, Setting] = {}
    others: dict[float, dict[int, Setting]] = {}
    for setting in sketched:
        size, strength = int(setting.part("approximation")["size"]), setting.strength or 0.0
        selection = study.selections.get(cell(setting))
        if selection is not None and selection.chosen == strength:
            chosen[size] = setting
        others.setdefault(strength, {})[size] = setting
    curves: Curves = {}
    if others:
        fixed = max(others, key=lambda strength: (len(others[strength]), strength))
        curves[f"fixed λ = {strength_text(fixed)}"] = others[fixed]
    if chosen:
        curves["re-tuned λ"] = chosen
    return curves


def _average(canvas: "Canvas", curves: Curves, diagonal: list[Setting], title: str) -> None:
    axes = canvas.subplots()
    shades = (COLOURS["block_diagonal"][0], COLOURS["count_sketch"][0])
    for (name, sizes), shade in zip(curves.items(), shades[-len(curves) :], strict=True):
        x = np.array(sorted(sizes))
        count = min(len(sizes[t].runs) for t in sizes)
        values = np.array([list(finals(sizes[t]).values())[:count] for t in sorted(sizes)]).T
        mean_and_spread(axes, x, values, shade, name, marker="o")
    for setting in diagonal[:1]:
        mean = _mean(setting)
        axes.axhline(mean, color=colour("diagonal"), ls=":", label=f"Diagonal {mean:.1f}")
    axes.set_xlabel("size t of the sketch")
    axes.set_ylabel("average accuracy, %")
    axes.set_title(title)
    tidy(axes)
    canvas.legend(loc="outside lower center", ncols=2)


def _by_task(
    canvas: "Canvas", sizes: dict[int, Setting], diagonal: list[Setting], title: str
) -> None:
    axes = canvas.subplots()
    for place, (size, setting) in enumerate(sorted(sizes.items())):
        values = 100 * np.array([run.result.test[-1] for run in setting.runs])
        x = np.arange(1, values.shape[1] + 1)
        strong = (place + 1) / len(sizes)  # the larger, the stronger the line
        axes.plot(
            x,
            values.mean(axis=0),
            color=colour("count_sketch"),
            alpha=0.25 + 0.75 * strong,
            lw=0.7 + 1.3 * strong,
            label=f"t = {size}",
        )
    for setting in diagonal[:1]:
        values = 100 * np.array([run.result.test[-1] for run in setting.runs])
        axes.plot(x, values.mean(axis=0), ":", color=colour("diagonal"), label="Diagonal")
    axes.set_xlabel("task")
    axes.set_ylabel("accuracy at the end, %")
    axes.set_xticks(x)
    axes.set_title(title)
    tidy(axes)
    canvas.legend(loc="outside lower center", ncols=3)
