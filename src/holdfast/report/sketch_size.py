"""The effect of the sketch's size: at one strength for all sizes, and at the best for each."""

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from holdfast.report.blocks import Figure
from holdfast.report.comparison import strength_text
from holdfast.report.figures import COLOURS, colour, legend, panel, tidy
from holdfast.report.loading import Study
from holdfast.report.measures import finals
from holdfast.report.selection import cell
from holdfast.report.settings import Setting, words
from holdfast.report.standard import scale
from holdfast.report.tasks import mean_and_spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

__all__ = ["FIXED", "sketch_sizes"]

FIXED = 1e4  # the strength of all sizes in the recipe, where the paper's figure was made

Curves = dict[str, dict[int, Setting]]  # what is done about λ -> size -> setting


def sketch_sizes(study: Study, preset: str) -> Figure | None:
    """Average accuracy over the size, and each task at the end by size; the diagonal dotted."""
    panels = []
    for importance in ("ewc", "mas"):
        diagonal = study.find(preset, importance, "diagonal")
        curves = _curves(study, _sketched(study, preset, importance))
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


def _sketched(study: Study, preset: str, importance: str) -> list[Setting]:
    """The sketches of all sizes and strengths that are otherwise those of the table."""
    own = study.find(preset, importance, "count_sketch")
    return [
        s
        for s in study.reported(preset)
        if own is not None
        and (s.importance, s.approximation) == (importance, "count_sketch")
        and (s.history, s.anchor) == (own.history, own.anchor)
        and scale(s.experiment) == scale(own.experiment)
    ]


def _mean(setting: Setting) -> float:
    return float(np.mean(list(finals(setting).values())))


def _curves(study: Study, sketched: list[Setting]) -> Curves:
    """Settings by size: those of the recipe's fixed strength, and those of the chosen ones."""
    fixed: dict[int, Setting] = {}
    chosen: dict[int, Setting] = {}
    for setting in sketched:
        size, strength = int(setting.part("approximation")["size"]), setting.strength
        selection = study.selections.get(cell(setting))
        if selection is not None and selection.chosen == strength:
            chosen[size] = setting
        if strength == FIXED:
            fixed[size] = setting
    curves: Curves = {}
    if fixed:
        curves[f"fixed λ = {strength_text(FIXED)}"] = fixed
    if chosen:
        curves["re-tuned λ"] = chosen
    return curves


def _average(canvas: "Canvas", curves: Curves, diagonal: Setting | None, title: str) -> None:
    axes = canvas.subplots()
    shades = (COLOURS["block_diagonal"][0], COLOURS["count_sketch"][0])
    for name, sizes in curves.items():
        shade = shades[name.startswith("re-tuned")]
        x = np.array(sorted(sizes))
        count = min(len(sizes[t].runs) for t in sizes)
        values = np.array([list(finals(sizes[t]).values())[:count] for t in sorted(sizes)]).T
        mean_and_spread(axes, x, values, shade, name, marker="o")
    if diagonal is not None:
        mean = _mean(diagonal)
        axes.axhline(mean, color=colour("diagonal"), ls=":", label=f"Diagonal {mean:.1f}")
    axes.set_xlabel("size t of the sketch")
    axes.set_ylabel("average accuracy, %")
    axes.set_title(title)
    tidy(axes)
    legend(canvas)


def _by_task(
    canvas: "Canvas", sizes: dict[int, Setting], diagonal: Setting | None, title: str
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
    if diagonal is not None:
        values = 100 * np.array([run.result.test[-1] for run in diagonal.runs])
        x = np.arange(1, values.shape[1] + 1)
        axes.plot(x, values.mean(axis=0), ":", color=colour("diagonal"), label="Diagonal")
    axes.set_xlabel("task")
    axes.set_ylabel("accuracy at the end, %")
    axes.set_xticks(x)
    axes.set_title(title)
    tidy(axes)
    canvas.legend(loc="outside lower center", ncols=3)
