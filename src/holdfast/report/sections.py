"""The sections every recipe's report has; a recipe's own file puts them in order and adds its own."""

from collections.abc import Iterable
from statistics import fmean

from holdfast.report import plots, tables
from holdfast.report.blocks import (
    Block,
    Cell,
    Column,
    Missing,
    Section,
    Table,
    Text,
    number,
    signed,
)
from holdfast.report.loading import Study
from holdfast.report.measures import ENOUGH_SEEDS, difference, finals, summary
from holdfast.report.selection import cell
from holdfast.report.settings import PRESET_ORDER, words

__all__ = [
    "accuracy",
    "choice",
    "differences",
    "learning",
    "reading",
    "runs",
    "sections",
    "sketch",
]

ABOUT = {
    "paper": "The text of the paper, taken at its word: correct rows for every method.",
    "original-code": "What produced the printed numbers: the flattened-batch diagonal, the first task "
    "weighted like the others, Adam re-created every epoch, MAS on softmax outputs, no ½ in the penalty.",
    "fair": "Correct rows for every method, and for each the strength that was best on validation data.",
}


def sections(study: Study) -> list[Section]:
    """What can be said about any recipe."""
    return [
        Section("summary", "Summary", [sketch(study), *runs(study)]),
        *accuracy(study),
        differences(study),
        *learning(study),
        choice(study),
        reading(),
    ]


def present(blocks: Iterable[Block | None]) -> list[Block]:
    """The blocks there is something to show for."""
    return [block for block in blocks if block is not None]


def sketch(study: Study) -> Text:
    """The paper's main comparison in words, one line per preset."""
    said = []
    for preset in study.presets:
        parts = []
        for importance in dict.fromkeys(s.importance for s in study.primaries):
            a = study.find(preset, str(importance), "count_sketch")
            b = study.find(preset, str(importance), "diagonal")
            values = difference(finals(a), finals(b)) if a and b else None
            if a is None or b is None or values is None:
                continue
            decided = tables.decision(values, "the sketch", "the diagonal")
            reason = f" ({decided.note})" if decided.note else ""
            means = [fmean(finals(s).values()) for s in (a, b)]
            interval = (
                f", 95 % interval {signed(values.low).text} to {signed(values.high).text}"
                if values.count > 1
                else ""
            )
            parts.append(
                f"{words(importance)}: sketched {means[0]:.1f} %, diagonal {means[1]:.1f} %, "
                f"difference {signed(values.mean).text} points{interval}: "
                f"**{decided.text}**{reason}"
            )
        if parts:
            seeds = max(len(s.runs) for s in study.reported(preset))
            said.append(f"`{preset}`, {seeds} seed{'s' * (seeds > 1)}. " + ". ".join(parts) + ".")
    return Text(said or ["No preset has both a sketch and a diagonal yet."], bullets=True)


def runs(study: Study) -> list[Block]:
    """What was run, with what, and the command that makes it again."""
    rows = []
    for preset in study.presets:
        members = [s for s in study.settings if s.preset == preset]
        done = [run for s in members for run in s.runs]
        seeds = sorted({run.seed for s in members if s.role == "report" for run in s.runs})
        versions = sorted({run.result.versions.get("holdfast", "?") for run in done})
        torch = sorted({run.result.versions.get("torch", "?") for run in done})
        machines = sorted({_machine(run.result.machine) for run in done})
        hours = sum(run.result.seconds["total"] for run in done) / 3600
        rows.append(
            [
                Cell(preset, preset),
                Cell(str(len(members)), len(members)),
                Cell(str(len(done)), len(done)),
                Cell(f"{len(seeds)}", len(seeds), _ranges(seeds)),
                number(hours, 2),
                Cell(", ".join(versions), versions[0]),
                Cell(", ".join(torch), torch[0]),
                Cell("; ".join(machines), machines[0]),
                Cell(study.command(preset), preset),
            ]
        )
    table = Table(
        "runs",
        "What was run",
        [
            Column("Preset", numeric=False),
            Column("Settings", help="Methods, strengths and baselines"),
            Column("Runs"),
            Column("Seeds", help="Of the reported runs"),
            Column("Hours", help="Sum over all runs, as if one after the other"),
            Column("holdfast", numeric=False),
            Column("torch", numeric=False),
            Column("Machine", numeric=False),
            Column("Command", numeric=False),
        ],
        rows,
    )
    missing = [preset for preset in PRESET_ORDER if preset not in study.presets]
    notes: list[Block] = [
        Missing(f"The preset `{preset}` was not run.", f"{study.command()} --preset {preset}")
        for preset in missing
    ]
    if study.problems:
        notes.append(Text(["These files were left out:", *study.problems], bullets=True))
    return [table, *notes]


def _machine(values: object) -> str:
    assert isinstance(values, dict)
    return ", ".join(f"{count} {name}" for name, count in values.items())


def _ranges(seeds: list[int]) -> str:
    """Seeds as ranges: 0–4, 7."""
    parts: list[list[int]] = []
    for seed in seeds:
        if parts and seed == parts[-1][1] + 1:
            parts[-1][1] = seed
        else:
            parts.append([seed, seed])
    return ", ".join(f"{a}–{b}" if b > a else str(a) for a, b in parts)


def accuracy(study: Study) -> list[Section]:
    """A part per preset: the figure, the paper's table, what lies beside it."""
    parts = [Section("accuracy", "Accuracy", [Text([_ACCURACY])])]
    for preset in study.presets:
        blocks = present(
            [
                Text([ABOUT[preset]]) if preset in ABOUT else None,
                plots.accuracies(study, preset),
                tables.accuracy(study, preset),
                tables.beside(study, preset),
            ]
        )
        parts.append(Section(f"accuracy-{preset}", f"Preset {preset}", blocks, level=3))
    return parts


_ACCURACY = (
    "Average accuracy on the test data of all tasks after the last one was learnt. Standard deviations "
    "are of the sample (ddof 1). Click a column's head to sort."
)


def differences(study: Study) -> Section:
    """Who beats whom on the same seeds."""
    blocks = [plots.differences(study), *(tables.differences(study, p) for p in study.presets)]
    text = Text(
        [
            "All methods of a preset share data, initial weights and batches at a seed, so their "
            "difference at that seed says more than two means do."
        ]
    )
    return Section("differences", "Differences between methods", [text, *present(blocks)])


def learning(study: Study) -> list[Section]:
    """Over the epochs, and what is forgotten, carried over and refused."""
    parts = [Section("learning", "Learning and forgetting", [])]
    for preset in study.presets:
        blocks = present([plots.curves(study, preset), tables.transfers(study, preset)])
        if blocks:
            parts.append(Section(f"learning-{preset}", f"Preset {preset}", blocks, level=3))
    return parts


def choice(study: Study) -> Section:
    """The fair preset's strengths and the curves they were chosen from."""
    rows = []
    for setting in study.primaries:
        selection = study.selections.get(cell(setting))
        if selection is None:
            continue
        best = dict(selection.grid)[selection.chosen]
        grid = [strength for strength, _ in selection.grid]
        final = summary(list(finals(setting).values()))
        rows.append(
            [
                tables.method(setting),
                Cell(f"{selection.chosen:.3g}", selection.chosen),
                number(best.mean),
                Cell(f"{len(grid)}", len(grid), f"{grid[0]:.3g} to {grid[-1]:.3g}"),
                Cell("inside", "0", "", "good")
                if selection.inside
                else Cell("at the end", "1", "extend the grid", "bad"),
                Cell(str(best.count), best.count),
                tables.statistics(final),
            ]
        )
    if not rows:
        missing = Missing(
            "No strengths were tuned here.",
            f"{study.command()} --preset fair --seeds {ENOUGH_SEEDS}",
        )
        return Section("choice", "Choosing the strength", [missing])
    table = Table(
        "choice",
        "Strengths of the `fair` preset",
        [
            Column("Method", numeric=False),
            Column("Chosen λ"),
            Column("Validation", help="Mean final validation accuracy at the chosen strength, %"),
            Column("Grid", help="Number of strengths tried, in factors of √10"),
            Column(
                "Optimum", numeric=False, help="Whether the best strength lies inside the grid"
            ),
            Column("Tuning seeds", help="They are not the reporting seeds"),
            Column("Test accuracy", help="Mean ± standard deviation over the reporting seeds, %"),
        ],
        rows,
        "The choice looks at the validation data of all tasks, which a learner of a real stream would "
        "not have: it is the best each method can do, the same for all.",
        study.command("fair"),
    )
    return Section("choice", "Choosing the strength", present([plots.sensitivity(study), table]))


def reading() -> Section:
    """What the words of the tables mean."""
    return Section(
        "reading",
        "How to read this",
        [
            Text(
                [
                    "**Interval**: 95 %, Student's t, of the mean over seeds.",
                    "**Decision**: an order is decided only by at least "
                    f"{ENOUGH_SEEDS} paired seeds and an interval that does not contain 0.",
                    "**Within 2 SE**: ours and the printed mean differ by at most two standard errors of "
                    "their difference; the paper's own standard error is taken from its printed spread.",
                    "**Penalty**: bytes of the largest penalty of a run, as it is kept between tasks.",
                    "**Seconds** depend on the machine and on what else it did; compare within a table.",
                ],
                bullets=True,
            )
        ],
    )
