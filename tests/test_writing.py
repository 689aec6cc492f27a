"""Rows that are written from what layers tell are those of one backward pass per example."""

from collections.abc import Callable
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


class Sorting(nn.Module):
    """Examples in another order for one layer, as sequences are sorted by length."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return self.head(self.b(self.a(x[order]).tanh())[order.argsort()].tanh())


class Mirror(nn.Module):
    """The last example first, all the way."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.a(x.flip(0)).tanh()).flip(0)


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
    "sorting": Sorting,
    "mirror": Mirror,
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


class Glance(nn.Module):
    """A layer that is read in the first batch; in the second its output is only looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.look: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x).tanh()
        if self.look is None:
            return self.head(hidden + self.b(x))
        self.b(self.look(x))
        return self.head(hidden)


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x[:1],
        lambda x: x[0],
        lambda x: torch.cat([x, x]),
        lambda x: x / 0,
        lambda x: x,
    ],
    ids=["one", "no batch", "more", "infinite", "all"],
)
def test_a_layer_that_is_only_looked_at_has_rows_of_zeros(
    look: Callable[[Tensor], Tensor],
) -> None:
    torch.manual_seed(1)
    model = Glance().double().eval()
    first, second = (CASES["mlp"].columns(COUNT, seed=seed) for seed in (0, 1))

    def data() -> Any:
        yield first
        model.look = look
        yield second

    rows = rows_of(model, data())
    found = [written(batch, 20, rows.gradients.space.dim) for batch in rows]
    close(found[1], reference.rows(model, second, hf.EWC(), seed=SEED))


class Sentences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word, self.head = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        words = x.unsqueeze(1).expand(-1, int(x[0, 0] > 0), -1)  # none, or one
        return self.head(x.tanh()) + self.word(words).sum(1)


def test_sequences_may_be_empty() -> None:
    torch.manual_seed(1)
    model = Sentences().double().eval()
    some, none = (CASES["mlp"].columns(COUNT, seed=seed) for seed in (0, 1))
    some[0][:, 0], none[0][:, 0] = 1, -1
    rows = rows_of(model, [some, none])
    found = [written(batch, 20, rows.gradients.space.dim) for batch in rows]
    for part, columns in zip(found, (some, none), strict=True):
        close(part, reference.rows(model, columns, hf.EWC(), seed=SEED))


@pytest.mark.parametrize(
    "approximation", [hf.Diagonal(), hf.BlockDiagonal(size=5), hf.Kronecker()]
)
@pytest.mark.parametrize("sides", [(0, 4), (4, 0)])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_layer_without_entries_is_no_obstacle(
    approximation: hf.Approximation, sides: tuple[int, int]
) -> None:
    class Hollow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty, self.head = nn.Linear(*sides, bias=False), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x.tanh()) + self.empty(x[:, : sides[0]]).sum()

    torch.manual_seed(1)
    model, columns = Hollow().double(), CASES["mlp"].columns(COUNT)
    penalty = hf.Regularizer(hf.EWC(), approximation).consolidate(model, [columns])
    expected = reference.rows(model, columns, hf.EWC()).square().sum() / COUNT
    if not isinstance(approximation, hf.Kronecker):
        close(penalty.matrix.trace(), expected)


def _changed(**settings: Any) -> nn.Module:
    """A convolution whose settings were changed after it was made, as segmentation networks do."""
    layer = nn.Conv2d(1, 3, 3, padding=1)
    for name, value in settings.items():
        setattr(layer, name, value)
    return layer


@pytest.mark.parametrize(
    "settings",
    [
        {"dilation": (2, 2), "padding": (2, 2)},
        {"padding": (0, 0)},
        {"padding": 2},
        {"stride": 2},
        {"padding": (2, 0), "stride": (1, 2)},
        {"padding": "same", "dilation": (2, 2)},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["diagonal", "blocks"])
def test_a_convolution_may_have_been_changed(kind: str, settings: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(_changed(**settings), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model, columns = model.double(), CASES["conv"].columns(COUNT)
    approximation = {"diagonal": hf.Diagonal(), "blocks": hf.BlockDiagonal(size=1)}[kind]
    penalty = hf.Regularizer(hf.EWC(), approximation).consolidate(model, [columns])
    expected = reference.rows(model, columns, hf.EWC()).square().sum(0) / COUNT
    close(penalty.matrix.diagonal(), expected)


def test_products_of_sequences_are_not_written_twice_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("holdfast.writing._ENTRIES", 14)
    model, columns = network("words"), CASES["mlp"].columns(COUNT)
    rows = rows_of(model, [columns])
    found = torch.cat([written(batch, 5, rows.gradients.space.dim) for batch in rows])
    close(found, reference.rows(model, columns, hf.EWC(), seed=SEED))


@pytest.mark.parametrize("name", ["pictures", "twice"])
def test_rows_that_are_told_piece_by_piece_stand_in_order(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.layers._PATCHES", 1)  # one picture at a time
    model, columns = network(name), CASES["mlp"].columns(COUNT)
    rows = rows_of(model, [columns])
    dim = rows.gradients.space.dim
    monkeypatch.setattr("holdfast.gradients.ROW_BYTES", 3 * 8 * dim)  # few rows at a time
    found = torch.cat([written(batch, 5, dim) for batch in rows])
    close(found, reference.rows(model, columns, hf.EWC(), seed=SEED))


@pytest.mark.parametrize("size", [1, 4, COUNT])
@pytest.mark.parametrize(
    "approximation",
    [
        hf.LowRank(rank=99),
        hf.BlockDiagonal(size=99),
        hf.Nystrom(size=99),
        hf.KroneckerPlusLowRank(rank=99),
    ],
    ids=lambda a: type(a).__name__,
)
def test_networks_that_sort_their_examples(approximation: hf.Approximation, size: int) -> None:
    model, columns = network("sorting"), CASES["mlp"].columns(COUNT)
    recipe = hf.Regularizer(hf.EWC(), approximation)
    penalty = recipe.consolidate(model, batches(columns, size), seed=0)
    rows = reference.rows(model, columns, hf.EWC())
    close(penalty.matrix.dense(), rows.T @ rows / COUNT, 1e-6)
