"""The best method at every budget of memory: the frontier as a table."""

from collections.abc import Mapping, Sequence

from holdfast.report.blocks import Cell, Column, Table, amount
from holdfast.report.comparison import count, statistics
from holdfast.report.loading import Study
from holdfast.report.measures import difference, finals, floats, mean_accuracy, summary
from holdfast.report.pairs import decision
from holdfast.report.settings import Setting
from holdfast.report.standard import scale

__all__ = ["BUDGETS", "best_at_every_budget", "within"]

BUDGETS = (0, 0.05, 0.2, 1, 2.3, 5, 10, 25, 50)  # 32-bit numbers per parameter beside the anchor
_ROUNDING = 1.02  # a budget is a round number


def within(settings: Sequence[Setting], budget: float) -> list[Setting]:
    """The sequential settings that a budget pays for, the best first."""
    found = [s for s in settings if s.mode == "sequential" and floats(s) <= _ROUNDING * budget]
    return sorted(found, key=mean_accuracy, reverse=True)


def best_at_every_budget(
    study: Study, preset: str, settings: Sequence[Setting], named: Mapping[Setting, str]
) -> Table:
    """For each budget the best method at or under it, and the next one.

    Settings of different scales are not compared: each scale has rows of its own, the second and later ones
    where there is something to compare.
    """
    scales: dict[str, list[Setting]] = {}
    for setting in settings:
        scales.setdefault(scale(setting.experiment), []).append(setting)
    rows = []
    for place, members in enumerate(scales.values()):
        if place and len(within(members, BUDGETS[-1])) < 2:
            continue
        for budget in BUDGETS:
            found = within(members, budget)
            if found:
                order = Cell(f"≤ {budget:g}", 1000 * place + budget)
                rows.append([order, *_row(study, found, named)])
    return Table(
        f"budget-{preset}",
        f"The best at every budget: `{preset}`",
        [
            Column("Floats", help="32-bit numbers per parameter, the anchor not counted"),
            Column("Best", numeric=False, help="Of the highest mean, at or under the budget"),
            Column("Its floats"),
            Column("Its bytes", help="Per parameter, the anchor not counted"),
            Column("Accuracy", help="Average after the last task, %: mean ± standard deviation"),
            Column("Seeds"),
            Column("Next", numeric=False, help="The second best at or under the budget"),
            Column("Its accuracy"),
            Column("Decision", numeric=False, help="Between the two, on the same seeds"),
        ],
        rows,
        f"A budget is a round number: a method may be {_ROUNDING - 1:.0%} above it. Undecided: fewer than "
        f"{study.enough} shared seeds, or a 95 % interval of the paired differences that contains 0.",
        study.command(preset),
    )


def _row(study: Study, found: Sequence[Setting], named: Mapping[Setting, str]) -> list[Cell]:
    best = found[0]
    cells = [
        Cell(named[best], named[best]),
        amount(floats(best)),
        amount(4 * floats(best)),
        statistics(summary(list(finals(best).values()))),
        count(len(best.runs)),
    ]
    if len(found) == 1:
        return [*cells, Cell(), Cell(), Cell()]
    following = found[1]
    values = difference(finals(best), finals(following))
    return [
        *cells,
        Cell(named[following], named[following]),
        statistics(summary(list(finals(following).values()))),
        decision(values, named[best], named[following], study.enough),
    ]
