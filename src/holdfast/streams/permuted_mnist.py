"""MNIST whose pixels stand in another order in every task."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from holdfast.seeds import derive
from holdfast.streams.digits import DigitStream
from holdfast.streams.stream import Split, Task

__all__ = ["PermutedMNIST", "Pixels"]


class Pixels:
    """Bytes to numbers from 0 to 1, in another order if one is given."""

    def __init__(self, order: Tensor | None = None) -> None:
        self.order = order

    def __call__(self, stored: Tensor) -> Tensor:
        # Numbers first: torch selects columns of float32 twice as fast as columns of bytes.
        x = stored.float()
        if self.order is not None:
            x = x.index_select(1, self.order.to(x.device))
        return x.div_(255)


@dataclasses.dataclass(frozen=True)
class PermutedMNIST(DigitStream):
    """Ten digits, one head, and a permutation of the pixels per task; the first task has them as they are.

    All tasks share the same bytes; a task is an order of columns, applied to every batch that is read.

    Attributes:
        length: The number of tasks.
        permutation: ``"independent"`` draws a permutation per task; ``"cumulative"`` shuffles the last task's
            order again. Both are uniform: they differ in the draw, not in law.
    """

    length: int = 10
    permutation: Literal["independent", "cumulative"] = "independent"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length < 1:
            raise ValueError(f"length is 1 or larger, got {self.length}")
        if self.permutation not in ("independent", "cumulative"):
            raise ValueError(
                f"unknown permutation {self.permutation!r}; known: independent, cumulative"
            )

    def tasks(self, seed: int) -> Sequence[Task]:
        digits = self._digits()
        tasks = []
        for index, order in enumerate(self._orders(seed, digits.train[0].shape[1])):
            read = Pixels(order)
            splits = [
                Split(*part, read) for part in (digits.train, digits.validation, digits.test)
            ]
            tasks.append(Task(f"task {index + 1}", *splits))
        return tasks

    def _orders(self, seed: int, pixels: int) -> list[Tensor | None]:
        """The order of the columns in every task."""
        orders: list[Tensor | None] = [None]
        last = torch.arange(pixels)
        for index in range(1, self.length):
            generator = torch.Generator().manual_seed(derive(seed, "permutation", index))
            drawn = torch.randperm(pixels, generator=generator)
            last = last[drawn] if self.permutation == "cumulative" else drawn
            orders.append(last)
        return orders
