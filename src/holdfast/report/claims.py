"""Claims of a paper that numbers can decide, and the machinery that decides them.

A claim is data: its words, where it stands, what was printed, and a function from the study (and a
preset, where it is about accuracy or cost) to a finding. The claims of a study are a list in a file of
its own.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.report.blocks import Cell, Column, Table, Tone, between, signed
from holdfast.report.loading import Study
from holdfast.report.measures import Summary, standard_error
from holdfast.report.paper import Printed

__all__ = ["Claim", "Finding", "Verdict", "above_zero", "count", "near", "not_run", "table"]

Verdict = Literal["holds", "does not hold", "undecided"]
_TONES: dict[Verdict, Tone] = {"holds": "good", "does not hold": "bad", "undecided": "open"}


@dataclass(frozen=True)
class Finding:
    """What our numbers say about a claim: the number, the verdict, and why."""

    number: str
    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True)
class Claim:
    """One claim.

    Args:
        text: The claim in one sentence.
        source: Where the paper makes it.
        printed: The paper's number, if it prints one.
        decide: Our finding. Claims about accuracy or cost are decided once per preset.
    """

    text: str
    source: str
    printed: str
    decide: Callable[[Study, str], Finding]


def not_run(what: str = "not run") -> Finding:
    """The finding where the runs do not exist."""
    return Finding("—", "undecided", what)


def above_zero(values: Summary | None, enough: int, unit: str = "points") -> Finding:
    """Decide "the difference is positive": by the 95 % interval, and only with enough seeds."""
    if values is None:
        return not_run()
    said = f"{signed(values.mean).text} {unit}"
    if values.count < enough:
        return Finding(said, "undecided", f"{values.count} of {enough} seeds")
    interval = f"95 %: {between(values.low, values.high)}"
    if values.low > 0:
        return Finding(said, "holds", interval)
    if values.high < 0:
        return Finding(said, "does not hold", interval)
    return Finding(said, "undecided", f"{interval} contains 0")


def near(values: Summary | None, paper: Printed, digits: int, unit: str = "") -> Finding:
    """Decide "the number is the printed one": within two standard errors of the difference."""
    if values is None:
        return not_run()
    spread = "" if math.isnan(values.std) else f" ± {values.std:.{digits}f}"
    said = f"{values.mean:.{digits}f}{spread}{unit}"
    if values.count < paper.runs:
        return Finding(said, "undecided", f"{values.count} of {paper.runs} values")
    allowed = 2 * math.hypot(paper.standard_error, standard_error(values))
    apart = abs(values.mean - paper.value)
    reason = f"{apart:.{digits}f} apart, 2 SE are {allowed:.{digits}f}"
    return Finding(said, "holds" if apart <= allowed else "does not hold", reason)


def _cell(finding: Finding) -> Cell:
    order = {"holds": "0", "undecided": "1", "does not hold": "2"}[finding.verdict]
    note = f"{finding.number}; {finding.reason}" if finding.reason else finding.number
    if finding.number == "—":
        note = finding.reason
    return Cell(finding.verdict, order, note, _TONES[finding.verdict])


def table(
    study: Study, claims: Sequence[Claim], presets: Sequence[str], name: str, title: str
) -> Table:
    """A row per claim, a column per preset (or one column for claims about the matrix)."""
    rows = [
        [
            Cell(claim.text, claim.text),
            *(_cell(claim.decide(study, preset)) for preset in presets),
            Cell(claim.printed or "—", claim.printed or None),
            Cell(claim.source, claim.source),
        ]
        for claim in claims
    ]
    heads = [Column(preset or "Ours", numeric=False) for preset in presets]
    return Table(
        name,
        title,
        [
            Column("Claim", numeric=False),
            *heads,
            Column("Printed", numeric=False),
            Column("Source", numeric=False),
        ],
        rows,
        command=study.command("all"),
    )


def count(study: Study, claims: Sequence[Claim], presets: Sequence[str]) -> dict[Verdict, int]:
    """How many findings there are of each verdict."""
    found: dict[Verdict, int] = {"holds": 0, "does not hold": 0, "undecided": 0}
    for claim in claims:
        for preset in presets:
            found[claim.decide(study, preset).verdict] += 1
    return found
