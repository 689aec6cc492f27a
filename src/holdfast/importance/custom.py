"""Any importance: a function of the outputs, one scalar per example."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from holdfast.importance.base import Importance, Loss

__all__ = ["Custom"]


@dataclass(frozen=True)
class Custom(Importance):
    """Your own φ.

    Args:
        fn: ``fn(outputs, batch) -> (B,)``, one differentiable scalar per example.

    Example:
        >>> margin = Custom(lambda outputs, batch: outputs.max(1).values - outputs.mean(1))
    """

    fn: Callable[[Any, Any], Tensor]

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(f"fn must be a function of (outputs, batch), got {self.fn!r}")

    def potentials(
        self, outputs: Any, batch: Any, *, loss: Loss | None, uniforms: Tensor | None
    ) -> Tensor:
        return self.fn(outputs, batch)
