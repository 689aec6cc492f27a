"""Who is best in the memory it takes."""

from holdfast.report.blocks import Cell, Column, Table, amount
from holdfast.report.comparison import count, memory, method, statistics, strength
from holdfast.report.loading import Study
from holdfast.report.measures import finals, floats, mean_accuracy, summary
from holdfast.report.naming import names
from holdfast.report.settings import Setting
from holdfast.report.standard import main_history, main_scales, scale

__all__ = ["at_equal_memory"]


def _bytes(setting: Setting) -> int:
    return max(run.result.penalty_bytes for run in setting.runs)


def at_equal_memory(study: Study, preset: str) -> Table | None:
    """The methods of a preset from little memory to much, and the best within each budget."""
    scales = main_scales(study.settings)
    settings = [
        s
        for s in study.sized(preset)
        if scale(s.experiment) == scales[preset]
        and s.history == main_history(study.recipe, preset)
        and s.anchor == "latest"
    ]
    if not settings:
        return None
    named, rows = names(settings), []
    for setting in sorted(settings, key=lambda s: (_bytes(s), s.order)):
        rivals = [
            s
            for s in settings
            if s.importance == setting.importance and _bytes(s) <= _bytes(setting)
        ]
        best = max(rivals, key=mean_accuracy)
        first = Cell("this one", "0", tone="good")
        rows.append(
            [
                method(setting, named[setting]),
                memory(setting),
                amount(floats(setting)),
                statistics(summary(list(finals(setting).values()))),
                count(len(setting.runs)),
                strength(setting),
                first if best is setting else Cell(named[best], "1"),
            ]
        )
    history = main_history(study.recipe, preset).replace("_", " ")
    return Table(
        f"memory-{preset}",
        f"At equal memory: `{preset}`",
        [
            Column("Method", numeric=False),
            Column("Penalty", help="Bytes of the largest penalty of a run, anchor included"),
            Column("Floats", help="32-bit numbers per parameter, the anchor not counted"),
            Column("Accuracy", help="Average after the last task, %: mean ± standard deviation"),
            Column("Seeds"),
            Column("λ"),
            Column("Best so far", numeric=False, help="Of its importance, in at most its memory"),
        ],
        rows,
        f"From little memory to much; history {history}, anchor latest. The best is that of the "
        "highest mean: whether a difference is decided stands in the paired differences.",
        study.command(preset),
    )
