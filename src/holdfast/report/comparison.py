"""Cells that set our numbers beside the paper's; every table of a study is built from them."""

import math

from holdfast.report.blocks import Cell, Tone, plus_minus, signed, size
from holdfast.report.loading import Study
from holdfast.report.measures import Summary, standard_error
from holdfast.report.paper import Printed
from holdfast.report.settings import Setting, words

__all__ = [
    "compared",
    "count",
    "delta_cell",
    "memory",
    "method",
    "paper_cell",
    "printed",
    "statistics",
    "strength",
    "strength_text",
    "within",
]


def printed(study: Study, setting: Setting) -> Printed | None:
    """The paper's number, where the setting is the one it was printed for (or may have been).

    The paper's diagonal is the flattened one; which normalisation of it made the printed number is
    open: both count. A correct diagonal in its place stands beside the number as well.
    """
    candidate = setting.preset == "original-code" and setting.flattened is not None
    known = setting in study.primaries or setting in study.companions
    return setting.paper if known or candidate else None


def compared(ours: Summary | None, paper: Printed | None) -> tuple[float | None, float | None]:
    r"""Difference to the paper and its standard error, :math:`\sqrt{s^2/n + s_P^2/n_P}`."""
    if ours is None or paper is None:
        return None, None
    error = math.hypot(standard_error(ours), paper.standard_error)
    return ours.mean - paper.value, error


def within(
    delta: float | None, error: float | None, digits: int = 1, *, decided: bool = True
) -> Cell:
    """Whether two numbers differ by at most two standard errors, or print as the same number.

    Without enough seeds to decide anything, the answer is given without colour.
    """
    if delta is None or error is None or math.isnan(error):
        return Cell()
    if round(abs(delta), digits) == 0:
        return Cell("yes", 0.0, tone="good" if decided else "")
    far = abs(delta) / error if error else math.inf
    near = far <= 2
    text = f"{'yes' if near else 'no'}, {far:.1f}" if math.isfinite(far) else "no"
    tone: Tone = "good" if near else "bad"
    return Cell(text, far, tone=tone if decided else "")


def delta_cell(delta: float | None, error: float | None, digits: int = 1) -> Cell:
    """A difference with its standard error in brackets."""
    shown = signed(delta, digits)
    if error is None or math.isnan(error):
        return shown
    return Cell(f"{shown.text} ({error:.{digits}f})", shown.value)


def paper_cell(value: Printed | None, digits: int = 1) -> Cell:
    """The printed number with its spread."""
    return Cell() if value is None else plus_minus(value.value, value.spread, digits)


def method(setting: Setting, name: str = "") -> Cell:
    """Importance and approximation, or another name of it; sorted in the order of the tables."""
    name = name or setting.label
    if setting.importance is None:
        return Cell(name, f"~{name}")
    text = f"{words(setting.importance)} · {name}"
    return Cell(text, "".join(f"{part!s:>12}" for part in setting.order[1:4]))


def statistics(values: Summary | None, digits: int = 1) -> Cell:
    """Mean ± standard deviation."""
    return Cell() if values is None else plus_minus(values.mean, values.std, digits)


def count(number: int) -> Cell:
    """A whole number."""
    return Cell(f"{number:,}", number)


def strength_text(value: float) -> str:
    """A strength as it is read: 31.6, 1,000, 3.16e6."""
    if 100 <= value < 1e6:
        return f"{value:,.0f}"
    return f"{value:.3g}".replace("e+0", "e").replace("e-0", "e−")


def strength(setting: Setting) -> Cell:
    """λ of a setting."""
    if setting.strength is None:
        return Cell()
    return Cell(strength_text(setting.strength), setting.strength)


def memory(setting: Setting) -> Cell:
    """Bytes of the penalty; none without a regularizer."""
    if setting.approximation is None:
        return Cell()
    return size(max(run.result.penalty_bytes for run in setting.runs))
