r"""Which held parameters act together as a matrix: the weight of a layer, and its bias as one more input.

A layer is a value here, positions and sizes and no module, so that an approximation can know that these
entries are a matrix without ever knowing the network.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from holdfast.parameters import ParameterSpace

__all__ = ["LayerReader", "LayerShape", "layer_shapes", "layers_within", "unshared"]

_MATRICES = (nn.Linear, nn.Conv1d, nn.Conv2d)


@dataclass(frozen=True)
class LayerShape:
    """A layer whose parameters are ``groups`` matrices (outputs × columns).

    Attributes:
        name: Its path in the network.
        groups: Matrices side by side: more than one for a grouped convolution.
        outputs: Rows of each.
        inputs: Columns of each, without the bias.
        weight: First entry of the weight in the flat vector.
        bias: First entry of the bias, or None where that is not held.
    """

    name: str
    groups: int
    outputs: int
    inputs: int
    weight: int
    bias: int | None

    @property
    def columns(self) -> int:
        """Columns with the bias, which is a weight of the constant input one."""
        return self.inputs + (self.bias is not None)

    @property
    def size(self) -> int:
        """The number of entries."""
        return self.groups * self.outputs * self.columns

    def join(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Rows of weight (b, …) and bias (b, …) as matrices (b, groups, outputs, columns)."""
        matrix = weight.reshape(len(weight), self.groups, self.outputs, self.inputs)
        if bias is None:
            return matrix
        return torch.cat([matrix, bias.reshape(len(bias), self.groups, self.outputs, 1)], 3)

    def cut(self, rows: Tensor) -> Tensor:
        """The layer's part of flat rows (b, m), as :meth:`join` gives it."""
        outputs = self.groups * self.outputs
        weight = rows[:, self.weight : self.weight + outputs * self.inputs]
        if self.bias is None:
            return self.join(weight, None)
        return self.join(weight, rows[:, self.bias : self.bias + outputs])


class LayerReader(Protocol):
    """Takes what the rows of a batch say about layers, a few rows at a time."""

    def pairs(self, layer: int, inputs: Tensor, gradients: Tensor) -> None:
        """Inputs (b, groups, T, columns) and gradients of outputs (b, groups, T, outputs).

        The row of an example is the sum over its T positions of the outer products.
        """

    def rows(self, layer: int, rows: Tensor) -> None:
        """The rows themselves, (b, groups, outputs, columns), where layers cannot be read."""


def unshared(
    model: nn.Module, parameters: Sequence[nn.Parameter]
) -> Iterator[tuple[str, nn.Module, dict[str, int]]]:
    """Modules with weight and bias alone, none empty or shared: path, module, held positions."""
    place = {id(p): i for i, p in enumerate(parameters)}
    owners: dict[int, int] = {}
    for module in model.modules():
        for p in module._parameters.values():
            if p is not None:
                owners[id(p)] = owners.get(id(p), 0) + 1
    for name, module in model.named_modules():
        mine = {n: p for n, p in module._parameters.items() if p is not None}
        held = {n: place[id(p)] for n, p in mine.items() if id(p) in place}
        alone = all(owners[id(p)] == 1 and p.numel() for p in mine.values())
        if held and alone and set(mine) <= {"weight", "bias"}:
            yield name, module, held


def layer_shapes(model: nn.Module, space: ParameterSpace) -> tuple[LayerShape, ...]:
    """The Linear, Conv1d and Conv2d layers whose weight is held and belongs to them alone."""
    found = []
    for name, module, held in unshared(model, space.parameters(model)):
        if not isinstance(module, _MATRICES) or "weight" not in held:
            continue
        at, bias = held["weight"], held.get("bias")
        groups, shape = getattr(module, "groups", 1), space.shapes[at]
        outputs, rest = divmod(shape[0], groups)
        inputs = space.sizes[at] // shape[0] if shape[0] else 0
        plain = bias is None or space.shapes[bias] == shape[:1]  # not so in a class of one's own
        if rest or not plain or not inputs or not outputs:
            continue
        starts = space.ranges[at][0], None if bias is None else space.ranges[bias][0]
        found.append(LayerShape(name, groups, outputs, inputs, *starts))
    return tuple(found)


def layers_within(
    layers: Sequence[LayerShape], space: ParameterSpace, positions: Sequence[int]
) -> tuple[LayerShape, ...]:
    """The layers whose weight is among some parameters, in the space of those alone."""
    part = space.part(positions)
    now = {
        space.ranges[i][0]: part.ranges[k][0] for k, i in enumerate(positions) if space.sizes[i]
    }
    return tuple(
        replace(s, weight=now[s.weight], bias=None if s.bias is None else now.get(s.bias))
        for s in layers
        if s.weight in now
    )
