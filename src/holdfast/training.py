"""Learning one task, with or without a penalty, and measuring accuracy after every epoch.

The step of a small network is nearly all overhead, so what happens once per step is kept to the least:
parameters and gradients are views of one flat vector (one fused Adam kernel, one vector for the penalty),
data are gathered once per epoch, and a perceptron's gradient is written out.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from holdfast.backpropagation import cross_entropy_gradient
from holdfast.penalty import Penalty
from holdfast.streams import Split, join

__all__ = ["FlatAdam", "Pull", "Training", "accuracies", "learn"]

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


class Pull(Protocol):
    """What training asks of a penalty: to add its gradient to every ``.grad``."""

    def add_grad_(self, model: nn.Module) -> Tensor:
        """Add the gradient at the model's parameters, return the penalty's value."""


class FlatAdam:
    """Adam over all trainable parameters of a model, laid out as views of one flat vector.

    The parameters keep their identity, shape and values; only their storage becomes shared. Arithmetic
    and result are those of ``torch.optim.Adam``, with one difference: a parameter that a step did not
    use has gradient zero, not ``None``, and so still moves by its momentum.
    """

    def __init__(self, model: nn.Module, lr: float) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]  # tied ones come once
        if not parameters:
            raise ValueError("the model has no trainable parameter; set requires_grad on some")
        groups: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter in parameters:
            groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        self._flats = [_flatten(group) for group in groups.values()]
        self._lr = lr
        self._state: list[dict[str, Tensor]] = []

    def state(self) -> dict[str, Tensor]:
        """The moments and the step count, empty before the first step."""
        return {
            f"{index}.{name}": tensor
            for index, state in enumerate(self._state)
            for name, tensor in state.items()
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what :meth:`state` returned."""
        self._state = [{} for _ in self._flats] if state else []
        for key, tensor in state.items():
            index, _, name = key.partition(".")
            self._state[int(index)][name] = tensor.clone()

    def reset(self) -> None:
        """Forget the moments and the step count, as a newly made optimiser would."""
        self._state = []

    def step(self) -> None:
        """Update every parameter from its gradient."""
        if not self._state:
            self._state = [_moments(flat) for flat in self._flats]
        for flat, state in zip(self._flats, self._state, strict=True):
            state["step"].add_(1)
            # What torch.optim.Adam(fused=True) calls, without its 0.1 ms of bookkeeping per step.
            torch._fused_adam_(
                [flat.detach()],
                [_gradient(flat)],
                [state["exp_avg"]],
                [state["exp_avg_sq"]],
                [],
                [state["step"]],
                lr=self._lr,
                beta1=0.9,
                beta2=0.999,
                weight_decay=0.0,
                eps=1e-8,
                amsgrad=False,
                maximize=False,
            )

    @property
    def flat(self) -> nn.Parameter | None:
        """The flat vector, with its gradient, if there is only one."""
        return self._flats[0] if len(self._flats) == 1 else None

    def finite(self) -> bool:
        """Whether every parameter is a finite number."""
        return all(bool(torch.isfinite(flat).all()) for flat in self._flats)


def _moments(flat: Tensor) -> dict[str, Tensor]:
    """The state of Adam before its first step, named as in ``torch.optim.Adam``."""
    zero = torch.zeros_like(flat, requires_grad=False)
    step = torch.zeros((), dtype=torch.float32, device=flat.device)
    return {"step": step, "exp_avg": zero, "exp_avg_sq": zero.clone()}


def _gradient(flat: Tensor) -> Tensor:
    """The gradient that :func:`_flatten` made."""
    assert flat.grad is not None
    return flat.grad


@torch.no_grad()
def _flatten(parameters: Sequence[nn.Parameter]) -> nn.Parameter:
    """One flat parameter with a gradient, of which the given ones become views."""
    flat = nn.Parameter(torch.cat([p.reshape(-1) for p in parameters]))
    flat.grad = torch.zeros_like(flat)
    start = 0
    for parameter in parameters:
        piece = slice(start, start + parameter.numel())
        parameter.data = flat.data[piece].view_as(parameter)
        parameter.grad = flat.grad[piece].view_as(parameter)
        start = piece.stop
    return flat


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
    pull = None if penalty is None else _pull(model, penalty, optimizer)
    if training.reset == "task" and not done:
        optimizer.reset()
    for epoch in range(done, training.epochs):
        if training.reset == "epoch":
            optimizer.reset()
        model.train()
        order = torch.randperm(len(split), generator=generator) if training.shuffle else None
        for x, y in split.batches(training.batch_size, order, generator):
            gradient(x, y)
            if pull is not None:
                pull()
            optimizer.step()
        if not optimizer.finite():
            raise FloatingPointError(
                f"training diverged in epoch {epoch + 1}: a parameter is infinite or not a number; "
                "lower the learning rate or the strength of the penalty"
            )
        if after_epoch is not None:
            after_epoch(epoch)


def _pull(model: nn.Module, penalty: Pull, optimizer: FlatAdam) -> Callable[[], object]:
    """Adds the penalty's gradient; on the flat vector, where the penalty holds all of it in its order."""
    flat = optimizer.flat
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    if (
        flat is None
        or flat.grad is None
        or type(penalty) is not Penalty
        or list(penalty.space.names) != names
        or penalty.anchor.shape != flat.shape
        or penalty.anchor.dtype != flat.dtype
        or penalty.anchor.device != flat.device
    ):
        return lambda: penalty.add_grad_(model)
    matrix, anchor, offset, strength = (
        penalty.matrix,
        penalty.anchor,
        penalty.offset,
        penalty.strength,
    )
    point, gradient = flat.detach(), flat.grad

    def pull() -> None:
        _, product = matrix.value_and_product(point - anchor, offset)
        gradient.add_(product, alpha=strength)

    return pull


@torch.no_grad()
def accuracies(model: nn.Module, splits: Sequence[Split], batch_size: int = 5000) -> list[float]:
    """The fraction of right answers on each split, in as few forward passes as possible."""
    was_training = model.training
    model.eval()
    sizes = [len(split) for split in splits]
    correct = [model(x).argmax(1) == y for x, y in join(splits).batches(batch_size)]
    counts = [int(part.sum()) for part in torch.split(torch.cat(correct), sizes)]
    model.train(was_training)
    return [count / size for count, size in zip(counts, sizes, strict=True)]
