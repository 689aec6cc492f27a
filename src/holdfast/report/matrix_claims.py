"""What the paper claims about the matrix itself (Figures 1 and 2), and how it is decided."""

from functools import partial
from statistics import fmean

from holdfast.report.claims import Claim, Finding, near, not_run
from holdfast.report.loading import Study
from holdfast.report.matrix import errors, share_of_diagonal, stable_ranks
from holdfast.report.measures import summary
from holdfast.report.paper import DIAGONAL_SHARE, FROBENIUS, STABLE_RANK

__all__ = ["MATRIX_CLAIMS"]

NETWORKS = 5  # the paper's own study has five networks
Key = tuple[str, int | None]
SKETCH: Key = ("count_sketch", None)
DIAGONAL: Key = ("diagonal", None)
BLOCK: Key = ("block_diagonal", None)
RANK_50: Key = ("low_rank", 50)


def _error_above(study: Study, _: str, key: Key) -> Finding:
    """Not well-approximated: more than half of the squared norm is missed."""
    values = summary(errors(study, key))
    if values is None:
        return not_run()
    return _counted(f"{values.mean:.1f} % missed", values.mean > 50, values.count)


def _counted(said: str, holds: bool, networks: int) -> Finding:
    if networks < NETWORKS:
        return Finding(said, "undecided", f"{networks} of {NETWORKS} networks")
    return Finding(said, "holds" if holds else "does not hold")


def _share(study: Study, _: str) -> Finding:
    values = summary(share_of_diagonal(study))
    if values is None:
        return not_run()
    said = f"{values.mean:.1f} %"
    if values.count < NETWORKS:
        return Finding(said, "undecided", f"{values.count} of {NETWORKS} networks")
    between = f"95 %: {values.low:.1f} to {values.high:.1f} % over networks"
    if values.high < DIAGONAL_SHARE.value:
        return Finding(said, "holds", between)
    if values.low > DIAGONAL_SHARE.value:
        return Finding(said, "does not hold", between)
    return Finding(said, "undecided", f"{between}, which contains {DIAGONAL_SHARE.value}")


def _sketch_error(study: Study, _: str) -> Finding:
    paper = FROBENIUS[SKETCH]
    assert paper is not None
    values = summary(errors(study, SKETCH))
    return near(values, paper, 1, " %")


def _sketch_better(study: Study, _: str) -> Finding:
    """Compared network by network: the sketch's mean error against the other's."""
    worse = {key: errors(study, key) for key in (DIAGONAL, BLOCK)}
    mine = errors(study, SKETCH)
    if not mine or not all(worse.values()):
        return not_run()
    said = f"{fmean(mine):.1f} % against " + " and ".join(
        f"{fmean(values):.1f} %" for values in worse.values()
    )
    holds = all(max(mine) < min(values) for values in worse.values())
    decided = _counted(said, holds, len(worse[DIAGONAL]))
    if decided.verdict == "undecided":
        return decided
    return Finding(said, decided.verdict, f"largest of {len(mine)} sketches: {max(mine):.1f} %")


def _rank_50(study: Study, _: str) -> Finding:
    values = errors(study, RANK_50)
    if not values:
        return not_run()
    return _counted(
        f"{max(values):.0e} % at most".replace("e-0", "e−"), max(values) < 0.05, len(values)
    )


def _stable_rank(study: Study, _: str) -> Finding:
    values = summary(stable_ranks(study, "frobenius"))
    return near(values, STABLE_RANK, 2)


def _effective_rank(study: Study, _: str) -> Finding:
    values = stable_ranks(study, "trace")
    if not values:
        return not_run()
    return _counted(f"tr Ω/λ₁ = {fmean(values):.2f}", max(values) < 87.7, len(values))


MATRIX_CLAIMS: list[Claim] = [
    Claim(
        "The Fisher matrix is not approximated by its diagonal",
        "Figure 1, caption (i)",
        "94.7 % missed",
        partial(_error_above, key=DIAGONAL),
    ),
    Claim(
        "… nor by its block diagonal",
        "Figure 1, caption (i)",
        "82.8 % missed",
        partial(_error_above, key=BLOCK),
    ),
    Claim(
        "The diagonal is less than 5.3 % of the squared norm", "introduction", "< 5.3 %", _share
    ),
    Claim("The sketch (t = 50) misses 8.1 %", "Figure 1, table", "8.1 ± 10.2 %", _sketch_error),
    Claim(
        "The sketch approximates better than both",
        "Figure 1, caption (ii)",
        "8.1 %",
        _sketch_better,
    ),
    Claim("Rank 50 is a good approximation", "Figure 1, caption (iii)", "0.0 %", _rank_50),
    Claim(
        "The stable rank is 1.26 (‖Ω‖²_F/λ₁²)", "Figure 2, caption", "1.26 ± 0.13", _stable_rank
    ),
    Claim(
        "The effective rank is very small (below 1 % of 8,770, by Theorem 1's own definition)",
        "Figure 2, caption",
        "",
        _effective_rank,
    ),
]
