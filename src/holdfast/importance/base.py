r"""What matters: a scalar function φ per example whose gradient is a row of W."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["Importance", "Loss"]

Loss = Callable[[Any, Any], Tensor]  # (outputs, batch) -> one loss per example


class Importance(ABC):
    r"""A rule :math:`\varphi`; row i of W is :math:`w_i = \nabla_\theta \varphi(x_i; \theta^*)`.

    A subclass writes :meth:`potentials`; it never learns which approximation reads the rows.
    """

    @property
    def uniforms(self) -> bool:
        """Whether the rule needs one uniform random number per example."""
        return False

    @property
    def several(self) -> bool:
        """Whether an example may have more than one row."""
        return False

    def rows_per_example(self, outputs: Any) -> int:
        """How many rows an example has; more than one costs as many backward passes."""
        return 1

    def check(self, outputs: Any, batch: Any, loss: Loss | None) -> None:
        """Refuse, once and on the first batch, what the rule cannot serve."""
        return

    @abstractmethod
    def potentials(
        self, outputs: Any, batch: Any, *, loss: Loss | None, uniforms: Tensor | None
    ) -> Tensor:
        """The scalars whose gradients are the rows: shape (B,), or (B, R) for R rows per example.

        Args:
            outputs: What the forward pass returned for ``batch``.
            batch: The batch itself, on the model's device.
            loss: The caller's per-example loss, or None for the default.
            uniforms: One uniform number per example where :attr:`uniforms` is set.
        """


def class_logits(outputs: Any, why: str) -> Tensor:
    """The outputs as class logits (B, K), or an error that says why they are needed."""
    if not isinstance(outputs, Tensor) or outputs.dim() != 2:
        got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(f"{why} needs class logits of shape (B, K), got {got}; pass forward=")
    return outputs


def output_tensor(outputs: Any, why: str) -> Tensor:
    """The outputs as one tensor, or an error that says why it is needed."""
    if not isinstance(outputs, Tensor):
        raise ValueError(
            f"{why} needs the model's outputs as one tensor, got {type(outputs).__name__}; "
            "pass forward=lambda model, batch: … that returns it"
        )
    return outputs
