r"""Per-example losses: :math:`-\log p(y \mid x)` up to a constant, one value per example.

Each is a function ``loss(outputs, batch) -> (B,)`` for ``consolidate(..., loss=)``. A sum, never a
mean, over what belongs to one example: the row of an example must not depend on its length.
"""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from holdfast import batches

__all__ = ["bernoulli", "classification", "default", "gaussian", "next_token", "tokens"]

IGNORED = -100  # the label that PyTorch's cross-entropy leaves out


def classification(outputs: Tensor, batch: Any) -> Tensor:
    """Cross-entropy of class logits (B, K) with class indices (B,)."""
    labels = batches.labels(batch)
    if not labels.is_floating_point():  # int32 of NumPy, bool
        labels = labels.long()
    return F.cross_entropy(outputs, labels, reduction="none")


def gaussian(outputs: Tensor, batch: Any) -> Tensor:
    """½‖z − y‖², summed over outputs: regression with unit variance."""
    target = batches.labels(batch)
    if target.shape != outputs.shape:
        raise ValueError(
            f"gaussian loss needs targets shaped like the outputs {tuple(outputs.shape)}, "
            f"got {tuple(target.shape)}; reshape one of them"
        )
    return 0.5 * (outputs - target).square().flatten(1).sum(1)


def bernoulli(outputs: Tensor, batch: Any) -> Tensor:
    """Binary cross-entropy of logits, summed over labels: multi-label classification."""
    target = batches.labels(batch).to(outputs.dtype)
    if target.shape != outputs.shape:
        raise ValueError(
            f"bernoulli loss needs targets shaped like the outputs {tuple(outputs.shape)}, "
            f"got {tuple(target.shape)}; reshape one of them"
        )
    per_label = F.binary_cross_entropy_with_logits(outputs, target, reduction="none")
    return per_label.flatten(1).sum(1)


def tokens(outputs: Tensor, batch: Any) -> Tensor:
    """Cross-entropy of token logits (B, T, V) with labels (B, T) at the same positions.

    Positions labelled -100 are left out; a sequence is one example.
    """
    return _token_sum(outputs, batches.labels(batch))


def next_token(outputs: Tensor, batch: Any) -> Tensor:
    """As :func:`tokens` for causal language models: position t predicts the label at t + 1."""
    return _token_sum(outputs[:, :-1], batches.labels(batch)[:, 1:])


def _token_sum(logits: Tensor, labels: Tensor) -> Tensor:
    per_token = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return per_token.view(labels.shape).sum(1)


def refuse_unshifted(outputs: Any, batch: Any) -> None:
    """Refuse the default loss where the labels are the inputs: a causal language model shifts.

    Raises:
        ValueError: Every label that counts equals the input token at the same position.
    """
    if not isinstance(outputs, Tensor) or outputs.dim() != 3:
        return
    if isinstance(batch, Mapping):
        inputs, target = batch.get("input_ids"), batch.get("labels")
    elif isinstance(batch, list | tuple) and len(batch) > 1:
        inputs, target = batch[0], batch[1]
    else:
        return
    if not isinstance(inputs, Tensor) or not isinstance(target, Tensor):
        return
    if inputs.is_floating_point() or inputs.shape != target.shape:
        return
    kept = target != IGNORED
    if bool(kept.any()) and bool((inputs[kept] == target[kept]).all()):
        raise ValueError(
            "the labels are the inputs themselves, as for a causal language model; "
            "pass loss=hf.losses.next_token (it shifts them), or loss=hf.losses.tokens"
        )


def refuse_unknown(outputs: Any, batch: Any) -> None:
    """Refuse class labels that the network has no output for.

    Raises:
        ValueError: A label is below zero, or not below the number of outputs.
    """
    target = batches.labels(batch) if batches.has_labels(batch) else None
    if not isinstance(outputs, Tensor) or not isinstance(target, Tensor):
        return
    known = target[target != IGNORED]
    if outputs.dim() not in (2, 3) or known.is_floating_point() or not known.numel():
        return
    low, high = int(known.min()), int(known.max())
    if low < 0 or high >= outputs.shape[-1]:
        raise ValueError(
            f"labels go from {low} to {high}, but the network has {outputs.shape[-1]} outputs, for "
            f"labels from 0 to {outputs.shape[-1] - 1}; renumber the labels, or give the network an "
            "output per class"
        )


def default(outputs: Any, batch: Any) -> Tensor:
    """Cross-entropy where the shapes leave no doubt; an error that names the choices otherwise."""
    if not isinstance(outputs, Tensor):
        raise ValueError(
            f"the model returned {type(outputs).__name__}, not a tensor of logits; "
            "pass forward=lambda model, batch: … that picks the logits, or loss="
        )
    target = batches.labels(batch)
    if not isinstance(target, Tensor):
        raise ValueError(f"labels must be a tensor, got {type(target).__name__}; pass loss=")
    if target.is_floating_point():
        raise ValueError(
            f"labels are {target.dtype}: what they mean is not guessed. Pass "
            "loss=hf.losses.gaussian (regression) or loss=hf.losses.bernoulli (multi-label)"
        )
    if outputs.dim() == 2 and target.dim() == 1:
        return classification(outputs, batch)
    if outputs.dim() == 3 and target.dim() == 2 and outputs.shape[:2] == target.shape:
        return tokens(outputs, batch)
    raise ValueError(
        f"outputs {tuple(outputs.shape)} and labels {tuple(target.shape)} are not class logits (B, K) "
        "with labels (B,), nor token logits (B, T, V) with labels (B, T); pass loss="
    )
