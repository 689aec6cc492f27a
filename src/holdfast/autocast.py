"""Outside the caller's autocast: low precision is for storage alone."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

__all__ = ["full_precision", "outside_autocast"]


class _Placed(Protocol):
    @property
    def device(self) -> torch.device: ...


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=_Placed)


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """No autocast; entering that costs more than a small penalty, so only where it is on."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def outside_autocast(
    function: Callable[Concatenate[S, P], R],
) -> Callable[Concatenate[S, P], R]:
    """The same function of a matrix, whatever the precision of the caller."""

    @functools.wraps(function)
    def wrapped(matrix: S, /, *args: P.args, **options: P.kwargs) -> R:
        with full_precision(matrix.device):
            return function(matrix, *args, **options)

    return wrapped
