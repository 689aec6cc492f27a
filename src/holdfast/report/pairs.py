"""Who beats whom: paired differences on the same seeds, and when they decide."""

from collections.abc import Iterator

from holdfast.report.blocks import Cell, Column, Table, Tone, signed
from holdfast.report.comparison import count, method
from holdfast.report.loading import Study
from holdfast.report.measures import ENOUGH_SEEDS, Summary, difference, finals
from holdfast.report.settings import Setting, words

__all__ = ["PAIRS", "decision", "differences", "main_comparison"]

Key = tuple[str, int | None]
# (approximation, rank) minus (approximation, rank)
PAIRS: tuple[tuple[Key, Key], ...] = (
    (("count_sketch", None), ("diagonal", None)),
    (("count_sketch", None), ("block_diagonal", None)),
    (("count_sketch", None), ("low_rank", 1)),
    (("low_rank", 50), ("count_sketch", None)),
    (("full", None), ("count_sketch", None)),
    (("low_rank", 50), ("diagonal", None)),
    (("full", None), ("diagonal", None)),
    (("block_diagonal", None), ("diagonal", None)),
)


def decision(values: Summary | None, first: str, second: str, expected: float = 1.0) -> Cell:
    """Who wins, or why nobody does: too few seeds, or an interval that contains zero.

    Args:
        values: The paired differences, first minus second.
        first: Name of the first method.
        second: Name of the second method.
        expected: The paper's difference; a decision with the other sign is marked as contrary.
    """
    if values is None:
        return Cell("undecided", "1", "not run", "open")
    if values.count < ENOUGH_SEEDS:
        return Cell("undecided", "1", f"{values.count} of {ENOUGH_SEEDS} seeds", "open")
    if values.low <= 0 <= values.high:
        return Cell("undecided", "1", "", "open")
    winner, sign = (first, 1) if values.low > 0 else (second, -1)
    tone: Tone = "good" if sign * expected > 0 else "bad"
    return Cell(f"{winner} better", "0" if sign > 0 else "2", tone=tone)


def differences(study: Study, preset: str) -> Table | None:
    """Paired differences between the methods of a preset on the same seeds."""
    rows = []
    for importance in dict.fromkeys(s.importance for s in study.primaries if s.preset == preset):
        for a, b, name in _compared(study, preset, str(importance)):
            theirs = None
            if a.paper and b.paper and b in study.primaries:
                theirs = a.paper.value - b.paper.value
            left, right = finals(a), finals(b)
            values = difference(left, right)
            wins = sum(left[seed] > right[seed] for seed in left.keys() & right.keys())
            shared = values.count if values else 0
            rows.append(
                [
                    Cell(
                        f"{words(importance)} · {a.label} − {name}",
                        f"{method(a).value}{method(b).value}{name}",
                    ),
                    signed(theirs),
                    signed(values.mean if values else None),
                    _between(values),
                    count(shared),
                    Cell(f"{wins} of {shared}", wins / shared if shared else None),
                    decision(values, a.label, name, 1.0 if theirs is None else theirs),
                ]
            )
    if not rows:
        return None
    return Table(
        f"differences-{preset}",
        f"Paired differences of the average accuracy, points: `{preset}`",
        [
            Column("Comparison", numeric=False),
            Column("Paper", help="Difference of the printed means"),
            Column("Ours", help="Mean of the differences on the same seeds"),
            Column("95 % interval", help="Student's t over the paired differences"),
            Column("Seeds"),
            Column("First ahead", help="Seeds on which the first method is more accurate"),
            Column("Decision", numeric=False, help="Green as printed, red the other way round"),
        ],
        rows,
        f"Undecided: fewer than {ENOUGH_SEEDS} seeds, or an interval that contains 0.",
        study.command(preset),
    )


def _compared(
    study: Study, preset: str, importance: str
) -> Iterator[tuple[Setting, Setting, str]]:
    """The pairs that were run; in `original-code` also the sketch against the correct diagonal."""
    for one, two in PAIRS:
        a, b = study.find(preset, importance, *one), study.find(preset, importance, *two)
        if a and b:
            yield a, b, b.label
    sketch = study.find(preset, importance, "count_sketch")
    flattened = study.find(preset, importance, "diagonal")
    for other in study.reported(preset):
        same = other.importance == importance and other.approximation == "diagonal"
        plain = other.history == "moving_average" and other.anchor == "latest"
        if sketch and flattened and flattened.flattened and same and plain:
            if other.flattened is None:
                yield sketch, other, "Correct diagonal"
            elif other is not flattened:
                yield sketch, other, f"Diagonal ÷ {other.flattened}"


def _between(values: Summary | None) -> Cell:
    if values is None or values.count == 1:
        return Cell()
    return Cell(f"{signed(values.low).text} to {signed(values.high).text}", values.low)


def main_comparison(study: Study) -> Table | None:
    """The paper's main claim on one screen: sketched against diagonal, every preset."""
    rows: list[list[Cell]] = []
    for preset in study.presets:
        for importance in dict.fromkeys(s.importance for s in study.primaries):
            a = study.find(preset, str(importance), "count_sketch")
            b = study.find(preset, str(importance), "diagonal")
            values = difference(finals(a), finals(b)) if a and b else None
            if a is None or b is None or values is None:
                continue
            theirs = a.paper.value - b.paper.value if a.paper and b.paper else None
            means = [sum(finals(s).values()) / len(s.runs) for s in (a, b)]
            rows.append(
                [
                    Cell(f"`{preset}` · {words(importance)}", f"{len(rows):03d}"),
                    signed(theirs),
                    Cell(f"{means[0]:.1f}", means[0]),
                    Cell(f"{means[1]:.1f}", means[1]),
                    signed(values.mean),
                    _between(values),
                    count(values.count),
                    decision(values, "Sketched", "Diagonal"),
                ]
            )
    if not rows:
        return None
    return Table(
        "main",
        "Sketched against diagonal: average accuracy, per cent, and paired difference, points",
        [
            Column("Preset", numeric=False),
            Column("Paper", help="Difference of the printed means"),
            Column("Sketched"),
            Column("Diagonal", help="In original-code: the flattened diagonal, as printed"),
            Column("Difference"),
            Column("95 % interval"),
            Column("Seeds"),
            Column("Decision", numeric=False, help=f"None on fewer than {ENOUGH_SEEDS} seeds"),
        ],
        rows,
        f"Undecided: fewer than {ENOUGH_SEEDS} seeds, or an interval that contains 0.",
        study.command("all"),
    )
