"""Consolidation leaves the model and the world bit-identical, in any context, also when it fails."""

import contextlib
import copy
import dataclasses
import gc
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import holdfast as hf
import reference
from holdfast.approximation import diagonal, kronecker, low_rank
from holdfast.gradients import Gradients, VectorisationWarning
from holdfast.regrouping import Regrouping
from models_zoo import CASES, Columns, Network, batches, nudge
from recipes_table import (
    ALL_APPROXIMATIONS,
    ALL_IMPORTANCES,
    approximate,
    close,
    too_small_to_sketch,
)

SEED = 8


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal to the bit, NaN included."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    raw = [t.detach().clone().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*raw)


class Snapshot:
    """Everything about a model, and about the world's generators, that must not change."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        modules = list(model.modules())
        self.modes = [module.training for module in modules]
        self.parameters = [(p, p.detach().clone()) for p in model.parameters()]
        self.flags = [p.requires_grad for p in model.parameters()]
        self.grads = [
            (p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()
        ]
        self.buffers = [dict(module._buffers) for module in modules]
        self.contents = [
            {name: None if b is None else b.clone() for name, b in module._buffers.items()}
            for module in modules
        ]
        self.torch, self.python = torch.get_rng_state(), random.getstate()
        self.numpy = np.random.get_state()  # noqa: NPY002

    def check(self) -> None:
        modules = list(self.model.modules())
        assert [module.training for module in modules] == self.modes
        assert list(map(id, self.model.parameters())) == [id(p) for p, _ in self.parameters]
        assert all(same(p, before) for p, before in self.parameters)
        assert [p.requires_grad for p in self.model.parameters()] == self.flags
        for p, (grad, before) in zip(self.model.parameters(), self.grads, strict=True):
            assert p.grad is grad
            assert same(p.grad, before)
        for module, buffers, contents in zip(modules, self.buffers, self.contents, strict=True):
            assert module._buffers.keys() == buffers.keys()
            for name, buffer in module._buffers.items():
                assert buffer is buffers[name], name
                assert same(buffer, contents[name]), name
        assert torch.equal(torch.get_rng_state(), self.torch)
        assert random.getstate() == self.python
        state = np.random.get_state()  # noqa: NPY002
        assert all(np.array_equal(a, b) for a, b in zip(state, self.numpy, strict=True))


def lived_in(case: str) -> nn.Module:
    """A model with gradients on some parameters and modes that differ between its parts."""
    model = CASES[case].model()
    for i, module in enumerate(model.modules()):
        module.training = i % 2 == 0
    for i, p in enumerate(model.parameters()):
        if p.requires_grad and i % 3:
            p.grad = torch.randn_like(p)
    return model


@pytest.mark.parametrize("case", ["conv", "transformer", "frozen"])
@pytest.mark.parametrize("approximation", ALL_APPROXIMATIONS)
def test_nothing_changes(case: str, approximation: str) -> None:
    model = lived_in(case)
    columns = CASES[case].columns(9)
    loader = DataLoader(TensorDataset(*columns), batch_size=4, shuffle=True)
    recipe = hf.Regularizer(hf.EWC(), ALL_APPROXIMATIONS[approximation])
    snapshot = Snapshot(model)
    recipe.consolidate(model, loader)
    snapshot.check()


@pytest.mark.parametrize("importance", ALL_IMPORTANCES)
@pytest.mark.parametrize("approximation", ["diagonal", "count_sketch"])
def test_nothing_changes_whatever_matters(importance: str, approximation: str) -> None:
    model = lived_in("conv")
    rows = 2 if importance == "scp-few" else 9
    snapshot = Snapshot(model)
    with too_small_to_sketch(ALL_APPROXIMATIONS[approximation], rows):
        hf.Regularizer(ALL_IMPORTANCES[importance], ALL_APPROXIMATIONS[approximation]).consolidate(
            model, batches(CASES["conv"].columns(9), 4)
        )
    snapshot.check()


def drawing(columns: Columns) -> Iterator[Columns]:
    """Data that draws from every global generator, as augmentation does."""
    for batch in batches(columns, 4):
        torch.randn(3)
        random.random()
        np.random.random()  # noqa: NPY002
        yield batch


def test_generators_are_restored() -> None:
    model = lived_in("mlp")
    snapshot = Snapshot(model)
    hf.Regularizer(hf.EWC(), hf.CountSketch(size=3)).consolidate(
        model, drawing(CASES["mlp"].columns(9))
    )
    snapshot.check()


class Broken(RuntimeError):
    """What the tests raise."""


def failing_data(columns: Columns) -> Iterator[Columns]:
    for i, batch in enumerate(drawing(columns)):
        if i == 2:
            raise Broken
        yield batch


def failing_forward(model: nn.Module, batch: Columns) -> Tensor:
    model.train()  # a forward pass may do anything
    if len(batch[0]) == 1 and batch[0].requires_grad is False and torch.rand(()) < 2:
        raise Broken
    return model(batch[0])


def failing_loss(outputs: Tensor, batch: Columns) -> Tensor:
    if outputs.requires_grad or torch.is_grad_enabled():
        raise Broken
    return outputs.sum(1)


@pytest.mark.parametrize("approximation", ["diagonal", "count_sketch", "low_rank-groups"])
@pytest.mark.parametrize("failure", ["data", "forward", "loss", "interrupt", "nan"])
def test_nothing_changes_when_it_fails(approximation: str, failure: str) -> None:
    model, columns = lived_in("conv"), CASES["conv"].columns(9)
    recipe = hf.Regularizer(hf.EWC(), ALL_APPROXIMATIONS[approximation])
    options: dict[str, Any] = {}
    data: Any = batches(columns, 4)
    error: type[BaseException] = Broken
    if failure == "data":
        data = failing_data(columns)
    elif failure == "forward":
        options["forward"] = failing_forward
        data = batches(columns, 1)
    elif failure == "loss":
        options["loss"] = failing_loss
    elif failure == "interrupt":
        error = KeyboardInterrupt

        def interrupted() -> Iterator[Columns]:
            yield from batches(columns, 4)[:2]
            raise KeyboardInterrupt

        data = interrupted()
    else:
        error = ValueError
        data[1][0][1] = torch.nan
    snapshot = Snapshot(model)
    with pytest.raises(error):
        recipe.consolidate(model, data, **options)
    snapshot.check()


class Restless(nn.Module):
    """Changes its buffers in evaluation mode: in place, by assignment, from nothing, in shape."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.net = Network()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("last", torch.zeros(3, dtype=torch.float64), persistent=False)
        self.register_buffer("empty", None)
        self.register_buffer("constant", torch.ones(1).expand(5))

    def forward(self, x: Tensor) -> Tensor:
        z = self.net(x)
        if self.kind == "in place":
            self.count.add_(1)
        elif self.kind == "assigned":
            self.last = z.detach().mean(0)
        elif self.kind == "accumulated":
            self.count = self.count + z.detach().mean()
        elif self.kind == "created":
            self.empty = z.detach().sum()
        elif self.kind == "registered":
            self.register_buffer("more", z.detach().sum())
        return z


@pytest.mark.parametrize("kind", ["in place", "assigned", "accumulated", "created", "registered"])
@pytest.mark.parametrize("approximation", ["diagonal", "count_sketch", "full-dense"])
def test_a_module_that_changes_its_buffers_in_evaluation(kind: str, approximation: str) -> None:
    model, columns = Restless(kind).double(), CASES["mlp"].columns(9)
    W = reference.rows(model.net, columns, hf.EWC())
    recipe = hf.Regularizer(hf.EWC(), ALL_APPROXIMATIONS[approximation])
    snapshot = Snapshot(model)
    with _warnings_of_fallback():
        penalty = recipe.consolidate(model, batches(columns, 4), seed=SEED)
    snapshot.check()
    close(
        penalty.matrix.dense(),
        approximate(recipe.approximation, W, model.net, divisor=9, seed=SEED),
    )
    copy.deepcopy(model)(columns[0])  # nothing of the pass is left behind


def test_hooks_on_parameters_neither_run_nor_change_the_rows() -> None:
    """An optimiser that steps inside backward would train on the old task; a mask would cut rows."""
    case = CASES["mlp"]
    model, columns = case.model(), case.columns(9)
    called = []

    def step(parameter: Tensor) -> None:
        called.append("post")
        with torch.no_grad():
            parameter.sub_(parameter.grad)

    def mask(grad: Tensor) -> Tensor:
        called.append("pre")
        return 0 * grad

    model.body.weight.register_post_accumulate_grad_hook(step)
    model.head.weight.register_hook(mask)
    model.head.bias.register_hook(mask)
    model.head.bias.register_post_accumulate_grad_hook(step)
    W = reference.rows(case.model(), columns, hf.EWC())
    for approximation in ALL_APPROXIMATIONS.values():
        snapshot = Snapshot(model)
        penalty = hf.Regularizer(hf.EWC(), approximation).consolidate(
            model, batches(columns, 4), seed=SEED
        )
        snapshot.check()
        source = {"columns": columns, "importance": hf.EWC()}
        expected = approximate(approximation, W, case.model(), divisor=9, seed=SEED, **source)
        close(penalty.matrix.dense(), expected)
    assert called == []
    before = model.body.weight.detach().clone()
    model(columns[0]).sum().backward()  # afterwards they are there again
    assert sorted(called) == ["post", "post", "pre", "pre"]
    assert not torch.equal(model.body.weight, before)
    assert float(model.head.weight.grad.abs().sum()) == 0


CONTEXTS: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("approximation", ALL_APPROXIMATIONS)
@pytest.mark.parametrize("anchor", ["latest", "each"])
def test_the_context_of_the_caller_does_not_matter(
    context: str, approximation: str, anchor: str
) -> None:
    """Two tasks, in float32, to the bit: also the merging is outside autocast."""
    case = CASES["mlp"]
    recipe = hf.Regularizer(
        hf.EWC(), ALL_APPROXIMATIONS[approximation], history=hf.Mean(), anchor=anchor
    )

    def two_tasks(inside: Callable[[], Any]) -> hf.Penalty:
        model, penalty = case.model().float(), None
        for k in range(2):
            nudge(model, seed=k)
            with inside():
                x, y = case.columns(9, seed=k)  # made in the context: inference tensors
                data = batches((x.float(), y), 4)
                snapshot = Snapshot(model)
                penalty = recipe.consolidate(model, data, previous=penalty, seed=SEED)
                snapshot.check()
        assert penalty is not None
        return penalty

    expected, found = two_tasks(contextlib.nullcontext), two_tasks(CONTEXTS[context])
    pairs = zip(
        (*expected.matrix.tensors.values(), expected.anchor, *expected.offset),
        (*found.matrix.tensors.values(), found.anchor, *found.offset),
        strict=True,
    )
    for a, b in pairs:
        assert a.dtype == b.dtype
        assert a.dtype in (torch.float32, torch.int64)  # numbers, and where they are
        assert not b.is_inference()
        assert torch.equal(a, b)
    model = nudge(case.model().float(), seed=5)
    found(model).backward()  # and it can be trained with
    found.add_grad_(model)


@pytest.mark.parametrize("name", ALL_APPROXIMATIONS)
def test_numbers_of_a_matrix_do_not_depend_on_autocast(name: str) -> None:
    """To the bit: products, what is written out, what is compared, and the diagnosis."""
    case = CASES["mlp"]
    model = case.model().float()
    x, y = case.columns(9)
    data = batches((x.float(), y), 4)
    penalty = hf.Regularizer(hf.EWC(), ALL_APPROXIMATIONS[name]).consolidate(
        model, data, seed=SEED
    )
    exact = hf.Regularizer(hf.EWC(), hf.Full(form="dense")).consolidate(model, data).matrix
    matrix, v = penalty.matrix, torch.randn(penalty.matrix.dim)

    def numbers() -> list[Tensor]:
        found = [matrix @ v, matrix.quadratic(v), matrix.diagonal(), matrix.trace()]
        found += [matrix.dense(), (0.3 * matrix).dense(), hf.spectrum(matrix)]
        found += [torch.tensor(hf.frobenius_error(matrix, exact)).double()]
        found += [torch.tensor(hf.stable_rank(matrix, d)) for d in ("trace", "frobenius")]
        if isinstance(matrix, hf.FactoredMatrix):
            found += penalty.trim(0.1).matrix.tensors.values()
        said = dataclasses.asdict(penalty.diagnose(model, data))
        return [*found, *(torch.tensor(n) for n in said.values() if isinstance(n, float))]

    plain = numbers()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = numbers()
    for a, b in zip(plain, cast, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


class Checkpointed(nn.Module):
    """Recomputes its middle in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(3, 3)
        self.reentrant, self.active = reentrant, True

    def _middle(self, h: Tensor) -> Tensor:
        return self.middle(h.tanh()).tanh()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.active:
            h = checkpoint(self._middle, h, use_reentrant=self.reentrant)
        else:
            h = self._middle(h)
        return self.last(h)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("approximation", ALL_APPROXIMATIONS)
@pytest.mark.parametrize("importance", ["ewc-true", "scp-mean"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch, without grad
def test_gradient_checkpointing(reentrant: bool, approximation: str, importance: str) -> None:
    model, columns = Checkpointed(reentrant).double(), CASES["mlp"].columns(9)
    recipe = hf.Regularizer(ALL_IMPORTANCES[importance], ALL_APPROXIMATIONS[approximation])
    plain = copy.deepcopy(model)
    plain.active = False
    expected = recipe.consolidate(plain, batches(columns, 4), seed=SEED)
    snapshot = Snapshot(model)
    with _warnings_of_fallback():
        penalty = recipe.consolidate(model, batches(columns, 4), seed=SEED)
    snapshot.check()
    close(penalty.matrix.dense(), expected.matrix.dense())


@contextlib.contextmanager
def _warnings_of_fallback() -> Iterator[None]:
    """Whether this can be vectorised is torch's affair; the result is not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", VectorisationWarning)
        yield


class Branching(nn.Module):
    """Looks at a value to decide what to do: cannot be vectorised."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Network()
        self.other = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = [self.net(row) if row.sum().item() > 0 else self.other(row) for row in x]
        return torch.stack(rows)


class Hoarder(nn.Module):
    """Uses its weight through a list of its own: a replaced parameter is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Network()
        self.weight = nn.Parameter(torch.randn(3, 4))
        self.list = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + x @ self.list[0].T


class Recurrent(nn.Module):
    """A fused recurrent layer, whose weights are kept in a flat list."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 2, batch_first=True)
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.unsqueeze(2))[0][:, -1])


def hoarder() -> Hoarder:
    model = Hoarder().double()
    model.list = [model.weight]
    return model


UNVECTORISED: dict[str, Callable[[], nn.Module]] = {
    "branching": lambda: Branching().double(),
    "hoarder": hoarder,
    "recurrent": lambda: Recurrent().double(),
}


@pytest.mark.parametrize("name", UNVECTORISED)
@pytest.mark.parametrize(
    "approximation",
    ["diagonal", "full-dense", "low_rank-single", "dense_sketch-gaussian", "nystrom"],
)
@pytest.mark.parametrize("importance", ["ewc-true", "ewc-sampled", "ewc-expected", "mas-logits"])
def test_what_cannot_be_vectorised_is_exact_and_said(
    name: str, approximation: str, importance: str
) -> None:
    model, columns = UNVECTORISED[name](), CASES["mlp"].columns(9)
    recipe = hf.Regularizer(ALL_IMPORTANCES[importance], ALL_APPROXIMATIONS[approximation])
    oracle = copy.deepcopy(model)
    if name == "hoarder":
        oracle.list = [oracle.weight]
    W = reference.rows(oracle, columns, recipe.importance, seed=SEED)
    snapshot = Snapshot(model)
    with pytest.warns(VectorisationWarning, match="one backward pass per example") as said:
        penalty = recipe.consolidate(model, batches(columns, 4), seed=SEED)
    assert len(said) == 1
    snapshot.check()
    close(
        penalty.matrix.dense(),
        approximate(recipe.approximation, W, model, divisor=9, seed=SEED),
    )


@pytest.mark.parametrize("name", UNVECTORISED)
def test_a_sketch_needs_no_vectorisation(name: str) -> None:
    model, columns = UNVECTORISED[name](), CASES["mlp"].columns(9)
    recipe = hf.Regularizer(hf.EWC(), hf.CountSketch(size=3))
    oracle = copy.deepcopy(model)
    if name == "hoarder":
        oracle.list = [oracle.weight]
    W = reference.rows(oracle, columns, hf.EWC())
    penalty = recipe.consolidate(model, batches(columns, 4), seed=SEED)
    expected = approximate(recipe.approximation, W, model, divisor=9, seed=SEED)
    close(penalty.matrix.dense(), expected)


def test_data_that_is_a_model_in_training() -> None:
    """Evaluation statistics, dropout off: BatchNorm sees single examples, not the batch."""
    case = CASES["conv"]
    model, columns = case.model(), case.columns(9)
    recipe = hf.Regularizer(hf.EWC(), hf.Full())
    one = recipe.consolidate(model.train(), batches(columns, 9))
    two = recipe.consolidate(model.eval(), batches(columns, 1))
    close(one.matrix.dense(), two.matrix.dense())
    assert not model.training


@pytest.mark.parametrize("name", ALL_APPROXIMATIONS)
def test_nothing_outlives_the_penalty(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even until the next garbage collection: what is left could be as large as the result."""
    recipe = hf.Regularizer(hf.EWC(), ALL_APPROXIMATIONS[name])
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    data = [(torch.randn(6, 4), torch.zeros(6, dtype=torch.int64))] * 3
    recipe.consolidate(model, data, seed=0)  # torch keeps what calls vmap for the first time
    born: list[weakref.ref[Any]] = []
    states = (low_rank._State, kronecker._State, diagonal._Signed)
    for kind in (Gradients, Regrouping, *states):
        honest = kind.__init__

        def watched(self: Any, *args: Any, honest: Any = honest, **kwargs: Any) -> None:
            born.append(weakref.ref(self))
            honest(self, *args, **kwargs)

        monkeypatch.setattr(kind, "__init__", watched)
    gc.collect()
    gc.disable()
    try:
        penalty = recipe.consolidate(model, data, seed=0)
        del penalty
        assert born
        assert not [reference() for reference in born if reference() is not None]
    finally:
        gc.enable()
