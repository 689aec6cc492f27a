"""Sliced Cramér preservation: rows are slices of the mean output, not examples."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.configuration import keep_positive
from holdfast.importance.base import Importance, Loss, class_logits

__all__ = ["SCP"]


@dataclass(frozen=True)
class SCP(Importance):
    r"""Preserve the mean output along random directions.

    .. math:: \Omega = \frac1L \sum_l g_l g_l^\top, \quad
        g_l = \nabla_\theta \frac1n \sum_i \xi_l^\top z(x_i), \quad \xi_l \sim S^{K-1}

    Only the mean Jacobian :math:`\bar J` (K rows) is needed: :math:`\Omega = \bar J^\top A \bar J` with
    :math:`A = \frac1L \sum_l \xi_l \xi_l^\top`, so min(L, K) rows hold it exactly.

    Args:
        slices: The number L of directions; None takes the expectation, A = I/K.

    References:
        Sliced Cramer synaptic consolidation for preserving deeply learned representations
        (Kolouri et al., 2020) https://openreview.net/forum?id=BJge3TNKwH
    """

    slices: int | None = 50

    def __post_init__(self) -> None:
        if self.slices is not None:
            keep_positive(self, "slices", otherwise="or None for the expectation")

    @property
    def several(self) -> bool:
        """One value per output; the slices mix them."""
        return True

    def rows_per_example(self, outputs: Any) -> int:
        return class_logits(outputs, "SCP()").shape[1]

    def directions(self, classes: int, generator: np.random.Generator) -> Tensor:
        """The rows are ``directions @ J̄``: a matrix (min(L, K), K), 1/√L included."""
        if self.slices is None:
            return torch.eye(classes, dtype=torch.float64) / classes**0.5
        xi = generator.standard_normal((self.slices, classes))
        xi /= np.linalg.norm(xi, axis=1, keepdims=True) * self.slices**0.5
        slices = torch.from_numpy(xi)
        if self.slices <= classes:
            return slices
        return torch.linalg.cholesky(slices.T @ slices, upper=True)  # A = RᵀR, K rows

    def potentials(
        self, outputs: Any, batch: Any, *, loss: Loss | None, uniforms: Tensor | None
    ) -> Tensor:
        return class_logits(outputs, "SCP()")
