r"""What a run and a set of runs say, as pure functions of accuracies.

:math:`R` is the accuracy matrix: ``R[i, j]`` is the test accuracy on task :math:`j` after the last epoch of
task :math:`i`, both counted from 0; :math:`T` is the number of tasks. What was not tested before it was
learnt is not a number, or left out at the end of a row.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "Difference",
    "Summary",
    "accuracy_curve",
    "average_accuracy",
    "backward_transfer",
    "forgetting",
    "forward_transfer",
    "intransigence",
    "paired_difference",
    "summarise",
]

Array = NDArray[np.float64]
Matrix = Sequence[Sequence[float]] | Array
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(100)


def average_accuracy(accuracy: Matrix) -> float:
    r"""Mean accuracy over all tasks after the last one: :math:`\frac1T \sum_j R_{T-1,j}`."""
    return float(_matrix(accuracy)[-1].mean())


def forgetting(accuracy: Matrix) -> float:
    r"""Mean drop from the best accuracy a task had since it was learnt, before the last one was.

    .. math:: \frac1{T-1} \sum_{j<T-1} \bigl(\max_{j \le i<T-1} R_{ij} - R_{T-1,j}\bigr)

    Negative if tasks improved. Not a number for a single task.

    References:
        Chaudhry et al., Riemannian Walk for Incremental Learning, https://arxiv.org/abs/1801.10112
    """
    matrix = _matrix(accuracy)
    if len(matrix) < 2:
        return math.nan
    best = [matrix[task:-1, task].max() for task in range(len(matrix) - 1)]
    return float((best - matrix[-1, :-1]).mean())


def backward_transfer(accuracy: Matrix) -> float:
    r"""Mean change of a task's accuracy since it was learnt.

    .. math:: \frac1{T-1} \sum_{j<T-1} (R_{T-1,j} - R_{jj})

    References:
        Lopez-Paz and Ranzato, Gradient Episodic Memory, https://arxiv.org/abs/1706.08840
    """
    matrix = _matrix(accuracy)
    if len(matrix) < 2:
        return math.nan
    return float((matrix[-1] - np.diag(matrix))[:-1].mean())


def forward_transfer(accuracy: Matrix, initial: ArrayLike) -> float:
    r"""Mean gain on a task before it is learnt, over the untrained network.

    .. math:: \frac1{T-1} \sum_{j>0} (R_{j-1,j} - b_j)

    Args:
        accuracy: The accuracy matrix, with its upper triangle.
        initial: :math:`b`, the accuracy of the untrained network on every task.

    References:
        Lopez-Paz and Ranzato, Gradient Episodic Memory, https://arxiv.org/abs/1706.08840
    """
    matrix, start = _matrix(accuracy), _per_task(initial, accuracy, "initial")
    if len(matrix) < 2:
        return math.nan
    return float((np.diag(matrix, 1) - start[1:]).mean())


def intransigence(accuracy: Matrix, alone: ArrayLike) -> float:
    r"""Mean loss on a task, just after it is learnt, against a network that learnt nothing else.

    .. math:: \frac1T \sum_j (a_j - R_{jj})

    Args:
        accuracy: The accuracy matrix.
        alone: :math:`a`, the accuracy on every task of a network trained on that task alone.

    Note:
        Chaudhry et al. compare with a network trained on all tasks so far; a network trained on one
        task alone is the reference that regularisation holds back from.
    """
    return float((_per_task(alone, accuracy, "alone") - np.diag(_matrix(accuracy))).mean())


def accuracy_curve(accuracy: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """Mean accuracy over the tasks seen so far, after every epoch of every task in order.

    Args:
        accuracy: ``accuracy[task][epoch]`` lists the accuracies on tasks 0 to ``task``.
    """
    return [float(np.mean(seen)) for epochs in accuracy for seen in epochs]


@dataclasses.dataclass(frozen=True)
class Summary:
    """Mean, standard deviation and 95 % interval of the mean over seeds."""

    mean: float
    std: float
    low: float
    high: float
    count: int


@dataclasses.dataclass(frozen=True)
class Difference(Summary):
    """The mean of paired differences, with the two-sided p-value of Student's paired test."""

    p: float


def summarise(values: ArrayLike, ddof: int = 1) -> Summary:
    r"""Mean over seeds, its spread and :math:`\bar x \pm t_{0.975,n-1}\, s/\sqrt n`.

    Args:
        values: One number per seed.
        ddof: 1 is the sample standard deviation; 0 the population's, as the original code printed. The
            interval always uses the sample's.

    Returns:
        A single value has a mean only; spread and interval are not a number.
    """
    numbers = np.asarray(values, dtype=np.float64).reshape(-1)
    count = len(numbers)
    if count == 0:
        raise ValueError("nothing to summarise: expected one number per seed, got none")
    mean = float(numbers.mean())
    if count == 1:
        return Summary(mean, 0.0 if ddof == 0 else math.nan, math.nan, math.nan, 1)
    half = student_quantile(0.975, count - 1) * float(numbers.std(ddof=1)) / math.sqrt(count)
    return Summary(mean, float(numbers.std(ddof=ddof)), mean - half, mean + half, count)


def paired_difference(first: ArrayLike, second: ArrayLike) -> Difference:
    """First minus second, seed by seed: both lists name the same seeds in the same order."""
    a = np.asarray(first, dtype=np.float64).reshape(-1)
    b = np.asarray(second, dtype=np.float64).reshape(-1)
    if len(a) != len(b):
        raise ValueError(
            f"paired differences need the same seeds in both, got {len(a)} and {len(b)} values"
        )
    s = summarise(a - b)
    p = math.nan
    if s.count > 1:
        error = s.std / math.sqrt(s.count)
        if error > 0:
            p = 2 * (1 - student_distribution(abs(s.mean) / error, s.count - 1))
        else:
            p = 1.0 if s.mean == 0 else 0.0
    return Difference(s.mean, s.std, s.low, s.high, s.count, p)


def student_distribution(t: float, degrees: int) -> float:
    r"""Probability that a Student variable is at most ``t``.

    With :math:`t = \sqrt\nu \tan\varphi` the density becomes :math:`\propto \cos^{\nu-1}\varphi`, smooth on a
    bounded interval, so that Gauss-Legendre quadrature with 100 nodes is exact to about 1e-12.
    """
    if degrees < 1:
        raise ValueError(
            f"Student's distribution needs 1 or more degrees of freedom, got {degrees}"
        )
    angle = math.atan(t / math.sqrt(degrees))
    integral = angle / 2 * float(_WEIGHTS @ np.cos(angle / 2 * (_NODES + 1)) ** (degrees - 1))
    constant = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2))
    return 0.5 + constant / math.sqrt(math.pi) * integral


def student_quantile(probability: float, degrees: int) -> float:
    """The value that a Student variable stays below with the given probability (bisection)."""
    if not 0 < probability < 1:
        raise ValueError(f"a probability between 0 and 1 was expected, got {probability}")
    low, high = -1.0, 1.0
    while student_distribution(low, degrees) > probability:
        low *= 2
    while student_distribution(high, degrees) < probability:
        high *= 2
    for _ in range(80):  # 2⁻⁸⁰ of the bracket is below the rounding of a double
        middle = (low + high) / 2
        if student_distribution(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _matrix(accuracy: Matrix) -> Array:
    """The accuracy matrix as a checked square array; what rows leave out at their end is not a number."""
    rows = [np.asarray(row, dtype=np.float64) for row in accuracy]
    count = len(rows)
    if not count or any(
        row.ndim != 1 or not task < len(row) <= count for task, row in enumerate(rows)
    ):
        shapes = [row.shape for row in rows]
        raise ValueError(
            f"expected a square accuracy matrix (tasks learnt × tasks tested), got rows {shapes}"
        )
    matrix = np.full((count, count), math.nan)
    for task, row in enumerate(rows):
        matrix[task, : len(row)] = row
    return matrix


def _per_task(values: ArrayLike, accuracy: Matrix, what: str) -> Array:
    """One number per task of the accuracy matrix."""
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.shape != (len(_matrix(accuracy)),):
        raise ValueError(
            f"{what}: expected one accuracy per task, {len(_matrix(accuracy))}, "
            f"got shape {numbers.shape}"
        )
    return numbers
