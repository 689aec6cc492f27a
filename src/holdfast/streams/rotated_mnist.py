"""MNIST turned by another angle in every task."""

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from holdfast.streams.digits import DigitStream
from holdfast.streams.stream import Split, Task

__all__ = ["RotatedMNIST", "Rotation"]


class Rotation:
    """Bytes to numbers from 0 to 1, the square image turned about its centre, counter-clockwise.

    Each pixel is read bilinearly from where it comes from; outside is black.
    """

    def __init__(self, degrees: float) -> None:
        self.degrees = degrees
        angle = math.radians(degrees)
        cos, sin = math.cos(angle), math.sin(angle)
        # The grid says where a pixel of the result is read; the vertical axis points down.
        self._matrix = torch.tensor([[cos, -sin, 0.0], [sin, cos, 0.0]])

    def __call__(self, stored: Tensor) -> Tensor:
        x = stored.float().div_(255)
        if self.degrees % 360 == 0:
            return x
        side = math.isqrt(x.shape[1])
        matrix = self._matrix.to(x.device).expand(1, 2, 3)
        grid = functional.affine_grid(matrix, [1, 1, side, side], align_corners=False)
        # All images share the grid: they are channels of one image, which is several times as fast.
        turned = functional.grid_sample(
            x.view(1, -1, side, side), grid, mode="bilinear", align_corners=False
        )
        return turned.view(len(x), -1)


@dataclasses.dataclass(frozen=True)
class RotatedMNIST(DigitStream):
    """Ten digits, one head, turned by equal steps from task to task; nothing is random.

    Attributes:
        length: The number of tasks.
        step: Degrees from one task to the next, counter-clockwise; the first task is upright.
    """

    length: int = 10
    step: float = 18.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length < 1:
            raise ValueError(f"length is 1 or larger, got {self.length}")
        if not math.isfinite(self.step):
            raise ValueError(f"step is a number of degrees, got {self.step}")

    def tasks(self, seed: int) -> Sequence[Task]:
        digits = self._digits()
        tasks = []
        for index in range(self.length):
            read = Rotation(index * self.step)
            splits = [
                Split(*part, read) for part in (digits.train, digits.validation, digits.test)
            ]
            tasks.append(Task(f"{index * self.step:g}°", *splits))
        return tasks
