"""What a batch is: how it goes through a model, where its labels are, how it is cut and joined.

A batch is a tuple ``(inputs, labels, …)`` or a mapping with a ``"labels"`` entry, of tensors whose
first dimension is the example. Anything else still works where it need not be cut.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = [
    "Examples",
    "copy",
    "cut",
    "forward",
    "has_labels",
    "join",
    "labels",
    "move",
    "rebuild",
    "signature",
    "size",
    "tensors",
]


def forward(model: nn.Module, batch: Any) -> Any:
    """The default forward pass: ``model(batch[0])``, or ``model(**batch)`` without the labels.

    An output with a ``logits`` attribute is replaced by it.
    """
    if isinstance(batch, Mapping):
        outputs = model(**{k: v for k, v in batch.items() if k != "labels"})
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        outputs = model(batch[0])
    else:
        outputs = model(batch)
    return getattr(outputs, "logits", outputs)


def labels(batch: Any) -> Any:
    """The labels of a batch: ``batch["labels"]`` or ``batch[1]``.

    Raises:
        ValueError: The batch has none.
    """
    if has_labels(batch):
        return batch["labels"] if isinstance(batch, Mapping) else batch[1]
    if isinstance(batch, Mapping):
        got = f"a mapping with the keys {', '.join(map(str, batch))}"
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        got = f"a {type(batch).__name__} of {len(batch)}"
    else:
        got = f"a {type(batch).__name__}"
    raise ValueError(
        f"the batch has no labels: expected (inputs, labels, …) or a mapping with 'labels', got {got}; "
        "pass loss= to say what a batch means, or use labels='predicted' or 'sampled', or MAS"
    )


def has_labels(batch: Any) -> bool:
    """Whether :func:`labels` finds any."""
    if isinstance(batch, Mapping):
        return batch.get("labels") is not None
    listed = isinstance(batch, Sequence) and not isinstance(batch, str | bytes)
    return listed and len(batch) > 1 and batch[1] is not None


def refuse_single(batch: Any) -> None:
    """Refuse what is no batch but one example of a data set: its label is a single number."""
    label = labels(batch) if has_labels(batch) else None
    if isinstance(label, int | float) or (isinstance(label, Tensor) and label.dim() == 0):
        raise ValueError(
            f"expected batches, got a single example: its label is the number {label!r}, not one "
            "number per example; wrap the data in torch.utils.data.DataLoader(data, batch_size=64), "
            "or pass forward= where the second entry of a batch is no label"
        )


def tensors(batch: Any) -> list[Tensor]:
    """Every tensor in a batch."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        return [t for value in batch.values() for t in tensors(value)]
    if isinstance(batch, list | tuple):
        return [t for value in batch for t in tensors(value)]
    return []


def _sliceable(batch: Any) -> bool:
    if isinstance(batch, Mapping):
        return all(map(_sliceable, batch.values()))
    if isinstance(batch, list | tuple):
        return all(map(_sliceable, batch))
    return batch is None or (isinstance(batch, Tensor) and batch.dim() > 0)


def size(batch: Any) -> int | None:
    """The number of examples, or None where the batch cannot be cut along its first dimension."""
    found = tensors(batch)
    if not found or not _sliceable(batch):
        return None
    first = {tensor.shape[0] for tensor in found}
    return first.pop() if len(first) == 1 else None


def _map(fn: Any, *batches: Any) -> Any:
    """Apply ``fn`` to the tensors that stand in the same place of every batch."""
    head = batches[0]
    if isinstance(head, Tensor):
        return fn(*batches)
    if isinstance(head, Mapping):
        return {k: _map(fn, *(b[k] for b in batches)) for k in head}
    if isinstance(head, tuple) and hasattr(head, "_fields"):  # a namedtuple keeps its type
        return type(head)(*(_map(fn, *column) for column in zip(*batches, strict=True)))
    if isinstance(head, list | tuple):
        return type(head)(_map(fn, *column) for column in zip(*batches, strict=True))
    return head


def move(batch: Any, device: torch.device) -> Any:
    """The batch with every array and tensor as a tensor on ``device``."""
    if isinstance(batch, np.ndarray):
        return torch.as_tensor(batch, device=device)
    if isinstance(batch, Mapping):
        return {k: move(v, device) for k, v in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(v, device) for v in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(move(v, device) for v in batch)
    if not isinstance(batch, Tensor):
        return batch
    moved = batch.detach().to(device)  # a graph that leads to it is the caller's
    return moved.clone() if moved.is_inference() else moved  # those cannot take part in a backward


def copy(batch: Any) -> Any:
    """The batch with tensors of its own, which no graph leads to."""
    return _map(lambda t: t.detach().clone(), batch)


def cut(batch: Any, index: Tensor | slice) -> Any:
    """The examples at ``index`` of every tensor."""
    return _map(lambda t: t[index.to(t.device) if isinstance(index, Tensor) else index], batch)


def join(batches: Sequence[Any]) -> Any:
    """Batches of equal signature as one."""
    return batches[0] if len(batches) == 1 else _map(lambda *t: torch.cat(t), *batches)


def signature(batch: Any) -> tuple[Any, ...]:
    """What two batches must share to be joined: structure, trailing shapes, dtypes."""
    if isinstance(batch, Tensor):
        return (tuple(batch.shape[1:]), batch.dtype)
    if isinstance(batch, Mapping):
        return tuple((k, signature(v)) for k, v in batch.items())
    if isinstance(batch, list | tuple):
        return tuple(signature(v) for v in batch)
    return (type(batch),)


def rebuild(template: Any, leaves: Sequence[Tensor]) -> Any:
    """A batch like ``template`` with its tensors replaced by ``leaves``, in their order."""
    left = iter(leaves)
    return _map(lambda _: next(left), template)


@dataclass(frozen=True)
class Examples:
    """Examples of a batch that can be cut, and which value of each is meant.

    Attributes:
        template: How to make a batch of its tensors.
        columns: Those tensors, then which of its values each example contributes, then its uniform number.
        index: Their positions of arrival, for messages; on the CPU.
    """

    template: Any
    columns: Sequence[Tensor]
    index: Tensor

    def __len__(self) -> int:
        return len(self.index)

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors of the batch."""
        return list(self.columns[:-2])

    @property
    def which(self) -> Tensor:
        """Which of its values each example contributes."""
        return self.columns[-2]

    @property
    def uniforms(self) -> Tensor:
        """One uniform number per example."""
        return self.columns[-1]

    @property
    def batch(self) -> Any:
        """What goes through the model."""
        return rebuild(self.template, self.leaves)

    def pick(self, some: slice | Tensor) -> "Examples":
        """Some of them."""
        here = some if isinstance(some, slice) else some.cpu()
        return Examples(self.template, [column[some] for column in self.columns], self.index[here])
