"""Who beats whom: paired differences on the same seeds, and when they decide."""

from collections.abc import Iterator

from holdfast.report.blocks import Cell, Column, Table, Tone, between, signed
from holdfast.report.comparison import count, method, printed
from holdfast.report.loading import Study
from holdfast.report.measures import Summary, difference, finals
from holdfast.report.naming import names
from holdfast.report.settings import Setting, words
from holdfast.report.standard import scale

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
    (("kronecker", None), ("low_rank", 50)),
    (("kronecker", None), ("count_sketch", None)),
    (("kronecker", None), ("diagonal", None)),
)


def decision(
    values: Summary | None, first: str, second: str, enough: int, expected: float = 1.0
) -> Cell:
    """Who wins, or why nobody does: too few seeds, or an interval that contains zero.

    Args:
        values: The paired differences, first minus second.
        first: Name of the first method.
        second: Name of the second method.
        enough: Seeds below which nothing is decided.
        expected: The paper's difference; a decision with the other sign is marked as contrary.
    """
    if values is None:
        return Cell("undecided", "1", "not run", "open")
    if values.count < enough:
        return Cell("undecided", "1", f"{values.count} of {enough} seeds", "open")
    if values.low <= 0 <= values.high:
        return Cell("undecided", "1", "", "open")
    winner, sign = (first, 1) if values.low > 0 else (second, -1)
    tone: Tone = "good" if sign * expected > 0 else "bad"
    return Cell(f"{winner} better", "0" if sign > 0 else "2", tone=tone)


def differences(study: Study, preset: str) -> Table | None:
    """Paired differences between the methods of a preset on the same seeds."""
    rows = []
    named = names(study.shown(preset))
    for importance in dict.fromkeys(s.importance for s in study.primaries if s.preset == preset):
        for a, b, name in _compared(study, preset, str(importance)):
            theirs = _printed(study, a, b)
            left, right = finals(a), finals(b)
            values = difference(left, right)
            wins = sum(left[seed] > right[seed] for seed in left.keys() & right.keys())
            shared = values.count if values else 0
            rows.append(
                [
                    Cell(
                        f"{words(importance)} · {named[a]} − {name}",
                        f"{method(a).value}{method(b).value}{name}",
                    ),
                    signed(theirs),
                    signed(values.mean if values else None),
                    _between(values),
                    count(shared),
                    Cell(f"{wins} of {shared}", wins / shared if shared else None),
                    decision(
                        values, a.label, name, study.enough, 1.0 if theirs is None else theirs
                    ),
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
        _undecided(study),
        study.command(preset),
    )


def _compared(
    study: Study, preset: str, importance: str
) -> Iterator[tuple[Setting, Setting, str]]:
    """The pairs that were run; the sketch against the other kinds of diagonal as well."""
    named = names(study.shown(preset))
    for one, two in PAIRS:
        a, b = study.find(preset, importance, *one), study.find(preset, importance, *two)
        if a and b:
            yield a, b, named[b]
    sketch = study.find(preset, importance, "count_sketch")
    own = study.find(preset, importance, "diagonal")
    if sketch is None or own is None:
        return
    for other in study.reported(preset):
        same = other.importance == importance and other.approximation == "diagonal"
        if other in study.companions and same:
            yield sketch, other, named[other]
        elif same and own.flattened and other is not own and _alike(other, own):
            how = f"Diagonal ÷ {other.flattened}" if other.flattened else "Correct diagonal"
            yield sketch, other, how


def _alike(one: Setting, two: Setting) -> bool:
    """Whether two diagonals differ in nothing that the sketch beside them does not differ in."""
    same_scale = scale(one.experiment) == scale(two.experiment)
    return same_scale and (one.history, one.anchor) == (two.history, two.anchor)


def _printed(study: Study, one: Setting, two: Setting) -> float | None:
    """The difference of two printed means."""
    a, b = printed(study, one), printed(study, two)
    return a.value - b.value if a and b else None


def _undecided(study: Study) -> str:
    return f"Undecided: fewer than {study.enough} seeds, or an interval that contains 0."


def _between(values: Summary | None) -> Cell:
    if values is None or values.count == 1:
        return Cell()
    return Cell(between(values.low, values.high), values.low)


def main_comparison(study: Study) -> Table | None:
    """The paper's main claim on one screen: sketched against diagonal, every preset."""
    rows: list[list[Cell]] = []
    for preset, importance, a, b in _sketched_and_diagonal(study):
        values = difference(finals(a), finals(b))
        if values is None:
            continue
        means = [sum(finals(s).values()) / len(s.runs) for s in (a, b)]
        kind = ", flattened diagonal" if b.flattened else ""
        rows.append(
            [
                Cell(f"`{preset}` · {words(importance)}{kind}", f"{len(rows):03d}"),
                signed(_printed(study, a, b)),
                Cell(f"{means[0]:.1f}", means[0]),
                Cell(f"{means[1]:.1f}", means[1]),
                signed(values.mean),
                _between(values),
                count(values.count),
                decision(values, "Sketched", "Diagonal", study.enough),
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
            Column("Diagonal", help="Of single examples, or the flattened one that was printed"),
            Column("Difference"),
            Column("95 % interval"),
            Column("Seeds"),
            Column("Decision", numeric=False, help=f"None on fewer than {study.enough} seeds"),
        ],
        rows,
        _undecided(study),
        study.command("all"),
    )


def _sketched_and_diagonal(study: Study) -> Iterator[tuple[str, str, Setting, Setting]]:
    """Every preset's sketch with its diagonal, and with the flattened one where both were run."""
    for preset in study.presets:
        for importance in dict.fromkeys(str(s.importance) for s in study.primaries):
            sketch = study.find(preset, importance, "count_sketch")
            for other in study.shown(preset):
                if sketch and (other.importance, other.approximation) == (importance, "diagonal"):
                    yield preset, importance, sketch, other
