"""Elastic weight consolidation: rows are gradients of the log-likelihood."""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from holdfast import losses
from holdfast.importance.base import Importance, Loss, class_logits

__all__ = ["EWC"]

_LABELS = ("true", "sampled", "expected", "predicted")


@dataclass(frozen=True)
class EWC(Importance):
    r"""The Fisher information, Ω = (1/n) Σᵢ ∇ℓᵢ ∇ℓᵢᵀ.

    Args:
        labels: Whose label is in the loss. ``"true"``: the data's (the empirical Fisher, as in the
            paper; regression, multi-label and language models through ``loss=``). ``"sampled"``: one
            draw from the model's class probabilities per example. ``"expected"``: all classes,
            weighted by their probability — the exact Fisher, for K backward passes instead of one.
            ``"predicted"``: the most probable class.

    References:
        Overcoming catastrophic forgetting in neural networks (Kirkpatrick et al., 2017)
        https://arxiv.org/abs/1612.00796
    """

    labels: Literal["true", "sampled", "expected", "predicted"] = "true"

    def __post_init__(self) -> None:
        if self.labels not in _LABELS:
            raise ValueError(f"unknown labels {self.labels!r}; known: {', '.join(_LABELS)}")

    @property
    def uniforms(self) -> bool:
        """Sampled labels need one uniform number per example."""
        return self.labels == "sampled"

    @property
    def several(self) -> bool:
        """The exact Fisher has a row per class."""
        return self.labels == "expected"

    def rows_per_example(self, outputs: Any) -> int:
        if self.labels != "expected":
            return 1
        return class_logits(outputs, f"EWC(labels={self.labels!r})").shape[1]

    def check(self, outputs: Any, batch: Any, loss: Loss | None) -> None:
        if self.labels == "true":
            if loss is None:
                losses.refuse_unshifted(outputs, batch)
                losses.refuse_unknown(outputs, batch)
        elif loss is not None:
            raise ValueError(
                f"EWC(labels={self.labels!r}) takes the label from the model's class probabilities "
                "and has no use for loss=; leave it out, or use labels='true'"
            )

    def potentials(
        self, outputs: Any, batch: Any, *, loss: Loss | None, uniforms: Tensor | None
    ) -> Tensor:
        if self.labels == "true":
            return (loss or losses.default)(outputs, batch)
        log_p = class_logits(outputs, f"EWC(labels={self.labels!r})").log_softmax(1)
        p = log_p.detach().exp()
        if self.labels == "expected":
            return p.sqrt() * log_p
        if self.labels == "predicted":
            chosen = p.argmax(1)
        else:
            assert uniforms is not None
            # invert the cumulative distribution; the clamp covers a sum that rounds below one
            below = p.cumsum(1) <= uniforms.to(p.dtype).unsqueeze(1)
            chosen = below.sum(1).clamp(max=p.shape[1] - 1)
        return -log_p.gather(1, chosen.unsqueeze(1)).squeeze(1)
