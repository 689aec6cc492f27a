"""What the paper printed, as data: every number with the place it was read from.

Li et al., *Lifelong Learning with Sketched Structural Regularization* (2021, arXiv 2104.08604).
Percentages throughout. The spreads are population standard deviations (ddof 0) over ``runs`` runs.
"""

import math
from dataclasses import dataclass

from holdfast.recipes.permuted_mnist import FIRST_SEED

__all__ = [
    "ACCURACY",
    "DIAGONAL_SHARE",
    "FROBENIUS",
    "STABLE_RANK",
    "Printed",
    "accuracy",
    "paper_seeds",
]


def paper_seeds(recipe: str, preset: str) -> range | None:
    """The paper's "5 runs with different random seeds", as the authors' files number them.

    None where they are not known, or where a preset's seeds are others.
    """
    if recipe == "toy":
        return range(5)
    first = FIRST_SEED.get(preset) if recipe == "permuted-mnist" else None
    return None if first is None else range(first, first + 5)


@dataclass(frozen=True)
class Printed:
    """One number of the paper.

    Args:
        value: The mean, in per cent where it is a share.
        spread: The standard deviation printed behind the ±.
        runs: How many values the mean and the spread were taken over.
        source: Where it stands.
    """

    value: float
    spread: float | None
    runs: int
    source: str

    @property
    def standard_error(self) -> float:
        r"""Standard error of the printed mean, :math:`s_0 \sqrt{n/(n-1)} / \sqrt n`."""
        if self.spread is None or self.runs < 2:
            return 0.0
        return self.spread / math.sqrt(self.runs - 1)


_FIGURE_3 = "Figure 3, table"
_LEGEND = "appendix B.1, legend of the accuracy curves (digits from the authors' notebooks)"
_TABLE_1 = "Table 1"

# recipe -> (importance, approximation, rank of a low-rank matrix or None) -> number
ACCURACY: dict[str, dict[tuple[str, str, int | None], Printed]] = {
    "toy": {
        ("ewc", "diagonal", None): Printed(88.0, 7.4, 5, _FIGURE_3),
        ("ewc", "block_diagonal", None): Printed(79.3, 9.8, 5, _FIGURE_3),
        ("ewc", "count_sketch", None): Printed(92.1, 6.8, 5, _FIGURE_3),
        ("ewc", "low_rank", 1): Printed(83.2, 12.1, 5, _LEGEND),
        ("ewc", "low_rank", 50): Printed(93.9, 3.9, 5, _FIGURE_3),
        ("ewc", "full", None): Printed(95.7, 5.4, 5, _FIGURE_3),
        ("mas", "diagonal", None): Printed(83.1, 5.6, 5, _FIGURE_3),
        ("mas", "block_diagonal", None): Printed(76.6, 12.0, 5, _FIGURE_3),
        ("mas", "count_sketch", None): Printed(85.9, 9.6, 5, _FIGURE_3),
        ("mas", "low_rank", 1): Printed(85.5, 9.2, 5, _LEGEND),
        ("mas", "low_rank", 50): Printed(84.2, 9.8, 5, _FIGURE_3),
        ("mas", "full", None): Printed(89.9, 7.2, 5, _FIGURE_3),
    },
    "permuted-mnist": {
        ("ewc", "diagonal", None): Printed(88.3, 0.8, 5, _TABLE_1),
        ("ewc", "count_sketch", None): Printed(89.8, 0.9, 5, _TABLE_1),
        ("mas", "diagonal", None): Printed(86.7, 1.2, 5, _TABLE_1),
        ("mas", "count_sketch", None): Printed(90.4, 0.8, 5, _TABLE_1),
    },
    "cifar100": {
        ("ewc", "diagonal", None): Printed(90.8, 1.5, 10, _TABLE_1),
        ("ewc", "count_sketch", None): Printed(93.6, 0.4, 10, _TABLE_1),
        ("mas", "diagonal", None): Printed(89.9, 1.2, 10, _TABLE_1),
        ("mas", "count_sketch", None): Printed(93.2, 0.6, 10, _TABLE_1),
    },
}

_FIGURE_1 = "Figure 1, table"
# ‖Ω̂ − Ω‖²_F / ‖Ω‖²_F in per cent; the sketched one over 5 networks × 5 sketches
FROBENIUS: dict[tuple[str, int | None], Printed | None] = {
    ("diagonal", None): Printed(94.7, 0.6, 5, _FIGURE_1),
    ("block_diagonal", None): Printed(82.8, 1.3, 5, _FIGURE_1),
    ("count_sketch", None): Printed(8.1, 10.2, 25, _FIGURE_1),
    ("low_rank", 1): None,
    ("low_rank", 50): Printed(0.0, 0.0, 5, _FIGURE_1),
}

STABLE_RANK = Printed(1.26, 0.13, 5, "Figure 2, caption")  # ‖Ω‖²_F / λ₁², as the code computed it
DIAGONAL_SHARE = Printed(5.3, None, 5, "Introduction")  # upper limit, of the squared norm


def accuracy(
    recipe: str, importance: str | None, approximation: str | None, rank: int | None
) -> Printed | None:
    """The printed average accuracy of a cell, or None where the paper has none."""
    if importance is None or approximation is None:
        return None
    return ACCURACY.get(recipe, {}).get((importance, approximation, rank))
