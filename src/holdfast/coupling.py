"""Networks that mix the examples of a batch: said once, or refused where no example has a row of its own."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["CouplingWarning", "check_alone", "check_counted"]


class CouplingWarning(UserWarning):
    """What one example gives changes with the batch it is in."""


def check_alone(value: Callable[[], Tensor], together: Tensor, rounding: float) -> Tensor:
    """Compare what the first example gives alone with what it gives in its batch.

    Args:
        value: Computes it alone.
        together: That in its batch.
        rounding: The relative difference that is none.

    Raises:
        ValueError: The network cannot be called on one example.
    """
    try:
        alone = value()
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        reason = str(error).strip().splitlines()
        raise ValueError(
            f"the model works on a batch and not on one example of it ({reason[0] if reason else error!r}): "
            "a gradient for every example needs a forward pass that takes a batch of one and does not mix "
            "examples; a normalisation by statistics of the batch needs running ones instead "
            "(track_running_stats=True)"
        ) from error
    if not torch.allclose(alone[0], together[0], rtol=rounding, atol=1e-3):
        warnings.warn(
            f"the first example has the value {float(alone[0, 0].detach()):.4g} alone and "
            f"{float(together[0, 0]):.4g} in its batch: the model mixes the examples of a batch "
            "or draws random numbers, so the rows depend on how examples are batched",
            CouplingWarning,
            stacklevel=3,
        )
    return alone


def check_counted(model: nn.Module) -> None:
    """Warn of embeddings whose gradients depend on the other words of a batch."""
    for name, layer in model.named_modules():
        counted = isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.scale_grad_by_freq
        if counted and layer.weight.requires_grad:
            warnings.warn(
                f"{name or 'the model'} has scale_grad_by_freq=True: a word's gradient depends on how often "
                "the batch has it, so the rows depend on how examples are batched; set it to False "
                "while consolidating",
                CouplingWarning,
                stacklevel=3,
            )
