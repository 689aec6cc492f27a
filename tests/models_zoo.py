"""Small networks of every kind that must work, with data for each, in float64."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Columns = tuple[Tensor, ...]  # tensors whose first dimension is the example
VOCABULARY = 5
LENGTH = 4
IGNORED = -100


class Network(nn.Module):
    """Two layers with a tanh: smooth, so that every gradient is dense."""

    def __init__(self, inputs: int = 4, hidden: int = 3, outputs: int = 3) -> None:
        super().__init__()
        self.body = nn.Linear(inputs, hidden)
        self.head = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


class ConvNet(nn.Module):
    """Convolution, BatchNorm, dropout: what differs between training and evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(self.conv(x)).relu()
        return self.head(self.drop(nn.functional.avg_pool2d(z, 2).flatten(1)))


class Transformer(nn.Module):
    """One layer of attention; the embedding is also the output layer.

    Logits per token (B, T, V), or their mean over positions (B, V) with ``pooled``.
    """

    def __init__(self, pooled: bool) -> None:
        super().__init__()
        width = 4
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 5, dropout=0.2, batch_first=True)
        self.out = nn.Linear(width, VOCABULARY)
        self.out.weight = self.embedding.weight
        self.pooled = pooled

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = self.out(self.layer(self.embedding(input_ids)))
        return logits.mean(1) if self.pooled else logits


class PartlyFrozen(nn.Module):
    """A frozen layer in the middle, a frozen bias, and a parameter that the outputs never use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.frozen = nn.Linear(3, 4).requires_grad_(False)
        self.unused = nn.Parameter(torch.randn(2, 2))
        self.last = nn.Linear(4, 3)
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.frozen(self.first(x).tanh()).tanh())


@dataclass(frozen=True)
class Case:
    """A network and examples for it."""

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[int], Columns]
    tokens: bool = False  # logits per token, labels per token

    def model(self, seed: int = 0) -> nn.Module:
        """The network, the same for the same seed, in training mode as after training."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.build().double()
            if isinstance(model, ConvNet):  # running statistics that are far from (0, 1)
                for _ in range(3):
                    model(2 + 3 * torch.randn(16, 1, 6, 6, dtype=torch.float64))
                nn.init.uniform_(model.norm.weight, 0.5, 2)
                nn.init.normal_(model.norm.bias)
            return model

    def columns(self, count: int, seed: int = 0) -> Columns:
        """Examples, the same for the same seed; more of them begin with the same ones."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            each = [self.draw(1) for _ in range(count)]
        return tuple(torch.cat(column) for column in zip(*each, strict=True))


def _vectors(count: int) -> Columns:
    return torch.randn(count, 4, dtype=torch.float64), torch.randint(3, (count,))


def _images(count: int) -> Columns:
    return 1 + torch.randn(count, 1, 6, 6, dtype=torch.float64), torch.randint(3, (count,))


def _sentences(count: int) -> Columns:
    ids = torch.randint(VOCABULARY, (count, LENGTH))
    return ids, torch.randint(VOCABULARY, (count,))


def _token_labels(count: int) -> Columns:
    ids = torch.randint(VOCABULARY, (count, LENGTH))
    labels = torch.randint(VOCABULARY, (count, LENGTH))
    labels[torch.rand(count, LENGTH) < 0.4] = IGNORED
    return ids, labels


CASES = {
    case.name: case
    for case in (
        Case("mlp", Network, _vectors),
        Case("conv", ConvNet, _images),
        Case("transformer", lambda: Transformer(pooled=True), _sentences),
        Case("tokens", lambda: Transformer(pooled=False), _token_labels, tokens=True),
        Case("frozen", PartlyFrozen, _vectors),
    )
}


def batches(columns: Columns, size: int) -> list[Columns]:
    """The examples in order, as tuples of at most ``size``."""
    count = len(columns[0])
    return [
        tuple(column[first : first + size] for column in columns)
        for first in range(0, count, size)
    ]


def shuffled(columns: Columns, seed: int = 1) -> Columns:
    """The same examples in another order."""
    order = torch.randperm(len(columns[0]), generator=torch.Generator().manual_seed(seed))
    return tuple(column[order] for column in columns)


def nudge(model: nn.Module, seed: int = 0, scale: float = 0.3) -> nn.Module:
    """Move every trainable parameter, as training on another task would; returns the model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter += scale * noise.to(parameter.dtype)
    return model


def flat(model: nn.Module, names: Sequence[str] | None = None) -> Tensor:
    """The trainable (or named) parameters as one vector."""
    named = dict(model.named_parameters())
    if names is None:
        names = [name for name, parameter in named.items() if parameter.requires_grad]
    return torch.cat([named[name].detach().flatten() for name in names])
