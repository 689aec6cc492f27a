"""The sections every recipe's report has; a recipe's own file orders them and adds its own."""

from collections.abc import Iterable, Mapping

from holdfast.recipes import RECIPES
from holdfast.report import pairs, plots, tables
from holdfast.report.blocks import Block, Cell, Column, Missing, Section, Table, Text, number
from holdfast.report.choice import choice
from holdfast.report.comparison import count
from holdfast.report.loading import Study
from holdfast.report.settings import Run

__all__ = [
    "accuracy",
    "differences",
    "learning",
    "present",
    "reading",
    "runs",
    "sections",
]

ABOUT = {
    "paper": "The text of the paper, taken at its word: correct rows for every method, λ = 1,000.",
    "original-code": "What produced the printed numbers: the flattened-batch diagonal, the first "
    "task scaled like all others, Adam re-created every epoch, MAS on softmax outputs, no ½ in the "
    "penalty (its λ is our 2,000).",
    "fair": "Correct rows for every method, and for each the strength that was best on validation "
    "data.",
}


def sections(study: Study) -> list[Section]:
    """What can be said about any recipe."""
    return [
        Section("summary", "Summary", present([pairs.main_comparison(study), *runs(study)])),
        *accuracy(study),
        differences(study),
        *learning(study),
        choice(study),
        reading(study),
    ]


def present(blocks: Iterable[Block | None]) -> list[Block]:
    """The blocks there is something to show for."""
    return [block for block in blocks if block is not None]


def runs(study: Study) -> list[Block]:
    """What was run, with what, and the command that makes it again."""
    rows = []
    for preset in study.presets:
        members = [s for s in study.settings if s.preset == preset]
        done = [run for s in members for run in s.runs]
        seeds = sorted({run.seed for s in members if s.role == "report" for run in s.runs})
        aside = sum(len(s.runs) for s in study.tried_aside(preset))
        hours = sum(run.result.seconds["total"] for run in done) / 3600
        rows.append(
            [
                Cell(f"`{preset}`", preset),
                count(len(members)),
                count(len(done)),
                Cell(f"{len(seeds)}", len(seeds), _ranges(seeds)),
                number(hours, 2),
                Cell(f"`{study.command(preset)}`", preset, _aside(study, preset, aside)),
            ]
        )
    everything = [run for s in study.settings for run in s.runs]
    table = Table(
        "runs",
        "What was run",
        [
            Column("Preset", numeric=False),
            Column("Settings", help="Methods, strengths and baselines"),
            Column("Runs"),
            Column("Seeds", help="Of the reported runs"),
            Column("Hours", help="Sum over all runs, as if one after the other"),
            Column("Command", numeric=False),
        ],
        rows,
        _environment(everything),
    )
    own = RECIPES[study.recipe].presets if study.recipe in RECIPES else ()
    notes: list[Block] = [
        Missing(f"The preset `{preset}` was not run.", f"{study.command()} --preset {preset}")
        for preset in own
        if preset not in study.presets
    ]
    if study.problems:
        notes.append(Text(["These files could not be read and were left out:"]))
        notes.append(Text(study.problems, bullets=True))
    return [table, *notes]


def _aside(study: Study, preset: str, runs: int) -> str:
    """How many runs no command of the recipe makes, and what made them."""
    if not runs:
        return ""
    return (
        f"{runs} {'run' if runs == 1 else 'runs'} of them one by one: {study.one_by_one(preset)}"
    )


def _environment(runs: Iterable[Run]) -> str:
    """Versions and machines of all runs in a sentence."""
    found: dict[str, set[str]] = {}
    for run in runs:
        for name, version in run.result.versions.items():
            found.setdefault(name, set()).add(str(version))
        machine = run.result.machine
        said = ", ".join(f"{name} {value}" for name, value in machine.items())
        found.setdefault("Machine:", set()).add(said)
    return (
        "; ".join(f"{name} {' and '.join(sorted(kinds))}" for name, kinds in found.items()) + "."
    )


def _ranges(seeds: list[int]) -> str:
    """Seeds as ranges: 0–4, 7."""
    parts: list[list[int]] = []
    for seed in seeds:
        if parts and seed == parts[-1][1] + 1:
            parts[-1][1] = seed
        else:
            parts.append([seed, seed])
    return ", ".join(f"{a}–{b}" if b > a else str(a) for a, b in parts)


def accuracy(study: Study, about: Mapping[str, str] = ABOUT) -> list[Section]:
    """A part per preset: what it is, the figure, the paper's table, what lies beside it."""
    text = Text(
        [
            "Average accuracy on the test data of all tasks after the last one was learnt. Standard "
            "deviations are of the sample (ddof 1). A click on a column's head sorts by it."
        ]
    )
    parts = [Section("accuracy", "Accuracy", [text])]
    for preset in study.presets:
        blocks = present(
            [
                Text([about[preset]]) if preset in about else None,
                plots.accuracies(study, preset),
                tables.accuracy(study, preset),
                tables.beside(study, preset),
            ]
        )
        parts.append(Section(f"accuracy-{preset}", f"Preset {preset}", blocks, level=3))
    return parts


def differences(study: Study) -> Section:
    """Who beats whom on the same seeds."""
    text = Text(
        [
            "All methods of a preset share data, initial weights and batches at a seed, so their "
            "difference at that seed says more than two means do."
        ]
    )
    found = [plots.differences(study), *(pairs.differences(study, p) for p in study.presets)]
    blocks = present(found) or [_nothing(study, "No two methods of a preset were run.")]
    return Section("differences", "Differences between methods", [text, *blocks])


def learning(study: Study) -> list[Section]:
    """Over the epochs, and what is forgotten, carried over and refused."""
    parts = []
    for preset in study.presets:
        blocks = present([plots.curves(study, preset), tables.transfers(study, preset)])
        if blocks:
            parts.append(Section(f"learning-{preset}", f"Preset {preset}", blocks, level=3))
    missing = [] if parts else [_nothing(study, "No method was run.")]
    return [Section("learning", "Learning and forgetting", missing), *parts]


def _nothing(study: Study, what: str) -> Missing:
    return Missing(what, study.command())


def reading(study: Study) -> Section:
    """What the words of the tables mean."""
    said = [
        "**Interval**: 95 %, Student's t, of the mean over seeds.",
        f"**Decision**: an order is decided by at least {study.enough} paired seeds and an interval "
        "that does not contain 0, and by nothing less.",
        "**Within 2 SE**: ours and the printed mean differ by at most two standard errors of their "
        "difference; the paper's own standard error follows from its printed spread.",
        "**Penalty**: bytes of the largest penalty of a run.",
        "**Train, Matrix**: seconds of training and of consolidation (computing the matrices) in "
        "one run. They depend on the machine and on what else it did: compare within a table.",
    ]
    return Section("reading", "How to read this", [Text(said, bullets=True)])
