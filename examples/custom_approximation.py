"""An approximation of one's own: one class with three methods, and every importance works with it.

Here: a diagonal that is averaged within each parameter tensor, one number per tensor.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import holdfast as hf


@dataclass(frozen=True)
class TensorMean(hf.Approximation):
    """The mean of the exact diagonal over each parameter tensor."""

    def start(self, setting: hf.Setting) -> Any:
        return {"squares": setting.zeros(setting.dim), "sizes": setting.space.sizes}

    def update(self, state: Any, rows: hf.RowBatch) -> None:
        rows.add_squared_sum_(state["squares"])

    def finish(self, state: Any) -> hf.DiagonalMatrix:
        pieces = state["squares"].split(state["sizes"])
        return hf.DiagonalMatrix(torch.cat([p.mean().expand(len(p)) for p in pieces]))


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    data = [(torch.randn(32, 4), torch.randint(0, 3, (32,))) for _ in range(10)]
    for importance in (hf.EWC(), hf.EWC(labels="expected"), hf.MAS()):
        penalty = hf.Regularizer(importance, TensorMean()).consolidate(model, data, seed=0)
        print(f"{importance!r:30} distinct values: {penalty.matrix.diagonal().unique().numel()}")


if __name__ == "__main__":
    main()
