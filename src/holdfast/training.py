"""Learning one task, with or without a penalty, and measuring accuracy after every epoch.

The step of a small network is nearly all overhead, so what happens once per step is kept to the least:
parameters and gradients are views of one flat vector (one fused Adam kernel, one vector for the penalty),
data are gathered once per epoch, and a perceptron's gradient is written out.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import nn

from holdfast.adam import FlatAdam
from holdfast.backpropagation import cross_entropy_gradient, outputs
from holdfast.penalised_step import Pull, penalised
from holdfast.streams import Split, join

__all__ = ["Training", "accuracies", "learn"]

Reset = Literal["never", "task", "epoch"]


@dataclasses.dataclass(frozen=True)
class Training:
    """How a task is learnt: Adam on the mean cross-entropy of minibatches.

    Attributes:
        epochs: Passes over the training examples of a task.
        batch_size: Examples per step.
        lr: Learning rate of Adam; its other settings are PyTorch's defaults.
        reset: When Adam forgets its moments: ``"never"``, at the start of every ``"task"``, or of every
            ``"epoch"`` (equal to creating a new optimiser there).
        shuffle: A new order of the examples every epoch, or the stored order.
    """

    epochs: int = 250
    batch_size: int = 100
    lr: float = 1e-3
    reset: Reset = "task"
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError(f"epochs is 1 or larger, got {self.epochs}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size is 1 or larger, got {self.batch_size}")
        if not self.lr > 0:
            raise ValueError(f"lr is larger than 0, got {self.lr}")
        if self.reset not in ("never", "task", "epoch"):
            raise ValueError(f"unknown reset {self.reset!r}; known: never, task, epoch")


def learn(
    model: nn.Module,
    split: Split,
    training: Training,
    optimizer: FlatAdam,
    *,
    generator: torch.Generator,
    penalty: Pull | None = None,
    after_epoch: Callable[[int], None] | None = None,
    done: int = 0,
) -> None:
    """Train the model on one split, in place.

    Each step minimises the mean cross-entropy of a minibatch plus the penalty.

    Args:
        model: The network; its optimiser must be ``optimizer``.
        split: Training examples.
        training: Epochs, batch size, shuffling and the reset policy.
        optimizer: Adam over the model's parameters, kept from task to task.
        generator: Draws the order of every epoch, and the augmentation.
        penalty: Pulls the parameters towards earlier tasks.
        after_epoch: Called with the index of each finished epoch.
        done: Epochs that are behind: the model, the optimiser and the generator are as after them.

    Raises:
        FloatingPointError: Parameters became infinite or not a number.
    """
    gradient = cross_entropy_gradient(model)
    begin = penalised(model, penalty, optimizer)
    if training.reset == "task" and not done:
        optimizer.reset()
    for epoch in range(done, training.epochs):
        if training.reset == "epoch":
            optimizer.reset()
        step = begin()
        model.train()
        order = torch.randperm(len(split), generator=generator) if training.shuffle else None
        for x, y in split.batches(training.batch_size, order, generator):
            gradient(x, y)
            step()
        if not optimizer.finite():
            raise FloatingPointError(
                f"training diverged in epoch {epoch + 1}: a parameter is infinite or not a number; "
                "lower the learning rate or the strength of the penalty"
            )
        if after_epoch is not None:
            after_epoch(epoch)


@torch.no_grad()
def accuracies(model: nn.Module, splits: Sequence[Split], batch_size: int = 5000) -> list[float]:
    """The fraction of right answers on each split, in as few forward passes as possible."""
    was_training = model.training
    model.eval()
    sizes = [len(split) for split in splits]
    read = outputs(model)
    correct = [read(x).argmax(1) == y for x, y in join(splits).batches(batch_size)]
    counts = [int(part.sum()) for part in torch.split(torch.cat(correct), sizes)]
    model.train(was_training)
    return [count / size for count, size in zip(counts, sizes, strict=True)]
