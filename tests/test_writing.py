"""Rows that are written from what layers tell are those of one backward pass per example."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import holdfast as hf
import reference
from holdfast.gradients import Gradients
from holdfast.hashing import Draw
from holdfast.rows import RowBatch, Rows, WholeRows
from models_zoo import CASES, batches
from recipes_table import ALL_IMPORTANCES, close

SEED, COUNT = 3, 11


class Twice(nn.Module):
    """A layer that is called twice cannot be read; the one after it can."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.inner(x).tanh()).tanh())


class Idle(nn.Module):
    """A layer that no output depends on, and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.asleep, self.deaf, self.head = nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.deaf(x)
        return self.head(x.tanh())


class Words(nn.Module):
    """Linear layers at every position of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.head = nn.Linear(2, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.each(x.unflatten(1, (2, 2))).tanh()).mean(1)


class Pictures(nn.Module):
    """Convolutions with stride, groups, dilation and padding."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(1, 4, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(4, 4, 2, groups=2, dilation=2, padding=1, bias=False)
        self.line = nn.Conv1d(4, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (1, 2, 2)).repeat_interleave(3, 2).repeat_interleave(3, 3)
        return self.line(self.grouped(self.wide(x).tanh()).tanh().flatten(2)).mean(2)


NETWORKS = {
    "biases": lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
    "no biases": lambda: nn.Sequential(
        nn.Linear(4, 5, bias=False), nn.ReLU(), nn.Linear(5, 3, bias=False)
    ),
    "twice": Twice,
    "idle": Idle,
    "words": Words,
    "pictures": Pictures,
}


def network(name: str) -> nn.Module:
    torch.manual_seed(1)
    return NETWORKS[name]().double().eval()


def rows_of(model: nn.Module, data: Any, importance: hf.Importance | None = None) -> Rows:
    return Rows(model, data, hf.ParameterSpace.of(model), importance or hf.EWC(), Draw(SEED))


def written(batch: RowBatch, count: int, dim: int) -> Tensor:
    """The rows of a batch through a room for ``count`` of them."""
    room, found = torch.full((count, dim), torch.nan, dtype=torch.float64), []
    for part in batch.written(room):
        assert len(part) <= count
        assert part.data_ptr() == room.data_ptr()
        found.append(part.clone())
        room.fill_(torch.nan)
    return torch.cat(found)


@pytest.mark.parametrize("importance", ["ewc-true", "ewc-expected", "ewc-sampled", "mas-logits"])
@pytest.mark.parametrize("count", [1, 2, 5, 20])
@pytest.mark.parametrize("name", NETWORKS)
def test_rows_are_those_of_single_backward_passes(name: str, count: int, importance: str) -> None:
    model, columns = network(name), CASES["mlp"].columns(COUNT)
    rows = rows_of(model, batches(columns, 4), ALL_IMPORTANCES[importance])
    dim = rows.gradients.space.dim
    found = torch.cat([written(batch, count, dim) for batch in rows])
    close(found, reference.rows(model, columns, ALL_IMPORTANCES[importance], seed=SEED))


def test_layers_are_read_and_not_differentiated_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(Gradients, "rows")
    for name in ("biases", "no biases", "words", "pictures"):
        model, columns = network(name), CASES["mlp"].columns(COUNT)
        rows = rows_of(model, [columns])
        for batch in rows:
            written(batch, 4, rows.gradients.space.dim)


@pytest.mark.parametrize("case", ["mlp", "conv", "tokens", "frozen"])
def test_every_network_can_be_written(case: str) -> None:
    model, columns = CASES[case].model().eval(), CASES[case].columns(COUNT)
    rows = rows_of(model, batches(columns, 4))
    found = torch.cat([written(batch, 3, rows.gradients.space.dim) for batch in rows])
    close(found, reference.rows(model, columns, hf.EWC(), seed=SEED))


@pytest.mark.parametrize("count", [1, 3, 4, 9])
def test_a_batch_that_cannot_be_cut_is_written_too(count: int) -> None:
    model, columns = network("biases"), CASES["mlp"].columns(COUNT)
    rows = rows_of(model, [(*batch, "whole") for batch in batches(columns, 4)])
    found = []
    for batch in rows:
        assert isinstance(batch, WholeRows)
        found.append(written(batch, count, rows.gradients.space.dim))
    close(torch.cat(found), reference.rows(model, columns, hf.EWC(), seed=SEED))


def test_an_entry_that_overflows_is_named() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1e-30)
    inputs = torch.ones(5, 1)
    inputs[3] = 1e25  # its loss is 1e15, its gradient 1e45
    recipe = hf.Regularizer(hf.EWC(), hf.BlockDiagonal(size=2))
    with pytest.raises(ValueError, match=r"the gradient of example 3 .* has NaN or inf entries"):
        recipe.consolidate(
            model, [(inputs, torch.zeros(5))], loss=lambda outputs, _: 1e20 * outputs[:, 0]
        )
