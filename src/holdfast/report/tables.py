"""The tables every study has: accuracy beside the paper's, what the paper left out, transfer."""

import math

from holdfast.report.blocks import Cell, Column, Table, between, number, signed
from holdfast.report.comparison import (
    compared,
    count,
    delta_cell,
    memory,
    method,
    paper_cell,
    printed,
    statistics,
    strength,
    within,
)
from holdfast.report.loading import Study
from holdfast.report.measures import (
    Summary,
    difference,
    finals,
    median_seconds,
    summary,
    transfer,
)
from holdfast.report.naming import names
from holdfast.report.paper import paper_seeds
from holdfast.report.settings import Setting

__all__ = ["accuracy", "beside", "transfers"]

_OURS = Column("Ours", help="Mean ± standard deviation (ddof 1) over all seeds")
_DELTA = Column("Difference (SE)", help="Ours over all seeds minus the paper's, in points")
_COSTS = [
    Column("Train, s", help="Seconds of training in one run, all tasks, median over seeds"),
    Column("Matrix, s", help="Seconds of consolidation in one run: computing the matrices"),
    Column("Penalty", help="Bytes of the largest penalty of a run"),
]


def _within(study: Study) -> Column:
    said = f"And how many standard errors it is; coloured from {study.enough} seeds on"
    return Column("Within 2 SE", numeric=False, help=said)


def _five_seeds(study: Study, preset: str) -> list[Column]:
    """A column for the paper's own seeds, where they are known."""
    seeds = paper_seeds(study.recipe, preset)
    if seeds is None:
        return []
    help = "Ours, over the paper's five seeds alone"
    return [Column(f"Seeds {seeds[0]}–{seeds[-1]}", help=help)]


def _costs(setting: Setting) -> list[Cell]:
    held = setting.approximation is not None
    return [
        number(median_seconds(setting, "training")),
        number(median_seconds(setting, "consolidation"), 2) if held else Cell(),
        memory(setting),
    ]


def _five(setting: Setting, values: dict[int, float]) -> list[Cell]:
    if paper_seeds(setting.recipe, setting.preset) is None:
        return []
    return [statistics(summary([values[run.seed] for run in setting.paper_runs]))]


def accuracy(study: Study, preset: str) -> Table | None:
    """The paper's table beside ours for one preset; None if nothing of it was run."""
    settings = study.shown(preset)
    if not settings:
        return None
    named = names(settings)
    population = preset == "original-code"
    strengths = {s.strength for s in settings}
    several = len(strengths) > 1
    rows = []
    for setting in settings:
        values = finals(setting)
        ours, paper = summary(list(values.values())), printed(study, setting)
        delta, error = compared(ours, paper)
        rows.append(
            [
                method(setting, named[setting]),
                paper_cell(paper),
                statistics(ours),
                *([number(_population(ours))] * population),
                count(len(values)),
                *_five(setting, values),
                delta_cell(delta, error),
                within(delta, error, decided=len(values) >= study.enough),
                *([strength(setting)] * several),
                *_costs(setting),
            ]
        )
    same = "" if several else f"λ = {strength(settings[0]).text} for all. "
    return Table(
        f"accuracy-{preset}",
        f"Average test accuracy after the last task, per cent: `{preset}`",
        [
            Column("Method", numeric=False),
            Column("Paper", help="Mean ± standard deviation as printed"),
            _OURS,
            *([Column("Std, ddof 0", help="As the original notebooks compute it")] * population),
            Column("Seeds"),
            *_five_seeds(study, preset),
            _DELTA,
            _within(study),
            *([Column("λ")] * several),
            *_COSTS,
        ],
        rows,
        f"{same}SE is the standard error of the difference, √(s²/n + s²/n of the paper): the printed "
        "numbers are means of few seeds too.",
        study.command(preset),
    )


def beside(study: Study, preset: str) -> Table | None:
    """What the paper did not show: other histories and anchors, baselines, other diagonals."""
    shown = study.shown(preset)
    settings = [s for s in study.reported(preset) if s not in shown]
    if not settings:
        return None
    rows = []
    for setting in settings:
        values, base = finals(setting), _reference(study, setting)
        ours, paper = summary(list(values.values())), printed(study, setting)
        delta, error = compared(ours, paper)
        said = setting.deviation(base)
        rows.append(
            [
                method(setting),
                Cell(said or "—", said or None),
                paper_cell(paper),
                statistics(ours),
                count(len(values)),
                *_five(setting, values),
                delta_cell(delta, error),
                within(delta, error, decided=len(values) >= study.enough),
                _interval(difference(values, finals(base)) if base else None),
                strength(setting),
                *_costs(setting),
            ]
        )
    return Table(
        f"beside-{preset}",
        f"What the paper did not show: `{preset}`",
        [
            Column("Method", numeric=False),
            Column("What differs", numeric=False, help="From the row of the table above"),
            Column("Paper", help="Only where the paper may have meant this setting"),
            _OURS,
            Column("Seeds"),
            *_five_seeds(study, preset),
            _DELTA,
            _within(study),
            Column("Against above", help="Paired difference to the table above, 95 % interval"),
            Column("λ"),
            *_COSTS,
        ],
        rows,
        command=study.command(preset),
    )


def _reference(study: Study, setting: Setting) -> Setting | None:
    """The row of the paper's table that a setting varies."""
    if setting.importance is None or setting.approximation is None:
        own = study.baselines(setting.preset)
        return next((s for s in own if s.mode == setting.mode and s is not setting), None)
    return study.find(setting.preset, setting.importance, setting.approximation, setting.rank)


def _population(values: Summary | None) -> float | None:
    """Standard deviation with ddof 0."""
    return None if values is None else values.std * math.sqrt(1 - 1 / values.count)


def _interval(values: Summary | None) -> Cell:
    """A difference and its 95 % interval."""
    if values is None:
        return Cell()
    mean = signed(values.mean)
    if values.count == 1:
        return mean
    return Cell(mean.text, mean.value, between(values.low, values.high))


def transfers(study: Study, preset: str) -> Table | None:
    """Forgetting, transfer and intransigence for one preset."""
    settings = study.shown(preset)
    settings += [s for s in study.baselines(preset) if s.mode != "joint"]
    if not settings:
        return None
    named = names(settings)
    alone = study.alone(preset)
    rows = [
        [
            method(setting, named[setting]),
            *(statistics(values) for values in transfer(setting, alone).values()),
            count(len(setting.runs)),
        ]
        for setting in settings
    ]
    return Table(
        f"transfer-{preset}",
        f"Forgetting and transfer, points: `{preset}`",
        [
            Column("Method", numeric=False),
            Column("Forgetting", help="Best earlier accuracy minus the last, mean over old tasks"),
            Column("Backward", help="Last accuracy minus that right after learning"),
            Column(
                "Forward", help="Accuracy before learning a task minus the untrained network's"
            ),
            Column("Intransigence", help="A network trained on the task alone, minus ours"),
            Column("First task", help="Accuracy on the first task after the last one, %"),
            Column("Seeds"),
        ],
        rows,
        "Mean ± standard deviation over seeds; the paper prints none of these. Forgetting and "
        "intransigence are good when low.",
        study.command(preset),
    )
