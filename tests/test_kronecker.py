"""Kronecker products per layer: against dense products of inputs and gradients, example by example."""

import copy
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import holdfast as hf
import kronecker_oracle as oracle
import reference
from holdfast import memory
from holdfast.approximation import kronecker as recipe_module
from holdfast.structure import layer_shapes
from models_zoo import CASES, Columns, Network, Transformer, batches, flat, nudge, shuffled
from recipes_table import ALL_IMPORTANCES, close
from test_layers import (
    Attention,
    Checkpointed,
    Functional,
    Head,
    Mixed,
    NeverCalled,
    ScaledLinear,
    Tied,
    TimeFirst,
    Twice,
    Unused,
)

DOUBLE = torch.float64
CORRECTIONS = ["none", "eigen"]
correction = pytest.mark.parametrize("correction", CORRECTIONS)


@pytest.fixture(autouse=True)
def _to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest eigenvalue as dense algebra finds it: with all the steps that it takes."""
    monkeypatch.setattr("holdfast.matrices.centre._LOOK", 1000)


def consolidate(
    model: nn.Module,
    columns: Columns,
    approximation: hf.Kronecker,
    importance: hf.Importance | None = None,
    size: int = 4,
    **options: Any,
) -> hf.KroneckerMatrix:
    recipe = hf.Regularizer(importance or hf.EWC(), approximation)
    penalty = recipe.consolidate(model, batches(columns, size), **{"seed": 0, **options})
    assert isinstance(penalty.matrix, hf.KroneckerMatrix)
    return penalty.matrix


def expected(
    model: nn.Module,
    columns: Columns,
    approximation: hf.Kronecker,
    importance: hf.Importance | None = None,
    **options: Any,
) -> Tensor:
    importance = importance or hf.EWC()
    W = reference.rows(model, columns, importance)
    total = oracle.kronecker(approximation, W, model, columns, importance, **options)
    return total / reference.divisor(importance, len(columns[0]))


def exact(model: nn.Module, columns: Columns, importance: hf.Importance | None = None) -> Tensor:
    return reference.omega(model, columns, importance or hf.EWC())


def inputs(*shape: int, count: int = 9) -> Columns:
    return torch.randn(count, *shape, dtype=DOUBLE), torch.randint(3, (count,))


class Downsampling(nn.Module):
    """Stride, padding, dilation, groups, normalisation: a small network of today."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, 4)
        self.mix = nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=2)
        self.depth = nn.Conv2d(4, 4, (1, 2), groups=4, padding_mode="circular", padding=(0, 1))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.depth(self.mix(self.norm(self.stem(x)).tanh()).tanh()).tanh()
        return self.head(z.mean((2, 3)))


class Block(nn.Module):
    """A transformer block without dropout, on vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x).mean(1))


class OnlyBias(nn.Module):
    """A frozen weight with a bias that is trained; and a weight whose bias is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.one.weight.requires_grad_(False)
        self.two.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.three(self.two(self.one(x).tanh()).tanh())


# name -> (network, shape of an example, layers that are products, those of them read by their rows)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], set[str], set[str]]] = {
    "linear": (lambda: nn.Linear(4, 3), (4,), {""}, set()),
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 3)),
        (4,),
        {"0", "2"},
        set(),
    ),
    "images": (Downsampling, (2, 6, 5), {"stem", "mix", "depth", "head"}, set()),
    "series": (
        lambda: Head(nn.Conv1d(4, 2, 3, padding=1, stride=2), 8),
        (4, 7),
        {"body", "head"},
        set(),
    ),
    "sequence": (lambda: Head(nn.Linear(7, 2), 8), (4, 7), {"body", "head"}, set()),
    "transformer": (
        Block,
        (3, 4),
        {"block.self_attn.out_proj", "block.linear1", "block.linear2", "head"},
        {"block.self_attn.out_proj"},
    ),
    "key bias": (lambda: Attention(4), (3, 4), {"query", "key", "value", "head"}, set()),
    "used twice": (Twice, (4,), {"body", "head"}, {"body"}),
    "tied": (Tied, (4,), {"head"}, set()),
    "functional": (Functional, (4,), {"body", "head"}, {"body"}),
    "never called": (NeverCalled, (4,), {"body", "head"}, {"body"}),
    "time first": (TimeFirst, (4,), {"body", "head"}, {"body"}),
    "folded": (Mixed, (4,), {"body", "head"}, {"body"}),
    "unused": (Unused, (4,), {"idle", "head"}, set()),
    "subclass": (lambda: ScaledLinear(4, 3), (4,), {""}, {""}),
    "reparametrised": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
        (4,),
        set(),
        set(),
    ),
    "recurrent": (lambda: Recurrent(), (4, 7), {"head"}, set()),
    "only a bias": (OnlyBias, (4,), {"two", "three"}, set()),
}


class Recurrent(nn.Module):
    """A layer of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.GRU(7, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0][:, -1])


def network(name: str) -> nn.Module:
    torch.manual_seed(3)
    return NETWORKS[name][0]().double()


@correction
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.filterwarnings("ignore::holdfast.gradients.VectorisationWarning")
def test_any_network(name: str, correction: str) -> None:
    """Every layer by the rule that is stated for it, whatever the batch size and the order."""
    _, shape, products, by_rows = NETWORKS[name]
    model, columns = network(name), inputs(*shape)
    approximation = hf.Kronecker(correction=correction)
    found = consolidate(model, columns, approximation, size=64)
    assert len(found.blocks) == len(products)
    truth = expected(model, columns, approximation, unread=by_rows)
    close(found.dense(), truth, 1e-8)
    close(consolidate(model, columns, approximation, size=1).dense(), truth, 1e-8)
    close(consolidate(model, shuffled(columns), approximation, size=7).dense(), truth, 1e-8)


@pytest.mark.parametrize("name", NETWORKS)
def test_layers_that_act_as_matrices(name: str) -> None:
    _, _, products, _ = NETWORKS[name]
    model = network(name)
    space = hf.ParameterSpace.of(model)
    shapes = layer_shapes(model, space)
    assert {s.name for s in shapes} == products == set(oracle.places(model))
    for s in shapes:
        held = dict(zip(space.names, space.ranges, strict=True))
        prefix = f"{s.name}." if s.name else ""
        assert held[f"{prefix}weight"][0] == s.weight
        assert held.get(f"{prefix}bias", (None,))[0] == s.bias
        assert s.size == oracle.places(model)[s.name].numel()


@pytest.mark.parametrize("name", ["images", "sequence", "transformer", "used twice"])
@pytest.mark.parametrize("importance", ALL_IMPORTANCES)
def test_every_importance(name: str, importance: str) -> None:
    _, shape, _, by_rows = NETWORKS[name]
    model, columns = network(name), inputs(*shape, count=5)
    chosen = ALL_IMPORTANCES[importance]
    truth = expected(model, columns, hf.Kronecker(), chosen, unread=by_rows)
    close(consolidate(model, columns, hf.Kronecker(), chosen).dense(), truth, 1e-8)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_forward_pass_that_is_repeated(reentrant: bool) -> None:
    model, columns = Checkpointed(reentrant).double(), inputs(4)
    plain = nn.Sequential(model.first, model.body, nn.Tanh(), model.head)
    names = {"0": "first", "1": "body", "3": "head"}
    assert set(oracle.places(plain)) == set(names)
    found = consolidate(model, columns, hf.Kronecker())
    close(found.dense(), expected(plain, columns, hf.Kronecker()))


# ---- where it is exact ----


def within_layers(model: nn.Module, omega: Tensor) -> Tensor:
    """The blocks of the layers that are matrices, and the diagonal of the rest."""
    out = omega.diagonal().diag()
    for place in (p for stack in oracle.places(model).values() for p in stack):
        oracle.put(out, place, oracle.take(omega, place))
    return out


@correction
@pytest.mark.parametrize("name", ["linear", "perceptron", "subclass", "only a bias"])
def test_one_example_is_exact(name: str, correction: str) -> None:
    """A row of rank one is a Kronecker product, however the layer is read."""
    model, columns = network(name), inputs(4, count=1)
    found = consolidate(model, columns, hf.Kronecker(correction=correction))
    close(found.dense(), within_layers(model, exact(model, columns)))


@correction
@pytest.mark.parametrize("bias", [True, False])
def test_independent_inputs_and_gradients_are_exact(correction: str, bias: bool) -> None:
    """Every input with every gradient: E[a aᵀ ⊗ g gᵀ] is the product of the means."""
    a, g = torch.randn(6, 4, dtype=DOUBLE), torch.randn(5, 3, dtype=DOUBLE)
    x, weight = a.repeat_interleave(5, 0), g.repeat(6, 1)
    importance = hf.Custom(lambda outputs, batch: (outputs * batch[1]).sum(1))
    model = nn.Linear(4, 3, bias=bias).double()
    approximation = hf.Kronecker(correction=correction)
    found = consolidate(model, (x, weight), approximation, importance)
    close(found.dense(), exact(model, (x, weight), importance))


@correction
def test_expected_labels_count_the_inputs_once(correction: str) -> None:
    """At zero weights all gradients are those of uniform probabilities: independent of the inputs."""
    model = nn.Linear(4, 3).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    columns, importance = inputs(4), hf.EWC(labels="expected")
    found = consolidate(model, columns, hf.Kronecker(correction=correction), importance)
    close(found.dense(), exact(model, columns, importance))


@correction
def test_slices_of_one_layer_are_exact(correction: str) -> None:
    model, columns = nn.Linear(4, 3).double(), inputs(4)
    importance = hf.SCP(slices=None)
    found = consolidate(model, columns, hf.Kronecker(correction=correction), importance)
    close(found.dense(), exact(model, columns, importance))


@pytest.mark.parametrize("name", [n for n in NETWORKS if n != "reparametrised"])
@pytest.mark.filterwarnings("ignore::holdfast.gradients.VectorisationWarning")
def test_the_correction_is_never_worse(name: str) -> None:
    """The best diagonal in a basis in which the plain form is diagonal, too; and the exact trace."""
    model, columns = network(name), inputs(*NETWORKS[name][1])
    omega = hf.DenseMatrix(exact(model, columns))
    plain = consolidate(model, columns, hf.Kronecker())
    better = consolidate(model, columns, hf.Kronecker(correction="eigen"))
    errors = [hf.frobenius_error(matrix, omega) for matrix in (better, plain)]
    assert errors[0] <= errors[1] + 1e-12
    close(better.trace(), omega.trace())
    if name in ("perceptron", "images", "sequence"):
        assert errors[0] < 0.999 * errors[1]
        assert abs(float(plain.trace() - omega.trace())) > 1e-6 * float(omega.trace())


# ---- one pass, any data ----


@pytest.mark.parametrize("size", [1, 7, 64])
@pytest.mark.parametrize("importance", ["ewc-true", "ewc-expected"])
def test_a_basis_from_the_examples_that_can_be_held(
    size: int, importance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first examples give the bases; all of them the second moments in them, exactly."""
    monkeypatch.setattr(recipe_module, "_BATCH", 6)
    monkeypatch.setattr(recipe_module, "HELD_BYTES", 0)
    model, columns = network("perceptron"), inputs(4, count=20)
    chosen = ALL_IMPORTANCES[importance]
    with pytest.warns(UserWarning, match=r"bases come from its first 6 rows.*shuffle") as told:
        found = consolidate(model, columns, hf.Kronecker(correction="eigen"), chosen, size=size)
    assert len(told) == 1
    omega = exact(model, columns, chosen)
    per_example = 3 if importance == "ewc-expected" else 1
    first = tuple(column[: 6 // per_example] for column in columns)
    at = oracle.places(model)
    seen = oracle.pairs(model, first, chosen, at)
    for block, (path, places) in zip(found.blocks, at.items(), strict=True):
        assert block.values is not None
        A, G = (factor[0] for factor in oracle.factors(seen[path]))
        for basis, factor in ((block.inputs[0, 0], A), (block.outputs[0, 0], G)):
            turned = basis.T @ factor @ basis
            close(turned, turned.diagonal().diag())
            close(basis.T @ basis, torch.eye(len(basis), dtype=DOUBLE))
        U = torch.kron(block.outputs[0, 0], block.inputs[0, 0])
        moments = (U.T @ oracle.take(omega, places[0]) @ U).diagonal()
        close(block.values.flatten(), moments)
    close(found.trace(), omega.trace())


@correction
def test_sequences_of_different_lengths(correction: str) -> None:
    """Every position counts the same for the inputs; lengths that occur once are no exception."""
    model = Block().double()
    data = [inputs(2 + k % 3, 4, count=3) for k in range(5)] + [inputs(6, 4, count=1)]
    approximation = hf.Kronecker(correction=correction)
    recipe = hf.Regularizer(hf.EWC(), approximation)
    found = recipe.consolidate(model, data, seed=0).matrix.dense()
    at, W = oracle.places(model), []
    seen: oracle.Pairs = {}
    for batch in data:
        W.append(reference.rows(model, batch, hf.EWC()))
        for path, pairs in oracle.pairs(model, batch, hf.EWC(), at).items():
            seen.setdefault(path, []).extend(pairs)
    rows = torch.cat(W)
    omega = rows.T @ rows / len(rows)
    truth = omega.diagonal().diag()
    for path, (place,) in at.items():
        block = oracle.take(omega, place)
        A, G = oracle.partial_traces(block, *place.shape)
        if path in seen:
            A, G = (factor[0] for factor in oracle.factors(seen[path]))
        product = torch.kron(G, A) / (len(rows) if path in seen else 1)
        oracle.put(
            truth, place, product if correction == "none" else oracle.corrected(block, A, G)
        )
    close(found, truth, 1e-8)


@pytest.mark.parametrize("rank", [None, 2])
def test_padding_has_no_part(rank: int | None) -> None:
    """Positions that the loss leaves out may hold anything, and there may be any number of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = torch.randn(9, 2, 4, dtype=torch.float64), torch.randint(0, 3, (9, 2))

    def padded(more: int, value: float) -> Tensor:
        filled = torch.cat([x, torch.full((9, more, 4), value, dtype=torch.float64)], 1)
        ignored = torch.cat([y, torch.full((9, more), -100)], 1)
        batches = [(filled[i : i + 4], ignored[i : i + 4]) for i in range(0, 9, 4)]
        recipe = hf.Regularizer(hf.EWC(), hf.Kronecker(rank=rank))
        return recipe.consolidate(model, batches, seed=0).matrix.dense()

    expected = padded(0, 0.0)
    for more, value in ((3, 0.0), (3, 10.0), (1, -1.0)):
        close(padded(more, value), expected)


@correction
def test_batches_that_cannot_be_cut(correction: str) -> None:
    """Their rows are written out one by one, and layers taken from those."""
    model, columns = network("perceptron"), inputs(4)
    data = [(*batch, "uncut") for batch in batches(columns, 4)]
    approximation = hf.Kronecker(correction=correction)
    found = hf.Regularizer(hf.EWC(), approximation).consolidate(model, data, seed=0).matrix
    close(found.dense(), expected(model, columns, approximation, unread=("0", "2")))


def test_data_of_both_kinds() -> None:
    """Some rows by inputs and gradients, some written out: the product nearest to the sum of both."""
    model, columns = network("perceptron"), inputs(4)
    first, second = (tuple(c[part] for c in columns) for part in (slice(0, 5), slice(5, 9)))
    recipe = hf.Regularizer(hf.EWC(), hf.Kronecker())
    found = recipe.consolidate(model, [first, (*second, "uncut")], seed=0).matrix
    total = 5 * expected(model, first, hf.Kronecker())
    total = total + 4 * expected(model, second, hf.Kronecker(), unread=("0", "2"))
    close(found.dense(), oracle.merged(hf.Kronecker(merge="nearest"), total / 9, model))
    eigen = hf.Regularizer(hf.EWC(), hf.Kronecker(correction="eigen"))
    corrected = eigen.consolidate(model, [first, (*second, "uncut")], seed=0).matrix
    close(corrected.trace(), exact(model, columns).trace())


@correction
@pytest.mark.parametrize("size", [1, 64])
def test_as_a_part_of_others(correction: str, size: int) -> None:
    """In a composite a layer may be cut: its bias belongs to another part, here to a diagonal."""
    model, columns = Network().double(), inputs(4)
    member = hf.Kronecker(correction=correction)
    parts = {"head.bias": hf.Diagonal(), "body.*": member, "*": hf.Kronecker()}
    recipe = hf.Regularizer(hf.EWC(), hf.Composite(parts))
    found = recipe.consolidate(model, batches(columns, size), seed=0).matrix.dense()
    W = reference.rows(model, columns, hf.EWC())
    truth = (W.T @ W / 9).diagonal().diag()
    for chosen, names, part in (
        (member, ["body.weight", "body.bias"], slice(0, 15)),
        (hf.Kronecker(), ["head.weight"], slice(15, 24)),
    ):
        total = oracle.kronecker(chosen, W[:, part], model, columns, hf.EWC(), names=names)
        truth[part, part] = total / 9
    close(found, truth)


# ---- several tasks ----

TASKS = 4
HISTORIES = {"sum": hf.Sum(), "mean": hf.Mean(), "moving_average": hf.MovingAverage(new=0.3)}


@functools.cache
def tasks(name: str) -> list[tuple[nn.Module, Columns]]:
    model, found = network(name), []
    for k in range(TASKS):
        model = nudge(copy.deepcopy(model), seed=k)
        torch.manual_seed(k)
        found.append((model, inputs(*NETWORKS[name][1], count=6)))
    return found


def learned(
    name: str, approximation: hf.Kronecker, history: hf.History, anchor: str, order: int = 1
) -> hf.Penalty:
    recipe = hf.Regularizer(hf.EWC(), approximation, 2.0, history, anchor=anchor)
    penalty = None
    for model, columns in tasks(name)[::order]:
        penalty = recipe.consolidate(model, [columns], previous=penalty, seed=0)
    assert penalty is not None
    return penalty


@functools.cache
def alone(name: str, correction: str) -> list[Tensor]:
    approximation = hf.Kronecker(correction=correction)
    by_rows = NETWORKS[name][3]
    return [expected(m, c, approximation, unread=by_rows) for m, c in tasks(name)]


@pytest.mark.parametrize("name", ["perceptron", "images", "used twice"])
@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
@pytest.mark.parametrize("anchor", ["latest", "each"])
@pytest.mark.parametrize(
    ("correction", "merge"),
    [
        ("none", "average"),
        ("none", "nearest"),
        ("none", "stack"),
        ("eigen", "average"),  # the sum alone does not say what "nearest" is: see below
        ("eigen", "stack"),
    ],
)
def test_histories(
    name: str, history: hf.History, merge: str, anchor: str, correction: str
) -> None:
    """Task after task by dense algebra: the merged matrix, and the pull of every task to its anchor."""
    approximation = hf.Kronecker(correction=correction, merge=merge)
    zero = torch.zeros_like(flat(network(name)))
    omega, b, k, before = torch.zeros(()), zero, torch.zeros(()), None
    for count, ((model, _), new) in enumerate(
        zip(tasks(name), alone(name, correction), strict=True)
    ):
        w_old, w_new = history.weights(count)
        here = flat(model)
        if before is None:
            omega = w_new * new
        else:
            d = here - before
            k = w_old * (k + 2 * b @ d + d @ omega @ d)
            b = w_old * (b + omega @ d)
            total = w_old * omega + w_new * new
            omega = oracle.merged(approximation, total, model)
            if merge != "stack":
                b, k = oracle.recentred(total, omega, b, k)
        before = here
    penalty = learned(name, approximation, history, anchor)
    close(penalty.matrix.dense(), omega, 1e-7)
    probe = nudge(copy.deepcopy(tasks(name)[-1][0]), seed=9)
    delta = flat(probe) - before
    value, gradient = delta @ omega @ delta, 2 * omega @ delta
    tolerance = 1e-7
    if anchor == "each":
        value, gradient = value + 2 * b @ delta + k, gradient + 2 * b
    close(penalty(probe).detach(), value, tolerance)
    probe.zero_grad()
    penalty.add_grad_(probe)
    grads = [p.grad.flatten() for p in probe.parameters() if p.grad is not None]
    close(torch.cat(grads), gradient, tolerance)


@correction
@pytest.mark.parametrize("merge", ["average", "nearest"])
def test_centres_of_merged_tasks(merge: str, correction: str) -> None:
    """Never negative; and a task that holds nothing moves nothing."""
    name = "perceptron"
    approximation = hf.Kronecker(correction=correction, merge=merge)
    penalty = learned(name, approximation, hf.Sum(), "each")
    for seed in range(20):
        probe = nudge(copy.deepcopy(tasks(name)[seed % TASKS][0]), seed=seed, scale=0.5)
        assert float(penalty(probe).detach()) >= -1e-12
    recipe = hf.Regularizer(hf.EWC(), approximation, anchor="each")
    model, (x, y) = tasks(name)[0]
    start = recipe.consolidate(model, [(x, y)], seed=0)
    moved = nudge(copy.deepcopy(model), seed=7)
    with pytest.warns(hf.ImportanceWarning, match="zero"):  # a task that holds nothing
        after = recipe.extend(start, moved, 0 * start.matrix, hf.TaskRecord(1, 0))
    # as near as the steps towards the centre come
    close(after(model).detach() + 1, torch.ones((), dtype=DOUBLE), 1e-5)
    nudge(moved, seed=8)
    close(after(moved).detach(), start(moved).detach(), 1e-5)


@correction
@pytest.mark.parametrize("name", ["perceptron", "images"])
def test_averaging_does_not_depend_on_the_order_of_tasks(name: str, correction: str) -> None:
    """Partial traces add up: merged task by task or all at once, forwards or backwards."""
    if correction == "eigen":  # the bases are the same, what is off their diagonal is lost earlier
        one, two = (
            learned(name, hf.Kronecker(correction="eigen"), hf.Sum(), "latest", order).matrix
            for order in (1, -1)
        )
        close(one.trace(), two.trace())
        for a, b in zip(one.blocks, two.blocks, strict=True):
            for x, y in zip(a.factors(), b.factors(), strict=True):
                close(x, y, 1e-7)
        return
    total = sum(alone(name, correction), torch.zeros(()))
    truth = oracle.merged(hf.Kronecker(), total, network(name))
    for order in (1, -1):
        close(learned(name, hf.Kronecker(), hf.Sum(), "latest", order).matrix.dense(), truth, 1e-8)


@pytest.mark.parametrize("name", ["perceptron", "images", "used twice"])
def test_an_average_loses_no_task(name: str) -> None:
    """It dominates every task's block times that block's share of the trace."""
    merged = learned(name, hf.Kronecker(), hf.Sum(), "latest").matrix.dense()
    separate = alone(name, "none")
    for place in (p for stack in oracle.places(network(name)).values() for p in stack):
        blocks = [oracle.take(m, place) for m in separate]
        total = sum(block.trace() for block in blocks)
        for block in blocks:
            rest = oracle.take(merged, place) - block.trace() / total * block
            assert float(torch.linalg.eigvalsh(rest)[0]) > -1e-10 * float(total)


@pytest.mark.parametrize("name", ["perceptron", "images"])
def test_the_nearest_product_is_nearest(name: str) -> None:
    """Nearer to the sum of two than the average and than products beside it; and still positive."""
    (m1, c1), (m2, c2) = tasks(name)[:2]
    errors = {}
    total = sum(alone(name, "none")[:2], torch.zeros(()))
    for merge in ("average", "nearest"):
        recipe = hf.Regularizer(hf.EWC(), hf.Kronecker(merge=merge))
        first = recipe.consolidate(m1, [c1], seed=0)
        found = recipe.consolidate(m2, [c2], previous=first, seed=0).matrix
        errors[merge] = float((found.dense() - total).square().sum())
        assert float(torch.linalg.eigvalsh(found.dense())[0]) > -1e-10
    assert errors["nearest"] < errors["average"]
    for block in found.blocks:
        for part in ("inputs", "outputs"):
            noise = torch.randn_like(block.parts[part])
            beside = block.with_parts({part: block.parts[part] + 1e-2 * (noise + noise.mT)})
            others = [beside if b is block else b for b in found.blocks]
            error = hf.KroneckerMatrix(others, found.rest).dense() - total
            assert float(error.square().sum()) > errors["nearest"]


def test_corrected_products_merge_to_the_nearest_basis() -> None:
    """The eigenvectors of the product nearest to the tasks' partial traces; the exact diagonal there."""
    (m1, c1), (m2, c2) = tasks("perceptron")[:2]
    approximation = hf.Kronecker(correction="eigen", merge="nearest")
    recipe = hf.Regularizer(hf.EWC(), approximation)
    first = recipe.consolidate(m1, [c1], seed=0)
    found = recipe.consolidate(m2, [c2], previous=first, seed=0).matrix.dense()
    one, two = alone("perceptron", "eigen")[:2]
    for (place,) in oracle.places(m1).values():
        blocks = [oracle.take(m, place) for m in (one, two)]
        pairs = [oracle.partial_traces(block, *place.shape) for block in blocks]
        products = sum((torch.kron(G, A) for A, G in pairs), torch.zeros(()))
        truth = oracle.corrected(blocks[0] + blocks[1], *oracle.nearest(products, *place.shape))
        close(oracle.take(found, place), truth, 1e-8)


@pytest.mark.parametrize("merge", ["average", "nearest"])
@correction
def test_tasks_without_importance(merge: str, correction: str) -> None:
    """A matrix that is zero adds nothing, before and after another."""
    model, columns = network("perceptron"), inputs(4)
    zero = hf.Custom(lambda outputs, batch: 0 * outputs.sum(1))
    approximation = hf.Kronecker(correction=correction, merge=merge)
    recipe = hf.Regularizer(hf.EWC(), approximation)
    some = recipe.consolidate(model, [columns], seed=0)
    with pytest.warns(hf.ImportanceWarning, match="zero"):
        none = hf.Regularizer(zero, approximation).consolidate(model, [columns], seed=0)
    for one, two in ((some, none), (none, some), (none, none)):
        both, offset = approximation.add(one.matrix, (), two.matrix)
        assert offset == ()
        truth = torch.zeros_like(some.matrix.dense()) if one is two else some.matrix.dense()
        close(both.dense(), truth, 1e-9)


# ---- growing networks ----


def test_grown_groups_are_refused_by_name() -> None:
    small = nn.Sequential(nn.Conv1d(4, 4, 1, groups=2), nn.Flatten(), nn.Linear(8, 3)).double()
    columns = inputs(4, 2)
    grown = nn.Sequential(nn.Conv1d(4, 6, 1, groups=2), nn.Flatten(), nn.Linear(12, 3)).double()
    recipe = hf.Regularizer(hf.EWC(), hf.Kronecker(), include=("0.*",))
    first = recipe.consolidate(small, [columns])
    with pytest.raises(ValueError, match=r"0\.weight has 2 groups and grew from 4 to 6 outputs"):
        recipe.consolidate(grown, [columns], previous=first)


@correction
@pytest.mark.parametrize("merge", ["average", "nearest", "stack"])
def test_a_layer_that_is_new(merge: str, correction: str) -> None:
    model, columns = Network().double(), inputs(4)
    approximation = hf.Kronecker(correction=correction, merge=merge)
    recipe = hf.Regularizer(hf.EWC(), approximation)
    first = recipe.consolidate(model, [columns], seed=0)

    class Named(Network):
        def __init__(self) -> None:
            super().__init__()
            self.adapter = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.adapter(super().forward(x).tanh())

    larger = Named().double()
    larger.load_state_dict(model.state_dict(), strict=False)
    both = recipe.consolidate(larger, [columns], previous=first, seed=0).matrix.dense()
    new = expected(larger, columns, approximation)
    old = torch.zeros_like(new)
    old[:27, :27] = first.matrix.dense()
    close(both, oracle_or_stack(approximation, old, new, larger), 1e-8)


def oracle_or_stack(
    approximation: hf.Kronecker, old: Tensor, new: Tensor, model: nn.Module
) -> Tensor:
    if (approximation.correction, approximation.merge) != ("eigen", "nearest"):
        return oracle.merged(approximation, old + new, model)
    out = old + new
    for (place,) in oracle.places(model).values():
        blocks = [oracle.take(m, place) for m in (old, new)]
        if float(blocks[0].abs().max()) == 0:
            continue
        pairs = [oracle.partial_traces(block, *place.shape) for block in blocks]
        products = sum((torch.kron(G, A) for A, G in pairs), torch.zeros(()))
        nearest = oracle.nearest(products, *place.shape)
        oracle.put(out, place, oracle.corrected(blocks[0] + blocks[1], *nearest))
    return out


def test_a_layer_that_was_something_else_is_refused() -> None:
    """A weight that was shared had a diagonal; a product cannot be added to it."""
    tied, columns = Tied().double(), inputs(4)
    recipe = hf.Regularizer(hf.EWC(), hf.Kronecker())
    first = recipe.consolidate(tied, [columns])
    free = copy.deepcopy(tied)
    free.two.weight = nn.Parameter(free.one.weight.detach().clone())
    with pytest.raises(ValueError, match=r"the layer one is a matrix .* a diagonal in the other"):
        recipe.consolidate(free, [columns], previous=first)


# ---- size ----


def paper() -> nn.Module:
    sizes = (784, 1024, 512, 256, 10)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b, bias=False), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def test_floats_per_parameter() -> None:
    """2.3 numbers per parameter on the paper's perceptron, whatever the number of tasks."""
    model = paper()
    columns = torch.randn(3, 784), torch.tensor([1, 2, 3])
    recipe = hf.Regularizer(hf.EWC(), hf.Kronecker())
    penalty = recipe.consolidate(model, [columns], seed=0)
    count = sum(p.numel() for p in model.parameters())
    assert penalty.matrix.nbytes / 4 / count == pytest.approx(2.30, abs=0.01)
    again = recipe.consolidate(model, [columns], previous=penalty, seed=0)
    assert again.matrix.nbytes == penalty.matrix.nbytes
    setting = hf.Setting(penalty.space, None, layers=layer_shapes(model, penalty.space))
    assert penalty.matrix.nbytes <= hf.Kronecker().nbytes(setting) < 3 * penalty.matrix.nbytes


def test_what_does_not_fit_says_what_does(monkeypatch: pytest.MonkeyPatch) -> None:
    model, columns = nn.Linear(300, 3), (torch.randn(4, 300), torch.tensor([0, 1, 2, 0]))
    monkeypatch.setattr(memory, "available", lambda device: 100_000)
    with pytest.raises(MemoryError, match=r"Kronecker\(.*needs 7\d\d kB.*Diagonal\(\) would fit"):
        hf.Regularizer(hf.EWC(), hf.Kronecker()).consolidate(model, [columns])


@pytest.mark.parametrize("member", [hf.Kronecker(), hf.KroneckerPlusLowRank(rank=2, group=1)])
def test_a_layer_that_is_too_large_is_named(
    member: hf.Approximation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advice is true: what it names can be consolidated in that memory."""
    model = nn.Sequential()
    model.body, model.tanh, model.head = nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 900)
    data = [(torch.randn(4, 4), torch.arange(4))]
    monkeypatch.setattr(memory, "available", lambda device: 4_500_000)
    with pytest.raises(MemoryError, match=r"large for products: head \(900 x 9\)") as caught:
        hf.Regularizer(hf.EWC(), member).consolidate(model, data)
    advised = str(caught.value).split("(900 x 9); ")[1].split(" or Diagonal() would fit")[0]
    assert eval(advised, vars(hf)) == hf.Composite({"head.*": hf.Diagonal(), "*": member})
    hf.Regularizer(hf.EWC(), eval(advised, vars(hf))).consolidate(model, data)
    monkeypatch.setattr(memory, "available", lambda device: 40_000)  # not by the head alone
    with pytest.raises(MemoryError, match=r"Diagonal\(\) would fit$"):
        hf.Regularizer(hf.EWC(), member).consolidate(model, data)


@correction
@pytest.mark.parametrize("name", ["perceptron", "images", "transformer", "reparametrised"])
@pytest.mark.parametrize("merge", ["average", "stack"])
def test_saved_and_loaded(name: str, merge: str, correction: str, tmp_path: Any) -> None:
    model, columns = network(name), inputs(*NETWORKS[name][1])
    approximation = hf.Kronecker(correction=correction, merge=merge)
    recipe = hf.Regularizer(hf.EWC(), approximation, anchor="each")
    first = recipe.consolidate(model, [columns], seed=0)
    nudge(model, seed=1)
    penalty = recipe.consolidate(model, [columns], previous=first, seed=0)
    penalty.save(tmp_path / "penalty.safetensors")
    again = hf.Penalty.load(tmp_path / "penalty.safetensors")
    assert torch.equal(again.matrix.dense(), penalty.matrix.dense())
    probe = nudge(copy.deepcopy(model), seed=2)
    assert torch.equal(again(probe), penalty(probe))
    assert not any(math.isnan(float(t.sum())) for t in again.matrix.tensors.values())
    small = penalty.to(dtype=torch.bfloat16)
    assert small.matrix.nbytes * 4 == penalty.matrix.nbytes
    close(small(probe).detach(), penalty(probe).detach(), 0.05)
    third = recipe.consolidate(model, [columns], previous=again, seed=0)
    assert len(third.tasks) == 3


@pytest.mark.parametrize(
    ("field", "value", "known"),
    [
        ("correction", "eigenvalues", "'none' or 'eigen'"),
        ("merge", "rows", "'average', 'nearest' or 'stack'"),
    ],
)
def test_unknown_settings(field: str, value: str, known: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be {known}, got {value!r}"):
        hf.Kronecker(**{field: value})


def test_the_zoo_has_a_shared_embedding() -> None:
    """Tied to the output layer, it is the diagonal's; the block's linear layers are products."""
    model = Transformer(pooled=True).double()
    names = {s.name for s in layer_shapes(model, hf.ParameterSpace.of(model))}
    assert names == {"layer.self_attn.out_proj", "layer.linear1", "layer.linear2"}
    columns = CASES["transformer"].columns(5)
    found = consolidate(model, columns, hf.Kronecker())
    diagonal = exact(model, columns).diagonal()
    close(found.diagonal()[: model.embedding.weight.numel()], diagonal[:20])
