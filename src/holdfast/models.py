"""Networks of the experiments, as recipes that build them from a seed."""

import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from holdfast.configuration import register
from holdfast.multi_head import MultiHead
from holdfast.seeds import derive
from holdfast.wide_resnet import wide_resnet

__all__ = ["MLP", "MODELS", "Model", "MultiHeadMLP", "WideResNet", "mlp", "wide_resnet"]

Init = Literal["default", "xavier"]


def mlp(sizes: Sequence[int], bias: bool = True, init: Init = "default") -> nn.Sequential:
    """A multi-layer perceptron with ReLU between its linear layers.

    Args:
        sizes: Width of every layer from input to output, e.g. ``(2, 128, 64, 2)``.
        bias: Whether the linear layers have biases.
        init: ``"default"`` is PyTorch's; ``"xavier"`` is Glorot's uniform rule with gain 1 for the
            weights, and zero biases.
    """
    if len(sizes) < 2 or min(sizes) < 1:
        raise ValueError(
            f"sizes are the widths from input to output, at least two and all positive, got {sizes}"
        )
    if init not in ("default", "xavier"):
        raise ValueError(f"unknown init {init!r}; known: default, xavier")
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        linear = nn.Linear(inputs, outputs, bias=bias)
        if init == "xavier":
            nn.init.xavier_uniform_(linear.weight)
            if bias:
                nn.init.zeros_(linear.bias)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Model(ABC):
    """A network as a recipe: a frozen dataclass that builds it."""

    def build(self, seed: int) -> nn.Module:
        """A fresh network; the same seed gives the same weights, and the global generator is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(seed, "init"))
            return self._network()

    @abstractmethod
    def _network(self) -> nn.Module:
        """The network, its weights drawn from torch's global generator."""


@dataclasses.dataclass(frozen=True)
class MLP(Model):
    """The recipe of :func:`mlp`."""

    sizes: tuple[int, ...]
    bias: bool = True
    init: Init = "default"

    def _network(self) -> nn.Module:
        return mlp(self.sizes, bias=self.bias, init=self.init)


@dataclasses.dataclass(frozen=True)
class MultiHeadMLP(Model):
    """An MLP with a head per task, told the task by the last input column.

    Attributes:
        sizes: Widths from the input (without that column) to the outputs of one head.
        heads: The number of heads.
        bias: Whether the linear layers have biases.
        init: As for :func:`mlp`.
    """

    sizes: tuple[int, ...]
    heads: int
    bias: bool = True
    init: Init = "default"

    def __post_init__(self) -> None:
        if self.heads < 1:
            raise ValueError(f"the number of heads is 1 or larger, got {self.heads}")

    def _network(self) -> nn.Module:
        wide = (*self.sizes[:-1], self.heads * self.sizes[-1])
        return MultiHead(mlp(wide, bias=self.bias, init=self.init), self.heads)


@dataclasses.dataclass(frozen=True)
class WideResNet(Model):
    """The recipe of :func:`wide_resnet`."""

    depth: int = 16
    width: int = 4
    dropout: float = 0.2
    classes: int = 5
    autocast: bool = False

    def _network(self) -> nn.Module:
        return wide_resnet(self.depth, self.width, self.dropout, self.classes, self.autocast)


MODELS = register(
    Model, "model", {"mlp": MLP, "multi_head_mlp": MultiHeadMLP, "wide_resnet": WideResNet}
)
