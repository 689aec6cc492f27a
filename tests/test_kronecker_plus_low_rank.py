"""Products for layers, a low rank across them: what is kept exactly, and what it brings."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import holdfast as hf
import kronecker_oracle
import reference
from holdfast.rows import GivenRows
from holdfast.structure import LayerShape
from holdfast.views import TracedRows
from models_zoo import CASES, batches, flat, nudge
from recipes_table import close

SEED = 5
COUNT = 35
DOUBLE = torch.float64
both_corrections = pytest.mark.parametrize("correction", ["none", "eigen"])


class Grouped(nn.Module):
    """A convolution in groups, then one over few positions, then one with many inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, groups=2, bias=False)
        self.second = nn.Conv1d(4, 3, 2, stride=7)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.repeat(1, 2, 1, 1)).tanh().flatten(2)
        return self.head(self.second(h).tanh()[:, :, :2].flatten(1))


def network(name: str) -> nn.Module:
    if name != "grouped":
        return CASES[name].model()
    torch.manual_seed(0)
    return Grouped().double()


def consolidated(
    approximation: hf.Approximation, name: str
) -> tuple[hf.Penalty, Tensor, kronecker_oracle.Places]:
    model = network(name)
    columns = CASES["conv" if name == "grouped" else name].columns(COUNT)
    recipe = hf.Regularizer(hf.EWC(), approximation)
    penalty = recipe.consolidate(model, batches(columns, 8), seed=SEED)
    W = reference.rows(model, columns, hf.EWC())
    return penalty, W.T @ W / COUNT, kronecker_oracle.places(model)


@both_corrections
@pytest.mark.parametrize("name", ["mlp", "conv", "transformer", "grouped"])
def test_the_trace_of_every_layer_and_the_other_diagonal_are_exact(
    name: str, correction: str
) -> None:
    """Whatever F took of them; between layers stands what F says."""
    recipe = hf.KroneckerPlusLowRank(rank=3, group=1, correction=correction)
    penalty, exact, at = consolidated(recipe, name)
    found, low = penalty.matrix.dense(), penalty.matrix.parts[1].dense()
    close(low, reference.best_rank(exact, 3))
    rest = torch.ones(len(exact), dtype=torch.bool)
    for matrices in at.values():
        entries = matrices.flatten()
        rest[entries] = False
        share = kronecker_oracle.take(found, matrices).trace()
        close(share, kronecker_oracle.take(exact, matrices).trace())
        others = torch.ones_like(rest)
        others[entries] = False
        assert torch.equal(found[entries][:, others], low[entries][:, others])
    torch.testing.assert_close(found.diagonal()[rest], exact.diagonal()[rest])
    assert float(torch.linalg.eigvalsh(found)[0]) > -1e-12 * float(exact.trace())


@pytest.mark.parametrize("name", ["mlp", "conv", "transformer", "grouped"])
@pytest.mark.parametrize("rank", [1, 4])
def test_corrected_products_are_never_worse_than_the_low_rank_alone(name: str, rank: int) -> None:
    """In Frobenius norm: they are the diagonal of the difference, in some basis of every layer."""
    penalty, exact, _ = consolidated(
        hf.KroneckerPlusLowRank(rank, group=1, correction="eigen"), name
    )
    alone = (exact - reference.best_rank(exact, rank)).norm()
    assert float((exact - penalty.matrix.dense()).norm()) < float(alone)


def test_lengths_of_rows_are_measured_when_layers_are_read() -> None:
    """From rows, from single positions, and from several, in either order of multiplication."""
    layer = LayerShape("layer", 2, 3, 4, 0, 24)
    W = torch.randn(5, 30, dtype=DOUBLE)
    expected = W.square().sum()

    class Silent:
        def pairs(self, layer: int, inputs: Tensor, gradients: Tensor) -> None: ...

        def rows(self, layer: int, rows: Tensor) -> None: ...

    traces = torch.zeros(1, dtype=DOUBLE)
    rows = TracedRows(GivenRows(W, torch.arange(5)), traces)
    rows.like([W[:2]], torch.arange(2)).read_layers(
        [layer], Silent(), torch.zeros(30, dtype=DOUBLE)
    )
    rows.like([W[2:]], torch.arange(3)).read_layers(
        [layer], Silent(), torch.zeros(30, dtype=DOUBLE)
    )
    close(traces[0], expected)

    class Pairs(GivenRows):
        def read_layers(self, layers: Any, reader: Any, squares: Tensor) -> None:
            reader.pairs(0, inputs, gradients)

    for positions in (1, 3, 9):
        inputs = torch.randn(5, 2, positions, 5, dtype=DOUBLE)
        gradients = torch.randn(5, 2, positions, 3, dtype=DOUBLE)
        traces.zero_()
        TracedRows(Pairs(W, torch.arange(5)), traces).read_layers([layer], Silent(), W[0])
        close(traces[0], torch.einsum("bgto,bgti->bgoi", gradients, inputs).square().sum())


@both_corrections
@pytest.mark.parametrize("anchor", ["latest", "each"])
def test_what_merging_drops_is_held_by_the_products(correction: str, anchor: str) -> None:
    """Two tasks by dense algebra; under two anchors the minimum is that of both."""
    case, rank = CASES["mlp"], 2
    approximation = hf.KroneckerPlusLowRank(rank, group=1, correction=correction)
    recipe = hf.Regularizer(hf.EWC(), approximation, 1.0, anchor=anchor)
    model, found, alone, anchors = case.model(), None, [], []
    for k in range(2):
        nudge(model, seed=k)
        data = [case.columns(12, seed=k)]
        alone.append(recipe.consolidate(model, data, seed=SEED).matrix)
        found = recipe.consolidate(model, data, previous=found, seed=SEED)
        anchors.append(flat(model))
    assert found is not None
    terms, lows = ([m.parts[i].dense() for m in alone] for i in range(2))
    at = kronecker_oracle.places(model)
    merged = kronecker_oracle.merged_plus_low_rank(correction, rank, terms, lows, at)
    close(found.matrix.dense(), merged)
    for matrices in at.values():
        exact = kronecker_oracle.take(sum(terms) + sum(lows), matrices).trace()
        close(kronecker_oracle.take(found.matrix.dense(), matrices).trace(), exact)
    if anchor == "latest":
        assert found.offset == ()
        return
    d, first = anchors[1] - anchors[0], terms[0] + lows[0]
    exact = sum(terms) + sum(lows)
    pull, constant = kronecker_oracle.recentred(exact, merged, first @ d, d @ first @ d)
    probe = nudge(copy.deepcopy(model), seed=7)
    delta = flat(probe) - anchors[1]
    q = delta @ merged @ delta + 2 * pull @ delta + constant
    close(found(probe).detach(), 0.5 * q, 1e-6)


@both_corrections
def test_what_shrinking_takes_off_is_held_by_the_products(correction: str) -> None:
    """At every truncation, and when tasks are merged: the trace of a layer stays that of the sum."""
    case, rank = CASES["mlp"], 2
    approximation = hf.KroneckerPlusLowRank(rank, group=1, shrink=True, correction=correction)
    recipe = hf.Regularizer(hf.EWC(), approximation)
    model, found, alone, exact = case.model(), None, [], torch.zeros(())
    for k in range(2):
        nudge(model, seed=k)
        columns = case.columns(12, seed=k)
        alone.append(recipe.consolidate(model, [columns], seed=SEED).matrix)
        found = recipe.consolidate(model, [columns], previous=found, seed=SEED)
        exact = exact + reference.omega(model, columns, hf.EWC())
    assert found is not None
    terms, lows = ([m.parts[i].dense() for m in alone] for i in range(2))
    at = kronecker_oracle.places(model)
    merged = kronecker_oracle.merged_plus_low_rank(correction, rank, terms, lows, at, shrink=True)
    close(found.matrix.dense(), merged)
    for matrices in at.values():
        trace = kronecker_oracle.take(exact, matrices).trace()
        close(kronecker_oracle.take(found.matrix.dense(), matrices).trace(), trace)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be a positive integer, got 0"),
        ({"correction": "all"}, "correction must be 'none' or 'eigen', got 'all'"),
        ({"merge": "average"}, "merge must be 'rows' or 'stack', got 'average'"),
    ],
)
def test_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf.KroneckerPlusLowRank(**options)


def trained(seed: int) -> tuple[nn.Module, list[tuple[Tensor, Tensor]], nn.Module]:
    """A small network after a task, the task's data, and the network after another task."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 5)
    ).double()

    def learned(start: nn.Module, x: Tensor, y: Tensor, steps: int) -> nn.Module:
        network = copy.deepcopy(start)
        optimiser = torch.optim.Adam(network.parameters(), 1e-2)
        for _ in range(steps):
            some = torch.randint(len(x), (64,))
            optimiser.zero_grad()
            functional.cross_entropy(network(x[some]), y[some]).backward()
            optimiser.step()
        return network

    def task() -> tuple[Tensor, Tensor]:
        centres, y = 1.2 * torch.randn(5, 20), torch.randint(5, (500,))
        return (centres[y] + torch.randn(500, 20)).double(), y

    x, y = task()
    first = learned(model, x, y, 300)
    return (
        first,
        [(x[i : i + 50], y[i : i + 50]) for i in range(0, 500, 50)],
        learned(first, *task(), 100),
    )


def test_the_penalty_of_the_next_task_is_seen_better_than_by_either_part() -> None:
    """How far q̂/q is from one, at the parameters after another task; rank 5, five networks."""
    recipes: dict[str, hf.Approximation] = {
        "exact": hf.Full(form="dense"),
        "both": hf.KroneckerPlusLowRank(rank=5, group=1),
        "corrected": hf.KroneckerPlusLowRank(rank=5, group=1, correction="eigen"),
        "kronecker": hf.Kronecker(),
        "low rank": hf.LowRank(rank=5, group=1),
        "diagonal too": hf.DiagonalPlusLowRank(rank=5, group=1),
    }
    found: dict[str, list[float]] = {name: [] for name in recipes}
    for seed in range(5):
        model, data, later = trained(seed)
        values = {}
        for name, approximation in recipes.items():
            recipe = hf.Regularizer(hf.EWC(labels="sampled"), approximation)
            penalty = recipe.consolidate(model, data, seed=seed, progress=False)
            values[name] = float(penalty(later).detach())
        for name, value in values.items():
            found[name].append(abs(value / values["exact"] - 1))
    error = {name: sum(each) / 5 for name, each in found.items()}
    assert error["both"] < 0.1
    assert error["corrected"] < 0.15
    assert error["low rank"] > 0.2
    assert error["diagonal too"] > 0.2
    assert error["kronecker"] > 0.5
