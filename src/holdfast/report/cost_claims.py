"""What the paper claims about cost, decided by seconds and bytes of the same runs."""

from functools import partial

from holdfast.report.blocks import size
from holdfast.report.claims import Claim, Finding, not_run
from holdfast.report.loading import Study
from holdfast.report.measures import mean_seconds
from holdfast.report.settings import Setting

__all__ = ["COST_CLAIMS"]

MUCH = 2.0  # "significantly more", "not affordable": more than this many times as much
LITTLE = 2.0  # "slightly larger", "one pass, as the diagonal": at most this many times as much
Key = tuple[str, int | None]
SKETCH: Key = ("count_sketch", None)
DIAGONAL: Key = ("diagonal", None)
RANK_50: Key = ("low_rank", 50)
FULL: Key = ("full", None)


def _both(study: Study, preset: str, one: Key, two: Key) -> tuple[Setting, Setting] | None:
    """Two methods of the first importance that has both: cost does not depend on which."""
    for importance in ("ewc", "mas"):
        a, b = study.find(preset, importance, *one), study.find(preset, importance, *two)
        if a and b:
            return a, b
    return None


def _bytes(setting: Setting) -> int:
    return max(run.result.penalty_bytes for run in setting.runs)


def _whole(setting: Setting) -> float:
    """Seconds of training and consolidation: evaluation is the experiment's, not the method's."""
    return mean_seconds(setting, "training") + mean_seconds(setting, "consolidation")


def _more_computation(study: Study, preset: str, costly: Key) -> Finding:
    """Seconds of consolidation against the sketch's."""
    found = _both(study, preset, costly, SKETCH)
    if found is None:
        return not_run()
    ours, sketch = (mean_seconds(s, "consolidation") for s in found)
    ratio = ours / max(sketch, 1e-9)
    said = f"{ours:.2f} s, sketched {sketch:.2f} s"
    return Finding(said, "holds" if ratio > MUCH else "does not hold", f"{ratio:.2g} ×")


def _unaffordable(study: Study, preset: str, costly: Key) -> Finding:
    """Seconds of the whole run and bytes of the penalty against the sketch's."""
    found = _both(study, preset, costly, SKETCH)
    if found is None:
        return not_run()
    a, b = found
    seconds, memory = _whole(a) / max(_whole(b), 1e-9), _bytes(a) / max(_bytes(b), 1)
    said = (
        f"{_whole(a):.1f} s a run and {size(_bytes(a)).text}, "
        f"sketched {_whole(b):.1f} s and {size(_bytes(b)).text}"
    )
    much = seconds > MUCH or memory > MUCH
    reason = f"{seconds:.2g} × and {memory:.2g} ×"
    return Finding(said, "holds" if much else "does not hold", reason)


def _one_pass(study: Study, preset: str) -> Finding:
    found = _both(study, preset, SKETCH, DIAGONAL)
    if found is None:
        return not_run()
    sketch, diagonal = (mean_seconds(s, "consolidation") for s in found)
    ratio = sketch / max(diagonal, 1e-9)
    said = f"{sketch:.2f} s, diagonal {diagonal:.2f} s"
    return Finding(said, "holds" if ratio <= LITTLE else "does not hold", f"{ratio:.2g} ×")


def _slightly_larger(study: Study, preset: str) -> Finding:
    found = _both(study, preset, SKETCH, DIAGONAL)
    if found is None:
        return not_run()
    sketch, diagonal = (_bytes(s) for s in found)
    ratio = sketch / max(diagonal, 1)
    said = f"{size(sketch).text}, diagonal {size(diagonal).text}"
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
