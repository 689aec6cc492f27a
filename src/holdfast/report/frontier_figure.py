"""The picture of the frontier: accuracy against memory and, beside it, against time."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from holdfast.report.blocks import Figure, amount
from holdfast.report.figures import colour, line, panel, tidy, wrapped
from holdfast.report.measures import Summary, finals, floats, mean_accuracy, summary
from holdfast.report.naming import lengths
from holdfast.report.settings import Setting, words
from holdfast.report.standard import scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

__all__ = ["frontier_figure", "spread"]

_MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # of families that share a colour
_TICKS = (0.005, 0.02, 0.05, 0.2, 0.5, 1, 2, 5, 10, 25, 50)  # floats per parameter
_TIMES = (1, 2, 3, 4, 5, 7, 10, 15, 20, 30, 50)  # of a plain run
_LINES = ("-", "--", ":", "-.")  # from few epochs to many
_NAMES = {"low_rank": "Low rank", "kronecker": "Kronecker products"}  # where no number follows


@dataclass(frozen=True)
class _Point:
    """A method: what it costs, and how well it does."""

    setting: Setting
    accuracy: Summary
    time: float | None

    @property
    def memory(self) -> float:
        return floats(self.setting)


@dataclass(frozen=True)
class _Family:
    """Methods that differ in their budget alone."""

    name: str
    points: tuple[_Point, ...]
    marker: str
    length: int
    """The place of its scale among those that were run, the usual one first."""

    @property
    def best(self) -> float:
        return max(point.accuracy.mean for point in self.points)


def frontier_figure(
    preset: str,
    title: str,
    settings: Sequence[Setting],
    named: Mapping[Setting, str],
    times: Sequence[float | None],
) -> Figure:
    """Accuracy against floats per parameter and against time, one legend for both.

    Args:
        preset: Names the picture.
        title: Of the stream.
        settings: Every method, and the two ends of the scale.
        named: What each is called.
        times: Of each beside a plain run, where it is known.
    """
    families = list(_families(settings, times))
    ends = {named[s]: s for s in settings if s.approximation is None}
    said = "; ".join(
        f"{named[s]} {mean_accuracy(s):.1f} per cent"
        + (f" at {amount(floats(s)).text} floats" if s.approximation is not None else "")
        for s in settings
    )
    lines = sum(wrapped(name).count("\n") + 1 for name in [f.name for f in families] + ["e"] * 4)
    drawn = panel(
        f"frontier-{preset}",
        f"Average accuracy against floats per parameter and against time, {title}: {said}",
        partial(_draw, families=families, ends=ends, title=title),
        width=10.4,
        height=max(4.2, 0.7 + 0.2 * lines),
        wide=True,
    )
    return Figure(
        f"frontier-{preset}",
        f"Accuracy against memory and time: {preset}",
        [drawn],
        " ".join(_caption({end.mode for end in ends.values()})),
    )


def _caption(ends: Container[str]) -> Iterator[str]:
    """What is seen, as far as it is there."""
    yield (
        "Mean over seeds with one standard deviation, memory and time on logarithmic scales. Left: 32-bit "
        "numbers per parameter beside the anchor. Right: processor time of training and consolidation, "
        "beside that of a run of the same length in which nothing is held; runs from machines of different "
        "speed are made alike by the time their tests took, which leaves differences of up to a third."
    )
    if "sequential" in ends:
        yield "Dashed: nothing is held (far below the others it is in the legend alone)."
    if "joint" in ends:
        yield "Dotted: all tasks at once."
    yield "The legend begins with the best."


def _families(settings: Sequence[Setting], times: Sequence[float | None]) -> Iterator[_Family]:
    """The families, the best first."""
    scales = list(dict.fromkeys(scale(s.experiment) for s in settings))  # the usual one first
    found: dict[tuple[str, str], list[_Point]] = {}
    for setting, time in zip(settings, times, strict=True):
        accuracy = summary(list(finals(setting).values()))
        if setting.approximation is not None and accuracy is not None:
            key = scale(setting.experiment), _name(setting, settings[0])
            found.setdefault(key, []).append(_Point(setting, accuracy, time))
    used: dict[str, int] = {}
    families = []
    for (own, name), points in found.items():
        first = points[0].setting
        place = used.setdefault(first.approximation or "", 0)
        used[first.approximation or ""] += 1
        marker = _MARKERS[place % len(_MARKERS)]
        families.append(_Family(name, tuple(points), marker, scales.index(own)))
    return iter(sorted(families, key=lambda family: -family.best))


def _name(setting: Setting, usual: Setting) -> str:
    """What members of a family have in common; how much they learn where that is not what is usual."""
    key = setting.approximation or ""
    said = [_NAMES.get(key, words(key)), *setting.variant]
    said += [setting.storage] if setting.storage != "float32" else []
    said += [f"from {setting.limit:,} examples"] if setting.limit is not None else []
    others = lengths(usual)
    return ", ".join([*said, *(own for own in lengths(setting) if own not in others)])


def _draw(
    canvas: "Canvas", families: Sequence[_Family], ends: Mapping[str, Setting], title: str
) -> None:
    left, right = canvas.subplots(1, 2, sharey=True)
    for family in families:
        _points(left, family, [(point.memory, point) for point in family.points], joined=True)
        timed = [(point.time, point) for point in family.points if point.time is not None]
        _points(right, family, timed, joined=False)  # a larger budget need not take longer
    for name, end in ends.items():
        mean = mean_accuracy(end)
        for axes in (left, right):
            label = f"{name} {mean:.1f}"
            axes.axhline(mean, color=colour(None), ls=line(end), lw=0.8, label=label)
    points = [point for family in families for point in family.points]
    _focus(
        left, [point.accuracy for point in points], [mean_accuracy(end) for end in ends.values()]
    )
    _logarithmic(left, _TICKS, [point.memory for point in points])
    _logarithmic(right, _TIMES, [point.time for point in points if point.time])
    left.set_xlabel("floats per parameter")
    right.set_xlabel("time of training and consolidation, × a plain run")
    left.set_ylabel("average accuracy, %")
    left.set_title(title)
    tidy(left)
    tidy(right)
    handles, labels = left.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: i < len(ends))  # lines come before points
    canvas.legend(
        [handles[i] for i in order],
        [wrapped(labels[i]) for i in order],
        loc="outside right center",
        handlelength=2.0,
        labelspacing=0.6,
    )


def _focus(axes: "Axes", held: Sequence[Summary], ends: Sequence[float]) -> None:
    """Show what holds something, with its spread, and the ends of the scale that are no further away."""
    if not held:
        return
    low = min(value.mean - (value.std if value.count > 1 else 0) for value in held)
    high = max(value.mean + (value.std if value.count > 1 else 0) for value in held)
    high = min(high, 100.0)
    room = max(high - low, 2.0)
    near = [end for end in ends if low - room / 2 <= end <= high + room]
    axes.set_ylim(min([low, *near]) - 0.05 * room, max([high, *near]) + 0.08 * room)


def _points(
    axes: "Axes", family: _Family, points: Sequence[tuple[float, _Point]], joined: bool
) -> None:
    """The points of a family with their spread, in the order of what they cost."""
    points = sorted(points, key=lambda point: point[0])
    values = [point.accuracy for _, point in points]
    shade = colour(family.points[0].setting.approximation)
    axes.errorbar(
        [x for x, _ in points],
        [v.mean for v in values],
        yerr=[list(side) for side in zip(*map(spread, values), strict=True)],
        color=shade,
        label=family.name,
        marker=family.marker,
        ls=_LINES[family.length % len(_LINES)] if joined else "none",
        mfc="none" if family.length else shade,  # hollow: learnt for longer
        ms=4,
        capsize=2,
        lw=1.2,
        elinewidth=0.8,
    )


def spread(value: Summary) -> tuple[float, float]:
    """How far a bar reaches down and up: nothing is above all."""
    std = value.std if value.count > 1 else 0.0
    return std, min(std, 100.0 - value.mean)


def _logarithmic(axes: "Axes", ticks: Sequence[float], places: Sequence[float]) -> None:
    """A logarithmic scale with round numbers where there is something."""
    axes.set_xscale("log")
    low, high = (min(places), max(places)) if places else (ticks[0], ticks[-1])
    shown = [tick for tick in ticks if low / 1.5 <= tick <= 1.5 * high]
    axes.set_xticks(shown, [f"{tick:g}" for tick in shown])
    axes.minorticks_off()
