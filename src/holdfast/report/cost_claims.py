"""What the paper claims about cost, decided by seconds and bytes of the same runs."""

from collections.abc import Callable
from functools import partial

from holdfast.report.blocks import size
from holdfast.report.claims import Claim, Finding, not_run
from holdfast.report.loading import Study
from holdfast.report.measures import median_seconds, work_seconds
from holdfast.report.settings import Setting, words

__all__ = ["COST_CLAIMS"]

MUCH = 2.0  # "significantly more", "not affordable": more than this many times as much
LITTLE = 2.0  # "slightly larger", "one pass, as the diagonal": at most this many times as much
Key = tuple[str, int | None]
SKETCH: Key = ("count_sketch", None)
DIAGONAL: Key = ("diagonal", None)
RANK_50: Key = ("low_rank", 50)
FULL: Key = ("full", None)


def _worst(
    study: Study, preset: str, one: Key, two: Key, cost: Callable[[Setting], float]
) -> tuple[Setting, Setting, float] | None:
    """Two methods and the ratio of their costs, for the importance where it is largest."""
    found = []
    for importance in ("ewc", "mas"):
        a, b = study.find(preset, importance, *one), study.find(preset, importance, *two)
        if a and b:
            found.append((a, b, cost(a) / max(cost(b), 1e-9)))
    return max(found, key=lambda pair: pair[2], default=None)


def _bytes(setting: Setting) -> float:
    return float(max(run.result.penalty_bytes for run in setting.runs))


def _consolidation(setting: Setting) -> float:
    return median_seconds(setting, "consolidation")


def _more_computation(study: Study, preset: str, costly: Key) -> Finding:
    """Seconds of consolidation against the sketch's."""
    found = _worst(study, preset, costly, SKETCH, _consolidation)
    if found is None:
        return not_run()
    a, b, ratio = found
    said = f"{words(a.importance)}: {_consolidation(a):.2f} s, sketched {_consolidation(b):.2f} s"
    return Finding(said, "holds" if ratio > MUCH else "does not hold", f"{ratio:.2g} ×")


def _unaffordable(study: Study, preset: str, costly: Key) -> Finding:
    """Seconds of the whole run, or bytes of the penalty, against the sketch's."""
    seconds = _worst(study, preset, costly, SKETCH, work_seconds)
    memory = _worst(study, preset, costly, SKETCH, _bytes)
    if seconds is None or memory is None:
        return not_run()
    a, b, slower = seconds
    c, d, larger = memory
    said = (
        f"{words(a.importance)}: {work_seconds(a):.0f} s a run, sketched {work_seconds(b):.0f} s; "
        f"{size(_bytes(c)).text}, sketched {size(_bytes(d)).text}"
    )
    much = slower > MUCH or larger > MUCH
    return Finding(
        said, "holds" if much else "does not hold", f"{slower:.2g} × and {larger:.2g} ×"
    )


def _one_pass(study: Study, preset: str) -> Finding:
    found = _worst(study, preset, SKETCH, DIAGONAL, _consolidation)
    if found is None:
        return not_run()
    a, b, ratio = found
    said = f"{words(a.importance)}: {_consolidation(a):.2f} s, diagonal {_consolidation(b):.2f} s"
    return Finding(said, "holds" if ratio <= LITTLE else "does not hold", f"{ratio:.2g} ×")


def _slightly_larger(study: Study, preset: str) -> Finding:
    found = _worst(study, preset, SKETCH, DIAGONAL, _bytes)
    if found is None:
        return not_run()
    a, b, ratio = found
    said = f"{size(_bytes(a)).text}, diagonal {size(_bytes(b)).text}"
    return Finding(said, "holds" if ratio <= LITTLE else "does not hold", f"{ratio:.3g} ×")


COST_CLAIMS: list[Claim] = [
    Claim(
        "Low rank (50) requires significantly more computation than sketching",
        "Figure 3, caption",
        "",
        partial(_more_computation, costly=RANK_50),
    ),
    Claim(
        "Low rank (50) is not affordable in practice",
        "Figures 1 and 3, captions",
        "",
        partial(_unaffordable, costly=RANK_50),
    ),
    Claim(
        "The full matrix is not affordable in practice",
        "Figure 3, caption",
        "",
        partial(_unaffordable, costly=FULL),
    ),
    Claim("Sketching takes one pass, as the diagonal does", "contribution 3", "", _one_pass),
    Claim(
        "The sketch is slightly larger than the diagonal",
        "contribution 3",
        "t m to m: 50 ×",
        _slightly_larger,
    ),
]
