"""Whether the order of the methods holds when the stream is longer."""

from collections.abc import Sequence

from holdfast.report.blocks import Cell, Column, Table, Text
from holdfast.report.comparison import count, method, statistics
from holdfast.report.loading import Study
from holdfast.report.measures import finals, mean_accuracy, summary
from holdfast.report.naming import names
from holdfast.report.selection import cell
from holdfast.report.settings import Setting, words
from holdfast.report.standard import main_scales, scale

__all__ = ["longer_stream"]


def longer_stream(study: Study, short: str, long: str) -> list[Table | Text]:
    """The methods that two presets share, with their ranks in both; empty if there are none."""
    pairs = [(a, b) for a in _main(study, short) for b in _main(study, long) if _same(a, b)]
    if len(pairs) < 2:
        return []
    ranks = [_ranks([pair[place] for pair in pairs]) for place in (0, 1)]
    named, rows = names(a for a, _ in pairs), []
    for a, b in sorted(pairs, key=lambda pair: ranks[0][pair[0]]):
        moved = ranks[0][a] - ranks[1][b]
        sign = "+" if moved > 0 else "−"
        rows.append(
            [
                method(a, named[a]),
                statistics(summary(list(finals(a).values()))),
                count(ranks[0][a]),
                statistics(summary(list(finals(b).values()))),
                count(ranks[1][b]),
                Cell(f"{sign}{abs(moved)}" if moved else "same", moved),
                count(len(a.runs)),
                count(len(b.runs)),
            ]
        )
    tasks = [pairs[0][place].runs[0].result.tasks for place in (0, 1)]
    table = Table(
        f"order-{long}",
        f"The order after {tasks[0]} and after {tasks[1]} tasks",
        [
            Column("Method", numeric=False),
            Column(f"{tasks[0]} tasks", help=f"Average accuracy, %: preset {short}"),
            Column("Rank"),
            Column(f"{tasks[1]} tasks", help=f"Average accuracy, %: preset {long}"),
            Column("Rank, longer"),
            Column("Places", help="Gained on the longer stream"),
            Column("Seeds"),
            Column("Seeds, longer"),
        ],
        rows,
        "Ranks are of the means, among the methods that were run on both streams.",
        study.command(long),
    )
    return [Text([_sentence(pairs, ranks, tasks)]), table]


def _main(study: Study, preset: str) -> list[Setting]:
    """What is reported at the scale of the preset's tables, each method at its chosen strength."""
    scales = main_scales(study.settings)
    found: dict[str, list[Setting]] = {}
    for setting in study.reported(preset):
        if setting.approximation and scale(setting.experiment) == scales[preset]:
            found.setdefault(_method(setting), []).append(setting)

    def distance(setting: Setting) -> tuple[bool, int]:
        selection = study.selections.get(cell(setting))
        other = selection is not None and selection.chosen != setting.strength
        return other, -len(setting.runs)

    return [min(members, key=distance) for members in found.values()]


def _method(setting: Setting) -> str:
    held = {k: v for k, v in setting.experiment["regularizer"].items() if k != "strength"}
    return str((sorted(held.items()), setting.limit, setting.storage, setting.flattened))


def _same(one: Setting, two: Setting) -> bool:
    return _method(one) == _method(two)


def _ranks(settings: Sequence[Setting]) -> dict[Setting, int]:
    order = sorted(settings, key=mean_accuracy, reverse=True)
    return {setting: place for place, setting in enumerate(order, start=1)}


def _sentence(
    pairs: Sequence[tuple[Setting, Setting]],
    ranks: Sequence[dict[Setting, int]],
    tasks: Sequence[int],
) -> str:
    moved = [a for a, b in pairs if ranks[0][a] != ranks[1][b]]
    if not moved:
        return f"The order of the means after {tasks[0]} tasks is that after {tasks[1]}."
    named = names(a for a, _ in pairs)
    which = ", ".join(f"{words(s.importance)} {named[s]}" for s in moved)
    return (
        f"From {tasks[0]} to {tasks[1]} tasks {len(moved)} of {len(pairs)} methods change their place "
        f"in the order of the means: {which}."
    )
