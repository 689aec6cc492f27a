r"""Which parameters of a network are held, in which order, and as which flat vector.

:math:`\theta \in \mathbb{R}^m` is the concatenation of ``model.named_parameters()``, with frozen
parameters left out and tied ones counted once.
"""

import fnmatch
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

__all__ = ["ParameterSpace", "unwrap"]

_COMPILED = "_orig_mod."


def unwrap(model: nn.Module) -> nn.Module:
    """The network inside data-parallel and ``torch.compile`` wrappers."""
    if not isinstance(model, nn.Module):
        got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"model must be a torch.nn.Module, got {got}; pass the network itself")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            "model is TorchScript, which cannot be looked into; pass the torch.nn.Module it was made from"
        )
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while True:
        if isinstance(model, parallel):
            model = model.module
        elif (inner := model._modules.get("_orig_mod")) is not None:
            model = inner
        else:
            return model


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    found = unwrap(model).named_parameters()
    return {name.replace(_COMPILED, ""): parameter for name, parameter in found}


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in unwrap(model).named_modules():
        yield f"{path}.".replace(_COMPILED, "").removesuffix("."), module


def _resolve(root: nn.Module, path: Sequence[str], last: str) -> nn.Parameter | None:
    """The parameter called ``last``, looked up afresh: a layer may have been replaced."""
    module: nn.Module | None = root
    for part in path:
        module = module._modules.get(part) if module is not None else None
        if module is not None and "_orig_mod" in module._modules:  # a compiled part
            module = module._modules["_orig_mod"]
    return module._parameters.get(last) if module is not None else None


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _lineage(kind: type[nn.Module]) -> tuple[str, ...]:
    """The names of a class and of those it is derived from, below ``nn.Module``."""
    return tuple(c.__name__ for c in kind.__mro__ if c is not nn.Module and c is not object)


@dataclass(frozen=True)
class ParameterSpace:
    """The held parameters: names and shapes, in flat order.

    Example:
        >>> space = ParameterSpace.of(nn.Linear(3, 2))
        >>> space.names, space.dim
        (('weight', 'bias'), 8)
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    kinds: tuple[tuple[str, ...], ...] = field(default=(), compare=False, repr=False)
    """The class of the module that each parameter belongs to, then those it is derived from, below
    ``nn.Module``; empty where there was no model to ask."""

    @classmethod
    def of(
        cls, model: nn.Module, include: Sequence[str] = ("*",), exclude: Sequence[str] = ()
    ) -> Self:
        """The trainable parameters of ``model`` whose names match the patterns.

        Args:
            model: Any module.
            include: Shell patterns (``"layers.*"``); a parameter must match one of them.
            exclude: Shell patterns; a parameter must match none of them.
        """
        known = _named(model)
        lazy = [name for name, p in known.items() if isinstance(p, UninitializedParameter)]
        if lazy:
            raise ValueError(
                f"{', '.join(lazy)} have no shape yet, as their layers are lazy: call the model on one "
                "batch first"
            )
        for pattern in (*include, *exclude):
            if not any(_matches(name, [pattern]) for name in known) and pattern != "*":
                raise ValueError(
                    f"no parameter matches {pattern!r}; the model has: {', '.join(known)}"
                )
        held = {
            name: tuple(p.shape)
            for name, p in known.items()
            if p.requires_grad and _matches(name, include) and not _matches(name, exclude)
        }
        if not held:
            raise ValueError(
                f"no parameter to hold: {len(known)} parameters, all frozen or excluded; "
                "set requires_grad on those that are trained, or widen include="
            )
        owners = {
            f"{path}.{name}" if path else name: _lineage(type(module))
            for path, module in _modules(model)
            for name in module._parameters
        }
        return cls(tuple(held), tuple(held.values()), tuple(owners.get(name, ()) for name in held))

    def part(self, positions: Sequence[int]) -> "ParameterSpace":
        """The parameters at some positions only, in the order given."""
        kinds = tuple(self.kinds[i] for i in positions) if self.kinds else ()
        names = tuple(self.names[i] for i in positions)
        return ParameterSpace(names, tuple(self.shapes[i] for i in positions), kinds)

    @cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Where each parameter lies in the flat vector: half-open."""
        return tuple(itertools.pairwise(itertools.accumulate(self.sizes, initial=0)))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of entries of each parameter."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def dim(self) -> int:
        """The number m of held entries."""
        return sum(self.sizes)

    @cached_property
    def _paths(self) -> tuple[tuple[list[str], str], ...]:
        """Where each parameter is: the modules on the way, and its own name."""
        parts = [name.split(".") for name in self.names]
        return tuple((part[:-1], part[-1]) for part in parts)

    @cached_property
    def layers(self) -> dict[str, tuple[int, int]]:
        """Module name -> the half-open range of its parameters in the flat vector."""
        ranges: dict[str, tuple[int, int]] = {}
        start = 0
        for name, size in zip(self.names, self.sizes, strict=True):
            module = name.rpartition(".")[0]
            first = ranges[module][0] if module in ranges else start
            ranges[module] = (first, start + size)
            start += size
        return ranges

    def tensors(self, model: nn.Module) -> list[Tensor]:
        """The held parameters of ``model``, in flat order.

        A parameter that has grown along its first dimension (an output layer with more classes than
        at consolidation) is cut to its old rows: those are held, the new ones are free.

        Raises:
            ValueError: The model lacks a parameter or has it in another shape; all are named.
        """
        root = unwrap(model)
        wrong: list[str] = []
        found: list[Tensor] = []
        for name, shape, path in zip(self.names, self.shapes, self._paths, strict=True):
            parameter = _resolve(root, *path)
            if parameter is None:
                wrong.append(f"{name}: expected shape {shape}, the model has no such parameter")
            elif parameter.shape == shape:
                found.append(parameter)
            elif _grown(shape, tuple(parameter.shape)):
                found.append(parameter[: shape[0]])
            else:
                wrong.append(f"{name}: expected shape {shape}, got {tuple(parameter.shape)}")
        if wrong:
            extra = [name for name in _named(model) if name not in self.names]
            also = f"\n  the model also has: {', '.join(extra)}" if extra else ""
            raise ValueError(
                "the model does not have the parameters that were consolidated:\n  "
                + "\n  ".join(wrong)
                + also
            )
        return found

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """The whole parameters behind :meth:`tensors`, grown rows included."""
        root = unwrap(model)
        found = [_resolve(root, *path) for path in self._paths]
        return [parameter for parameter in found if parameter is not None]

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        """The tensors, in flat order, as one vector of length m."""
        return torch.cat([tensor.reshape(-1) for tensor in tensors])

    def split(self, vector: Tensor) -> list[Tensor]:
        """Views of the last dimension of ``vector``, one per parameter, in their shapes."""
        pieces = vector.split(self.sizes, dim=-1)
        return [
            piece.reshape((*vector.shape[:-1], *shape))
            for piece, shape in zip(pieces, self.shapes, strict=True)
        ]

    def index_of(self, smaller: "ParameterSpace") -> Tensor:
        """Where the entries of ``smaller`` lie in this space: a long vector of length smaller.dim.

        Raises:
            ValueError: A parameter of ``smaller`` is missing here, or has shrunk.
        """
        mine = dict(zip(self.names, self.shapes, strict=True))
        starts: Mapping[str, int] = dict(
            zip(self.names, (sum(self.sizes[:i]) for i in range(len(self.sizes))), strict=True)
        )
        wrong, pieces = [], []
        for name, shape, size in zip(smaller.names, smaller.shapes, smaller.sizes, strict=True):
            if name not in mine:
                wrong.append(f"{name}: held before, now frozen, excluded or gone")
            elif mine[name] != shape and not _grown(shape, mine[name]):
                wrong.append(f"{name}: shape was {shape}, is {mine[name]}")
            else:  # rows are contiguous, so the old entries are the first ones
                pieces.append(torch.arange(starts[name], starts[name] + size))
        if wrong:
            raise ValueError("the previous penalty does not fit:\n  " + "\n  ".join(wrong))
        return torch.cat(pieces)


def _grown(old: tuple[int, ...], new: tuple[int, ...]) -> bool:
    return len(old) == len(new) > 0 and old[1:] == new[1:] and new[0] > old[0]
