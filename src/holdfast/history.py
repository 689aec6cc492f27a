r"""How the past adds up: :math:`\Omega_\tau = w_{old}\,\Omega_{\tau-1} + w_{new}\,\Omega`.

One convention, the paper's: the weight of a moving average is that of the *new* task.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from holdfast.configuration import plain, register

__all__ = ["HISTORIES", "History", "Mean", "MovingAverage", "Sum"]


class History(ABC):
    """A rule for the weights of the past and of the task that is added."""

    @abstractmethod
    def weights(self, tasks: int) -> tuple[float, float]:
        """(weight of the past, weight of the new matrix) when ``tasks`` tasks are already in."""


@dataclass(frozen=True)
class Sum(History):
    """Every task counts fully, for ever. The default: a moving average forgets.

    Example:
        >>> Sum().weights(3)
        (1.0, 1.0)
    """

    def weights(self, tasks: int) -> tuple[float, float]:
        return 1.0, 1.0


@dataclass(frozen=True)
class Mean(History):
    """Every task counts the same, and the total does not grow.

    Example:
        >>> Mean().weights(3)
        (0.75, 0.25)
    """

    def weights(self, tasks: int) -> tuple[float, float]:
        return tasks / (tasks + 1), 1 / (tasks + 1)


@dataclass(frozen=True)
class MovingAverage(History):
    r"""The paper's rule, Ω ← α Ω_new + (1 − α) Ω_old.

    Args:
        new: α, the weight of the new task.
        start: "first" takes the first matrix whole; "zero" runs the recurrence from zero, so that the
            first matrix is scaled by α.

    Example:
        >>> MovingAverage(new=0.25).weights(0), MovingAverage(new=0.25).weights(1)
        ((0.0, 1.0), (0.75, 0.25))
    """

    new: float = 0.5
    start: Literal["first", "zero"] = "first"

    def __post_init__(self) -> None:
        object.__setattr__(self, "new", plain(self.new))
        if not 0 < self.new <= 1:
            raise ValueError(f"new must lie in (0, 1], got {self.new}")
        if self.start not in ("first", "zero"):
            raise ValueError(f"start must be 'first' or 'zero', got {self.start!r}")

    def weights(self, tasks: int) -> tuple[float, float]:
        if tasks == 0:
            return 0.0, 1.0 if self.start == "first" else self.new
        return 1 - self.new, self.new


HISTORIES = register(
    History, "history", {"moving_average": MovingAverage, "sum": Sum, "mean": Mean}
)
