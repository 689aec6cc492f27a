"""What the paper claims about accuracy and cost in the synthetic study, and how it is decided."""

from collections.abc import Callable
from typing import Any

from holdfast.report.blocks import signed
from holdfast.report.claims import Claim, Finding, above_zero, not_run
from holdfast.report.comparison import compared, printed
from holdfast.report.cost_claims import COST_CLAIMS
from holdfast.report.loading import Study
from holdfast.report.measures import (
    Summary,
    difference,
    finals,
    first_task_drop,
    summary,
)
from holdfast.report.paper import ACCURACY
from holdfast.report.settings import Setting, words

__all__ = ["ACCURACY_CLAIMS", "reproduced"]

Key = tuple[str, int | None]

SKETCH: Key = ("count_sketch", None)
DIAGONAL: Key = ("diagonal", None)
BLOCK: Key = ("block_diagonal", None)
RANK_50: Key = ("low_rank", 50)
FULL: Key = ("full", None)
BOTH = ("ewc", "mas")


def _gap(study: Study, preset: str, importance: str, one: Key, two: Key) -> Summary | None:
    a, b = study.find(preset, importance, *one), study.find(preset, importance, *two)
    return difference(finals(a), finals(b)) if a and b else None


def _better(importance: str, one: Key, two: Key) -> Callable[[Study, str], Finding]:
    return lambda study, preset: above_zero(
        _gap(study, preset, importance, one, two), study.enough
    )


def _all(findings: dict[str, Finding]) -> Finding:
    """Holds if every part holds; one part that fails is enough against it."""
    said = ", ".join(f"{words(name)} {finding.number}" for name, finding in findings.items())
    verdicts = [finding.verdict for finding in findings.values()]
    if "does not hold" in verdicts:
        return Finding(said, "does not hold")
    if "undecided" in verdicts:
        open_ones = [f for f in findings.values() if f.verdict == "undecided"]
        return Finding(said, "undecided", open_ones[0].reason)
    return Finding(said, "holds")


def _consistently(study: Study, preset: str) -> Finding:
    """Better on average in both regimes, with the share of seeds on which it is."""
    parts = {}
    for importance in BOTH:
        sketch = study.find(preset, importance, *SKETCH)
        diagonal = study.find(preset, importance, *DIAGONAL)
        if sketch is None or diagonal is None:
            return not_run()
        left, right = finals(sketch), finals(diagonal)
        shared = left.keys() & right.keys()
        wins = sum(left[seed] > right[seed] for seed in shared)
        verdict = above_zero(difference(left, right), study.enough)
        parts[importance] = Finding(
            f"{wins} of {len(shared)} seeds", verdict.verdict, verdict.reason
        )
    return _all(parts)


def _small_sketch(study: Study, preset: str) -> Finding:
    """Some sketch with t ≤ 50, otherwise as in the table, beats the diagonal in both regimes."""
    parts = {}
    for importance in BOTH:
        diagonal = study.find(preset, importance, *DIAGONAL)
        headline = study.find(preset, importance, *SKETCH)
        sketches = [
            s
            for s in study.reported(preset)
            if headline is not None
            and s.approximation == "count_sketch"
            and _but_size(s) == _but_size(headline)
            and s.part("approximation").get("size", 51) <= 50
        ]
        if diagonal is None or not sketches:
            return not_run()
        found = [
            above_zero(difference(finals(s), finals(diagonal)), study.enough) for s in sketches
        ]
        order = ("holds", "undecided", "does not hold")
        parts[importance] = min(found, key=lambda finding: order.index(finding.verdict))
    return _all(parts)


def _but_size(setting: Setting) -> dict[str, Any]:
    """What a sketch is beside its size and the strength that suits it."""
    held = dict(setting.experiment["regularizer"])
    held["approximation"] = {k: v for k, v in held["approximation"].items() if k != "size"}
    del held["strength"]
    return {**setting.experiment, "regularizer": held}


def _forgets_less(importance: str) -> Callable[[Study, str], Finding]:
    def decide(study: Study, preset: str) -> Finding:
        sketch = study.find(preset, importance, *SKETCH)
        diagonal = study.find(preset, importance, *DIAGONAL)
        if sketch is None or diagonal is None:
            return not_run()
        less = difference(first_task_drop(diagonal), first_task_drop(sketch))
        return above_zero(less, study.enough)

    return decide


def reproduced(study: Study, preset: str) -> Finding:
    """How many printed accuracies lie within two standard errors of ours."""
    near_ones: list[Setting] = []
    far: list[Setting] = []
    few: list[Setting] = []
    for s in study.primaries:
        paper = printed(study, s)
        if s.preset != preset or paper is None:
            continue
        delta, error = compared(summary(list(finals(s).values())), paper)
        if len(s.runs) < study.enough or delta is None or error is None:
            few.append(s)
        else:
            (near_ones if abs(delta) <= 2 * error else far).append(s)
    total = len(ACCURACY[study.recipe])
    said = f"{len(near_ones)} of {total} cells within 2 SE"
    if far:
        names = ", ".join(f"{words(s.importance)} {s.label}" for s in far)
        return Finding(said, "does not hold", f"outside: {names}")
    if few or len(near_ones) < total:
        missing = total - len(near_ones)
        return Finding(
            said, "undecided", f"{missing} with fewer than {study.enough} seeds or not run"
        )
    return Finding(said, "holds")


def _printed_gap(importance: str, one: Key, two: Key) -> str:
    cells = ACCURACY["toy"]
    gap = cells[(importance, *one)].value - cells[(importance, *two)].value
    return f"{signed(gap).text} points"


def _pairs() -> list[Claim]:
    """One claim per regime and ordered pair that a caption names."""
    caption = "Figure 3, caption"
    named = [
        ("Sketched beats diagonal", SKETCH, DIAGONAL, caption),
        ("Sketched beats block-diagonal", SKETCH, BLOCK, caption),
        ("Rank 50 beats sketched", RANK_50, SKETCH, caption),
        ("Full beats sketched", FULL, SKETCH, caption),
    ]
    return [
        Claim(
            f"{text} ({words(importance)})",
            source,
            _printed_gap(importance, one, two),
            _better(importance, one, two),
        )
        for text, one, two, source in named
        for importance in BOTH
    ]


ACCURACY_CLAIMS: list[Claim] = [
    *_pairs(),
    Claim(
        "Sketching consistently improves on the diagonal",
        "abstract; contribution 4",
        "",
        _consistently,
    ),
    Claim(
        "t ≤ 50 is enough to beat the diagonal (EWC and MAS)", "contribution 3", "", _small_sketch
    ),
    *(
        Claim(
            f"Sketched forgets less of the first task than diagonal ({words(importance)})",
            "appendix B.1",
            "",
            _forgets_less(importance),
        )
        for importance in BOTH
    ),
    *COST_CLAIMS,
    Claim(
        "The printed accuracies come out again", "Figure 3; appendix B.1", "12 cells", reproduced
    ),
]
