"""The appendix's decision boundaries: a column per method, a row per task learnt."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from holdfast import metrics
from holdfast.report.blocks import Figure
from holdfast.report.figures import panel
from holdfast.report.loading import Study
from holdfast.report.settings import Run, Setting, words
from holdfast.streams.toy import BLOBS

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

__all__ = ["boundaries"]

_PAPER_RUN = 2  # the seed of the network in the paper's figures
_GAP = 6  # pixels between two maps
_OUTLINE = "#22262b"  # dark in both themes: the maps below are pale in both


def boundaries(study: Study, preset: str) -> Figure | None:
    """Both appendix figures of one preset; None where no decision map was stored."""
    panels, seeds = [], set()
    for importance in ("ewc", "mas"):
        chosen = _columns(study, preset, importance)
        if not chosen:
            continue
        seeds |= {run.seed for _, run in chosen}
        panels.append(
            panel(
                f"boundaries-{preset}-{importance}",
                f"Decision boundaries of {words(importance)} after every task, preset {preset}; "
                "columns: " + ", ".join(s.label for s, _ in chosen),
                partial(_draw, study=study, columns=chosen, title=words(importance)),
                width=1.55 * len(chosen) + 0.6,
                height=5.9,
                wide=True,
            )
        )
    if not panels:
        return None
    shown = ", ".join(map(str, sorted(seeds)))
    return Figure(
        f"boundaries-{preset}",
        f"Decision boundaries: {preset}",
        panels,
        f"Seed {shown}. Rows: after each task, the first at the top. Blue to red: the probability of "
        "class 1. Ellipses: the blobs of the tasks seen so far, two standard deviations to each "
        "side, solid for class 0 and dashed for class 1. Above a column: its average accuracy at "
        "the end, on this seed.",
    )


def _columns(study: Study, preset: str, importance: str) -> list[tuple[Setting, Run]]:
    """The methods with stored maps, each with the run of a seed that all have, if there is one."""
    stored = study.boundaries or {}
    found = [
        (s, {run.seed: run for run in s.runs if run.id in stored})
        for s in study.primaries
        if s.preset == preset and s.importance == importance
    ]
    found = [(s, runs) for s, runs in found if runs]
    if not found:
        return []
    shared = set.intersection(*(set(runs) for _, runs in found))
    pool = shared or set(found[0][1])
    seed = _PAPER_RUN if _PAPER_RUN in pool else min(pool)
    return [(s, runs.get(seed) or runs[min(runs)]) for s, runs in found]


def _draw(
    canvas: "Canvas", study: Study, columns: Sequence[tuple[Setting, Run]], title: str
) -> None:
    """All maps as one picture: thirty axes would take matplotlib several seconds."""
    from matplotlib.collections import LineCollection

    assert study.boundaries is not None
    stacks = []
    for _, run in columns:
        with np.load(study.boundaries[run.id], allow_pickle=False) as stored:
            stacks.append((stored["maps"], stored["window"]))
    tasks, high, across = stacks[0][0].shape
    step_x, step_y = across + _GAP, high + _GAP
    mosaic = np.full((tasks * step_y - _GAP, len(columns) * step_x - _GAP), np.nan)
    axes = canvas.subplots()
    solid: list[NDArray[np.float64]] = []
    dashed: list[NDArray[np.float64]] = []
    for column, ((setting, run), (maps, window)) in enumerate(zip(columns, stacks, strict=True)):
        left = column * step_x
        final = 100 * metrics.average_accuracy(run.result.test)
        name = setting.label.split(" (")[0]
        axes.text(left + across / 2, -8, f"{name}\n{final:.1f} %", ha="center", va="bottom")
        for task in range(tasks):
            top = task * step_y
            picture = maps[task][::-1] / 255  # row 0 of a map is its lowest y
            mosaic[top : top + high, left : left + across] = picture
            for blobs in BLOBS[: task + 1]:
                for blob, lines in zip(blobs, (solid, dashed), strict=True):
                    lines.append(_ellipse(blob, window, (left, top), (across, high)))
    # half of the range only: pale enough to see the blobs on top
    axes.imshow(mosaic, cmap="RdBu_r", vmin=-0.5, vmax=1.5, interpolation="none")
    axes.add_collection(LineCollection(solid, colors=_OUTLINE, linewidths=0.7))
    axes.add_collection(LineCollection(dashed, colors=_OUTLINE, linewidths=0.7, linestyles="--"))
    rows = [f"task {task + 1}" for task in range(tasks)]
    axes.set_yticks([task * step_y + high / 2 for task in range(tasks)], rows)
    axes.set_xticks([])
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title(title, pad=34)


def _ellipse(
    blob: tuple[tuple[float, float], tuple[float, float]],
    window: NDArray[np.float64],
    corner: tuple[float, float],
    pixels: tuple[int, int],
) -> NDArray[np.float64]:
    """Two standard deviations around a blob's mean, in pixels of the mosaic."""
    angle = np.linspace(0, 2 * np.pi, 33)
    (x, y), (dx, dy) = blob
    (left, right), (bottom, top) = window
    across = (x + 2 * dx * np.cos(angle) - left) / (right - left)
    down = (top - y - 2 * dy * np.sin(angle)) / (top - bottom)
    return np.stack([corner[0] + across * pixels[0], corner[1] + down * pixels[1]], axis=1)
