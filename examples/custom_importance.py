"""An importance of one's own: one class, and every approximation works with it.

Here: hold what decides between the two most probable classes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import holdfast as hf


@dataclass(frozen=True)
class Margin(hf.Importance):
    """φ(x) = z₁ − z₂: the gap between the two largest logits; needs no labels."""

    def potentials(
        self, outputs: Any, batch: Any, *, loss: Any = None, uniforms: Tensor | None = None
    ) -> Tensor:
        first, second = outputs.topk(2, dim=1).values.unbind(1)
        return first - second


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    data = [(torch.randn(32, 4),) for _ in range(10)]  # no labels needed
    for approximation in (hf.Diagonal(), hf.CountSketch(size=20), hf.Full()):
        penalty = hf.Regularizer(Margin(), approximation).consolidate(model, data, seed=0)
        print(f"{approximation!r:50} trace {penalty.matrix.trace():.3f}")


if __name__ == "__main__":
    main()
