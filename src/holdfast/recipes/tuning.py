r"""Choosing a strength on validation data, on a grid that grows until the best lies inside it.

The grid holds the powers :math:`10^{k/2}`: factors of √10. The score of a strength is the mean over tuning
seeds of the mean validation accuracy over all tasks after the last one. Tuning seeds are never reported.

Where a strength is far too large, nothing new is learnt, scores hardly differ, and chance makes one of them
the best of its neighbours. A search that knows how well a network does that holds nothing is not
deceived: what is worse than that is too strong.
"""

import dataclasses
from collections.abc import Sequence

from holdfast.approximation import (
    BlockDiagonal,
    Diagonal,
    DiagonalPlusLowRank,
    Kronecker,
    KroneckerPlusLowRank,
)
from holdfast.experiment import Experiment
from holdfast.history import Sum
from holdfast.importance import MAS
from holdfast.recipes.recipe import Score
from holdfast.regularizer import Regularizer

__all__ = ["GRID", "MARGIN", "SEEDS", "Tuning", "short_grid", "strength"]

GRID = range(3, 10)  # exponents in halves: 10^1.5 to 10^4.5, seven values
SEEDS = (100, 101, 102)
MARGIN = 0.01  # accuracy by which a best that is worse than holding nothing may be so by chance
WIDEST = (-12, 24)  # 10^-6 to 10^12: beyond, a strength is no strength any more


def short_grid(regularizer: Regularizer) -> range:
    """Three values to begin with where a run takes minutes, around what was best for methods of its kind.

    Where a search begins decides how long it takes: it goes on until the best value has a worse one on
    either side, and is no worse than holding nothing.
    """
    approximation = regularizer.approximation
    middle = 4  # sketches and low rank
    if isinstance(approximation, Kronecker | KroneckerPlusLowRank):
        middle = 2
    elif isinstance(approximation, Diagonal | BlockDiagonal | DiagonalPlusLowRank):
        middle = 5
    if not isinstance(regularizer.history, Sum):  # the total does not grow with the tasks
        middle += 1
    if regularizer.importance == MAS():  # of logits, whose squares are large numbers
        middle -= 6
    return range(middle - 1, middle + 2)


def strength(exponent: int) -> float:
    """10 to the power of half the exponent, to six digits so that it reads well in files."""
    return float(f"{10 ** (exponent / 2):.6g}")


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The search for the strength of one method.

    Attributes:
        method: An experiment whose strength and seed are replaced.
        grid: Exponents to begin with, at equal steps of 1 or 2.
        seeds: Seeds of the search.
        widest: The lowest and the highest exponent to which the grid may grow.
        floor: The same without a regularizer, whose seed is replaced; no strength is chosen that is worse.
    """

    method: Experiment
    grid: Sequence[int] = GRID
    seeds: Sequence[int] = SEEDS
    widest: tuple[int, int] = WIDEST
    floor: Experiment | None = None

    def experiments(self, score: Score) -> list[Experiment]:
        """The runs of the search as far as it can be planned now, finished ones included."""
        held = [
            self._at(exponent, seed) for exponent in self._exponents(score) for seed in self.seeds
        ]
        return self._without() + held

    def chosen(self, score: Score) -> float | None:
        """The best strength, the smaller of two equals; None while the search goes on."""
        scores = self._scores(self._exponents(score), score)
        if scores is None or self._least(score) is None:
            return None
        return strength(_best(scores))

    def _exponents(self, score: Score) -> range:
        """The grid, one value wider on the side where its best lies at the edge, as often as needed."""
        first, last = self.grid[0], self.grid[-1]
        step, least = self.grid[1] - first if len(self.grid) > 1 else 1, self._least(score)
        while True:
            scores = self._scores(range(first, last + 1, step), score)
            if scores is None or least is None:
                return range(first, last + 1, step)
            best = _best(scores)
            if best == last and last < self.widest[1]:
                last += step
            elif (best == first or scores[best] < least - MARGIN) and first > self.widest[0]:
                first -= step
            else:
                return range(first, last + 1, step)

    def _scores(self, exponents: Sequence[int], score: Score) -> dict[int, float] | None:
        """The mean score of every exponent, or None if a run is missing."""
        found = {}
        for exponent in exponents:
            mean = _mean([score(self._at(exponent, seed)) for seed in self.seeds])
            if mean is None:
                return None
            found[exponent] = mean
        return found

    def _without(self) -> list[Experiment]:
        """The runs that hold nothing."""
        if self.floor is None:
            return []
        return [dataclasses.replace(self.floor, seed=seed, role="tune") for seed in self.seeds]

    def _least(self, score: Score) -> float | None:
        """The mean score of holding nothing, 0 if nobody asked, None if a run is missing."""
        return _mean([score(run) for run in self._without()]) if self.floor else 0.0

    def _at(self, exponent: int, seed: int) -> Experiment:
        """A run of the search."""
        assert self.method.regularizer is not None
        regularizer = dataclasses.replace(self.method.regularizer, strength=strength(exponent))
        return dataclasses.replace(self.method, regularizer=regularizer, seed=seed, role="tune")


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean, or None if one is missing."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def _best(scores: dict[int, float]) -> int:
    """The exponent with the highest score, the smallest of equals."""
    return max(scores, key=lambda exponent: (scores[exponent], -exponent))
