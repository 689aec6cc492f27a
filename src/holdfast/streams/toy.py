"""Five binary classification tasks in the plane."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from holdfast.seeds import derive
from holdfast.streams.stream import Split, Stream, Task

__all__ = ["BLOBS", "WINDOW", "Toy"]

# Per task: class 0 (mean, standard deviation), class 1 (mean, standard deviation); axis-aligned Gaussians.
BLOBS = (
    (((0.0, 0.2), (0.08, 0.22)), ((0.45, 0.0), (0.08, 0.16))),
    (((0.6, 0.9), (0.24, 0.08)), ((0.7, 0.45), (0.16, 0.08))),
    (((1.3, 0.4), (0.04, 0.20)), ((1.0, 0.1), (0.06, 0.16))),
    (((1.6, -0.1), (0.16, 0.05)), ((1.7, -0.4), (0.24, 0.05))),
    (((2.0, 0.3), (0.05, 0.16)), ((2.3, 0.1), (0.05, 0.22))),
)

WINDOW = ((-0.5, 2.5), (-0.75, 1.25))  # the plane as the decision boundaries show it: x, y


@dataclasses.dataclass(frozen=True)
class Toy(Stream):
    """The 2-D tasks of Pan et al.: two Gaussian blobs each, left to right, one head of two outputs.

    Attributes:
        length: How many of the five tasks, from the left.
        train: Training examples per task, half of them of each class.
        validation: Validation examples per task, a draw of its own.
        test: Test examples per task, a draw of its own.

    References:
        Pan et al., Continual Deep Learning by Functional Regularisation of Memorable Past,
        https://arxiv.org/abs/2004.14070
    """

    length: int = 5
    train: int = 2000
    validation: int = 400
    test: int = 400

    def __post_init__(self) -> None:
        if not 1 <= self.length <= len(BLOBS):
            raise ValueError(f"length is 1 to {len(BLOBS)}, got {self.length}")
        for name in ("train", "validation", "test"):
            count = getattr(self, name)
            if count < 2 or count % 2:
                raise ValueError(
                    f"{name} is an even number of examples, half of each class, got {count}"
                )

    @property
    def learnt(self) -> str:
        return f"{self.train:,}"

    def tasks(self, seed: int) -> Sequence[Task]:
        return [
            Task(
                f"task {index + 1}",
                self._draw(seed, index, "train"),
                self._draw(seed, index, "validation"),
                self._draw(seed, index, "test"),
            )
            for index in range(self.length)
        ]

    def _draw(self, seed: int, index: int, part: str) -> Split:
        """One split of one task: all of class 0, then all of class 1."""
        random = np.random.default_rng(derive(seed, "toy", index, part))
        half = getattr(self, part) // 2
        points = [random.normal(mean, deviation, (half, 2)) for mean, deviation in BLOBS[index]]
        labels = torch.arange(2).repeat_interleave(half)
        return Split(torch.from_numpy(np.concatenate(points)).float(), labels)
