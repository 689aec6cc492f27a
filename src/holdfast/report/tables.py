"""The tables every study has: accuracy, what lies beside it, paired differences, transfer."""

import math
from collections.abc import Sequence

from holdfast.report.blocks import Cell, Column, Table, number, plus_minus, signed, size
from holdfast.report.loading import Study
from holdfast.report.measures import (
    ENOUGH_SEEDS,
    Summary,
    difference,
    finals,
    mean_seconds,
    standard_error,
    summary,
    transfer,
)
from holdfast.report.paper import PAPER_SEEDS, Printed
from holdfast.report.settings import Setting, words

__all__ = ["PAIRS", "accuracy", "beside", "compared", "decision", "differences", "transfers"]

# (better according to the paper or at least costlier, the other one), as (approximation, rank)
PAIRS: tuple[tuple[tuple[str, int | None], tuple[str, int | None]], ...] = (
    (("count_sketch", None), ("diagonal", None)),
    (("count_sketch", None), ("block_diagonal", None)),
    (("count_sketch", None), ("low_rank", 1)),
    (("low_rank", 50), ("count_sketch", None)),
    (("full", None), ("count_sketch", None)),
    (("low_rank", 50), ("diagonal", None)),
    (("full", None), ("diagonal", None)),
    (("block_diagonal", None), ("diagonal", None)),
)
_SEEDS = f"{PAPER_SEEDS[0]}–{PAPER_SEEDS[-1]}"


def method(setting: Setting) -> Cell:
    """Importance and approximation; sorted in the order of the tables."""
    if setting.importance is None:
        return Cell(setting.label, f"~{setting.label}")
    text = f"{words(setting.importance)} · {setting.label}"
    return Cell(text, "".join(f"{part!s:>12}" for part in setting.order[1:4]))


def printed(study: Study, setting: Setting) -> Printed | None:
    """The paper's number, where the setting is the one it was printed for (or may have been).

    Which normalisation of the flattened diagonal made the printed number is open: both are compared.
    """
    candidate = setting.preset == "original-code" and setting.flattened is not None
    return setting.paper if setting in study.primaries or candidate else None


def compared(ours: Summary | None, paper: Printed | None) -> tuple[float | None, float | None]:
    r"""Difference to the paper and its standard error, :math:`\sqrt{s^2/n + s_P^2/n_P}`."""
    if ours is None or paper is None:
        return None, None
    error = math.hypot(standard_error(ours), paper.standard_error)
    return ours.mean - paper.value, error


def within(delta: float | None, error: float | None) -> Cell:
    """Whether the difference is at most two standard errors, and how many it is."""
    if delta is None or not error or math.isnan(error):
        return Cell()
    near = abs(delta) <= 2 * error
    text = "yes" if near else "no"
    return Cell(
        text, abs(delta) / error, f"{abs(delta) / error:.1f} SE", "good" if near else "bad"
    )


def _paper(value: Printed | None) -> Cell:
    return Cell() if value is None else plus_minus(value.value, value.spread)


def _costs(setting: Setting) -> list[Cell]:
    return [
        number(mean_seconds(setting, "training")),
        number(mean_seconds(setting, "consolidation"), 2),
        size(max(run.result.penalty_bytes for run in setting.runs)),
    ]


_COSTS = [
    Column("Train, s", help="Seconds of training in one run, all tasks, mean over seeds"),
    Column("Consolidate, s", help="Seconds of computing the matrices in one run, all tasks"),
    Column("Penalty", help="Bytes of the penalty after the last task, anchor included"),
]


def accuracy(study: Study, preset: str) -> Table | None:
    """The paper's table beside ours for one preset; None if nothing of it was run."""
    settings = [s for s in study.primaries if s.preset == preset]
    if not settings:
        return None
    population = preset == "original-code"
    columns = [
        Column("Method", numeric=False),
        Column("Paper", help="Mean ± standard deviation as printed, 5 seeds"),
        Column("Ours", help="Mean ± standard deviation (ddof 1) over all seeds"),
        Column("Seeds"),
        *([Column("Std, ddof 0", help="As the original notebooks compute it")] * population),
        Column(f"Seeds {_SEEDS}", help="Ours, over the paper's five seeds alone"),
        Column("Difference", help="Ours over all seeds minus the paper's, in points"),
        Column("SE", help="Standard error of the difference: both sides' seeds count"),
        Column("Within 2 SE", numeric=False),
        Column("λ"),
        *_COSTS,
    ]
    rows = []
    for setting in settings:
        values = finals(setting)
        ours = summary(list(values.values()))
        five = summary([values[run.seed] for run in setting.paper_runs])
        paper = printed(study, setting)
        delta, error = compared(ours, paper)
        rows.append(
            [
                method(setting),
                _paper(paper),
                statistics(ours),
                Cell(str(len(values)), len(values)),
                *([number(_population(ours))] * population),
                statistics(five),
                signed(delta),
                number(error),
                within(delta, error),
                _strength(setting),
                *_costs(setting),
            ]
        )
    return Table(
        f"accuracy-{preset}",
        f"Average test accuracy after the last task, per cent: `{preset}`",
        columns,
        rows,
        "SE is the standard error of the difference, √(s²/n + s²ₚ/nₚ) with the paper's own spread "
        "as sₚ: the printed numbers are means of few seeds too.",
        study.command(preset),
    )


def beside(study: Study, preset: str) -> Table | None:
    """What the paper did not show: other histories and anchors, baselines, the correct diagonal."""
    settings = [s for s in study.reported(preset) if s not in study.primaries]
    if not settings:
        return None
    columns = [
        Column("Method", numeric=False),
        Column("What differs", numeric=False, help="From the row of the table above"),
        Column("Paper", help="Only where the paper may have meant this setting"),
        Column("Ours", help="Mean ± standard deviation (ddof 1) over all seeds"),
        Column("Seeds"),
        Column(f"Seeds {_SEEDS}", help="Ours, over the paper's five seeds alone"),
        Column("Difference", help="Ours minus the paper's, in points"),
        Column("Within 2 SE", numeric=False),
        Column(
            "Against the table above", help="Paired difference on the same seeds, 95 % interval"
        ),
        Column("λ"),
        *_COSTS,
    ]
    rows = []
    for setting in settings:
        values = finals(setting)
        ours = summary(list(values.values()))
        paper = printed(study, setting)
        delta, error = compared(ours, paper)
        base = reference(study, setting)
        rows.append(
            [
                method(setting),
                Cell(setting.deviation(base), setting.deviation(base)),
                _paper(paper),
                statistics(ours),
                Cell(str(len(values)), len(values)),
                statistics(summary([values[run.seed] for run in setting.paper_runs])),
                signed(delta),
                within(delta, error),
                interval(difference(values, finals(base)) if base else None),
                _strength(setting),
                *_costs(setting),
            ]
        )
    return Table(
        f"beside-{preset}",
        f"What the paper did not show: `{preset}`",
        columns,
        rows,
        command=study.command(preset),
    )


def reference(study: Study, setting: Setting) -> Setting | None:
    """The row of the paper's table that a setting varies."""
    if setting.importance is None or setting.approximation is None:
        return None
    return study.find(setting.preset, setting.importance, setting.approximation, setting.rank)


def statistics(values: Summary | None) -> Cell:
    """Mean ± standard deviation."""
    return Cell() if values is None else plus_minus(values.mean, values.std)


def _population(values: Summary | None) -> float | None:
    """Standard deviation with ddof 0."""
    return None if values is None else values.std * math.sqrt(1 - 1 / values.count)


def _strength(setting: Setting) -> Cell:
    if setting.strength is None:
        return Cell()
    return Cell(f"{setting.strength:.3g}".replace("e+0", "e"), setting.strength)


def interval(values: Summary | None) -> Cell:
    """A difference with its 95 % interval below."""
    if values is None:
        return Cell()
    mean = signed(values.mean)
    if values.count == 1:
        return mean
    return Cell(mean.text, mean.value, f"{signed(values.low).text} to {signed(values.high).text}")


def decision(values: Summary | None, better: str, worse: str) -> Cell:
    """Who wins, or why nobody does: too few seeds, or an interval that contains zero."""
    if values is None:
        return Cell("undecided", "1", "not run", "open")
    if values.count < ENOUGH_SEEDS:
        return Cell("undecided", "1", f"{values.count} of {ENOUGH_SEEDS} seeds", "open")
    if values.low > 0:
        return Cell(f"{better} is better", "0", "", "good")
    if values.high < 0:
        return Cell(f"{worse} is better", "2", "", "bad")
    return Cell("undecided", "1", "the interval contains 0", "open")


def differences(study: Study, preset: str) -> Table | None:
    """Paired differences between the methods of a preset on the same seeds."""
    rows: list[Sequence[Cell]] = []
    for importance in dict.fromkeys(s.importance for s in study.primaries if s.preset == preset):
        for one, two in PAIRS:
            a = study.find(preset, str(importance), *one)
            b = study.find(preset, str(importance), *two)
            if a is None or b is None:
                continue
            left, right = finals(a), finals(b)
            values = difference(left, right)
            theirs = None if not (a.paper and b.paper) else a.paper.value - b.paper.value
            wins = sum(left[s] > right[s] for s in left.keys() & right.keys())
            count = values.count if values else 0
            rows.append(
                [
                    Cell(
                        f"{words(importance)} · {a.label} − {b.label}",
                        f"{method(a).value}{method(b).value}",
                    ),
                    signed(theirs),
                    interval(values),
                    Cell(f"{wins} of {count}", wins / count if count else None),
                    decision(values, a.label, b.label),
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
            Column("Ours", help="Mean of the differences on the same seeds, 95 % interval (t)"),
            Column("First is better", help="Seeds on which the first method is more accurate"),
            Column("Decision", numeric=False, help=f"None on fewer than {ENOUGH_SEEDS} seeds"),
        ],
        rows,
        f"Nothing is decided on fewer than {ENOUGH_SEEDS} seeds, nor by an interval that contains 0.",
        study.command(preset),
    )


def transfers(study: Study, preset: str) -> Table | None:
    """Forgetting, transfer and intransigence for one preset."""
    settings = [s for s in study.primaries if s.preset == preset]
    settings += [s for s in study.reported(preset) if s.importance is None and s.mode != "joint"]
    if not settings:
        return None
    alone = study.alone(preset)
    rows = []
    for setting in settings:
        measured = transfer(setting, alone).values()
        rows.append([method(setting), *(statistics(values) for values in measured)])
    return Table(
        f"transfer-{preset}",
        f"Forgetting and transfer, points: `{preset}`",
        [
            Column("Method", numeric=False),
            Column("Forgetting", help="Best earlier accuracy minus the last, mean over old tasks"),
            Column("Backward transfer", help="Last accuracy minus that right after learning"),
            Column("Forward transfer", help="Accuracy before learning a task minus the untrained"),
            Column("Intransigence", help="A network trained on the task alone, minus ours"),
            Column("First task at the end", help="Accuracy on task 1 after the last task"),
        ],
        rows,
        "Mean ± standard deviation over seeds. Low forgetting and low intransigence are good.",
        study.command(preset),
    )
