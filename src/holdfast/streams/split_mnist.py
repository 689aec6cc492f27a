"""MNIST digit by digit: a few classes per task."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from holdfast.streams.digits import DigitStream
from holdfast.streams.permuted_mnist import Pixels
from holdfast.streams.stream import Split, Task

__all__ = ["PixelsAndTask", "SplitMNIST"]


class PixelsAndTask:
    """Bytes to numbers from 0 to 1, and the number of the task as one more column."""

    def __init__(self, task: int) -> None:
        self.task = task

    def __call__(self, stored: Tensor) -> Tensor:
        x = stored.float().div_(255)
        return torch.cat([x, x.new_full((len(x), 1), self.task)], 1)


@dataclasses.dataclass(frozen=True)
class SplitMNIST(DigitStream):
    """Digits a few at a time.

    Attributes:
        groups: The digits of every task; tasks have equally many.
        head: What the network answers. ``"all"``: one head with an output per digit of all tasks, labels are
            places in the order of ``groups`` (the hardest: tasks must be told apart). ``"shared"``: one head
            for the place within the task. ``"multi"``: a head per task; the network is told the task by one
            more input column and answers the place within it (see the model ``multi_head_mlp``).
    """

    groups: tuple[tuple[int, ...], ...] = ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))
    head: Literal["all", "shared", "multi"] = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        digits = [digit for group in self.groups for digit in group]
        if not digits or len({len(group) for group in self.groups}) != 1:
            raise ValueError(f"groups are tasks of equally many digits, got {self.groups}")
        if len(set(digits)) < len(digits) or not set(digits) <= set(range(10)):
            raise ValueError(f"groups hold every digit 0 to 9 at most once, got {self.groups}")
        if self.head not in ("all", "shared", "multi"):
            raise ValueError(f"unknown head {self.head!r}; known: all, shared, multi")

    def tasks(self, seed: int) -> Sequence[Task]:
        digits = self._digits()
        plain, tasks = Pixels(), []
        for index, group in enumerate(self.groups):
            place = torch.full((10,), -1)
            place[list(group)] = torch.arange(len(group))
            offset = index * len(group) if self.head == "all" else 0
            splits = []
            for x, y in (digits.train, digits.validation, digits.test):
                labels = place[y]
                own = labels >= 0
                read = PixelsAndTask(index) if self.head == "multi" else plain
                splits.append(Split(x[own], labels[own] + offset, read))
            tasks.append(Task(" or ".join(map(str, group)), *splits))
        return tasks
