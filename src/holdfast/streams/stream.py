"""A stream is an ordered list of tasks; a task is three splits of examples."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["Split", "Stream", "Task", "join"]

Transform = Callable[[Tensor], Tensor]  # stored inputs of a batch -> what the network reads
Augment = Callable[[Tensor, torch.Generator], Tensor]  # random, applied in training only


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """Examples in memory, with the way from the stored form to the network's input.

    Many tasks may share one ``inputs`` tensor (uint8 images, held once) and differ in ``transform`` only.

    Attributes:
        inputs: Stored inputs, one example per entry of dimension 0.
        labels: One class index per example.
        transform: Applied to every batch when it is read; deterministic.
        augment: Applied after ``transform`` when a generator is passed to :meth:`batches`; random.
    """

    inputs: Tensor
    labels: Tensor
    transform: Transform | None = None
    augment: Augment | None = None

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.labels):
            raise ValueError(
                f"a split needs one label per input, got {len(self.inputs)} inputs "
                f"and {len(self.labels)} labels"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def batches(
        self,
        size: int,
        order: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The examples in batches of ``size`` (the last may be smaller).

        Args:
            size: Examples per batch.
            order: Indices of the examples to read; ``None`` reads all, as stored.
            generator: Randomness of the augmentation; without it nothing is augmented.
        """
        if size < 1:
            raise ValueError(f"the batch size is 1 or larger, got {size}")
        # One gather per epoch, then views: a gather per batch would cost more than a small network's step.
        inputs = self.inputs if order is None else self.inputs.index_select(0, order)
        labels = self.labels if order is None else self.labels.index_select(0, order)
        for x, y in zip(torch.split(inputs, size), torch.split(labels, size), strict=True):
            yield self._read(x, generator), y

    def _read(self, stored: Tensor, generator: torch.Generator | None) -> Tensor:
        """The network's input for stored examples."""
        x = stored if self.transform is None else self.transform(stored)
        if self.augment is not None and generator is not None:
            x = self.augment(x, generator)
        return x


class _Joined(Split):
    """Several splits read as one, each through its own transform."""

    parts: tuple[Split, ...]

    def __init__(self, parts: Sequence[Split]) -> None:
        object.__setattr__(self, "parts", tuple(parts))
        super().__init__(torch.arange(sum(map(len, parts))), torch.cat([p.labels for p in parts]))

    def batches(
        self,
        size: int,
        order: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        if size < 1:
            raise ValueError(f"the batch size is 1 or larger, got {size}")
        indices = self.inputs if order is None else self.inputs[order]
        for chosen in torch.split(indices, size):
            xs, ys, first = [], [], 0
            for part in self.parts:  # a batch is grouped by part; its order within does not matter
                own = chosen[(chosen >= first) & (chosen < first + len(part))] - first
                first += len(part)
                if len(own):
                    xs.append(part._read(part.inputs[own], generator))
                    ys.append(part.labels[own])
            yield torch.cat(xs), torch.cat(ys)


def join(splits: Sequence[Split]) -> Split:
    """The union of splits, each example read through the transform of its own split."""
    if not splits:
        raise ValueError("nothing to join: the list of splits is empty")
    first = splits[0]
    if all(s.transform is first.transform and s.augment is first.augment for s in splits):
        inputs = torch.cat([s.inputs for s in splits])
        labels = torch.cat([s.labels for s in splits])
        return Split(inputs, labels, first.transform, first.augment)
    return _Joined(splits)


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """One task: what is learnt, what strengths are chosen on, what is reported."""

    name: str
    train: Split
    validation: Split
    test: Split


class Stream(ABC):
    """An ordered list of tasks as a recipe: a frozen dataclass that holds no data."""

    @abstractmethod
    def tasks(self, seed: int) -> Sequence[Task]:
        """The tasks in order; the same seed gives the same numbers on every call."""

    @property
    @abstractmethod
    def learnt(self) -> str:
        """From how many examples a task is learnt, in words, e.g. ``"all but 5,000"``."""
