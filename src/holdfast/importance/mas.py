"""Memory-aware synapses: rows are gradients of the squared norm of the outputs."""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from holdfast.importance.base import Importance, Loss, output_tensor

__all__ = ["MAS"]


@dataclass(frozen=True)
class MAS(Importance):
    r"""Sensitivity of the outputs, φ(x) = ‖f(x; θ)‖²; needs no labels.

    Args:
        outputs: f is the ``"logits"``, or their ``"softmax"`` (the original code of the paper).

    Note:
        As in the paper, the matrix is that of squared gradients. Aljundi et al. average absolute
        gradients, which is not the diagonal of any :math:`W^\top W`.

    References:
        Memory Aware Synapses: Learning what (not) to forget (Aljundi et al., 2018)
        https://arxiv.org/abs/1711.09601
    """

    outputs: Literal["logits", "softmax"] = "logits"

    def __post_init__(self) -> None:
        if self.outputs not in ("logits", "softmax"):
            raise ValueError(f"unknown outputs {self.outputs!r}; known: logits, softmax")

    def potentials(
        self, outputs: Any, batch: Any, *, loss: Loss | None, uniforms: Tensor | None
    ) -> Tensor:
        z = output_tensor(outputs, "MAS()")
        if self.outputs == "softmax":
            z = z.softmax(-1)
        return z.reshape(z.shape[0], -1).square().sum(1)
