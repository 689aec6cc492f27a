"""Networks whose layers do not do later what they did when they were looked at first."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import holdfast as hf
from holdfast import signed_sums

Batch = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def small_layers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signed_sums, "_LARGE", 1)


def consolidate(approximation: hf.Approximation, model: nn.Module, data: Any, **how: Any) -> Any:
    recipe = hf.Regularizer(hf.EWC(), approximation)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sketches larger than the data, rows one by one
        return recipe.consolidate(model, data, seed=0, progress=False, **how).matrix


def batches(count: int, size: int, *shape: int) -> list[Batch]:
    draw = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(size, *shape, generator=draw, dtype=torch.float64),
            torch.randint(3, (size,), generator=draw),
        )
        for _ in range(count)
    ]


def plain(outputs: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(outputs, batch[1], reduction="none")


def rows(model: nn.Module, data: Sequence[Any], loss: Callable[..., Tensor] = plain) -> Tensor:
    """One backward pass per example."""
    found = []
    for x, y in data:
        for i in range(len(y)):
            model.zero_grad()
            one = x[i : i + 1].detach().clone(), y[i : i + 1]
            loss(model(one[0]), one).sum().backward()
            held = [
                p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()
            ]
            found.append(torch.cat([g.reshape(-1) for g in held]))
    model.zero_grad()
    return torch.stack(found)


def check(model: nn.Module, data: Sequence[Any], loss: Callable[..., Tensor] = plain) -> None:
    """The exact diagonal, and the whole sum of a sketch with one row, up to signs."""
    W = rows(model, data, loss)
    diagonal = consolidate(hf.Diagonal(), model, data, loss=loss).diagonal()
    torch.testing.assert_close(diagonal, W.square().mean(0), rtol=1e-9, atol=1e-14)
    sketch = consolidate(hf.CountSketch(1), model, data, loss=loss).factor[0]
    recipe = hf.approximation.Setting(
        hf.parameters.ParameterSpace.of(model), hf.hashing.Draw(0), dtype=torch.float64
    )
    signs = hf.CountSketch(1).hashes(recipe)[0].signs(torch.arange(len(W)))
    expected = signs.to(W) @ W / len(W) ** 0.5
    torch.testing.assert_close(sketch, expected, rtol=1e-9, atol=1e-12)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


class Tied(nn.Module):
    """The decoder uses the encoder's weight, without its module."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x).tanh()
        return torch.cat([self.head(z), z @ self.encoder.weight + self.encoder.bias], 1)


def reconstruction(outputs: Tensor, batch: Batch) -> Tensor:
    x, y = batch
    supervised = F.cross_entropy(outputs[:, :3], y.clamp(min=0), reduction="none")
    return torch.where(y >= 0, supervised, (outputs[:, 3:] - x).square().sum(1))


def test_a_weight_that_is_used_elsewhere_later_on() -> None:
    model = Tied().double()
    labelled = batches(2, 8, 6)
    unlabelled = [(x, torch.full_like(y, -1)) for x, y in batches(3, 8, 6)]
    check(model, labelled + unlabelled, reconstruction)
    check(model, unlabelled + labelled, reconstruction)


def test_first_examples_without_a_gradient_prove_nothing() -> None:
    model = Tied().double()
    data = [(x, torch.full_like(y, -1)) for x, y in batches(5, 8, 6)]
    data[0][0][:, 0] = 0

    def masked(outputs: Tensor, batch: Batch) -> Tensor:
        return reconstruction(outputs, batch) * batch[0][:, 0].ne(0)

    check(model, data, masked)
    for x, _ in data:  # a single example per batch that counts
        x[1:, 0] = 0
    check(model, data, masked)


class SequenceFirst(nn.Module):
    """A layer that sees positions before examples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x.transpose(0, 1)).tanh().transpose(0, 1).sum(1))


def test_one_example_that_outshines_the_other_hides_nothing() -> None:
    model = SequenceFirst().double()
    data = batches(4, 2, 2, 6)
    data[0][0][0] *= 1e-5
    check(model, data, lambda z, b: plain(z, b) * b[0][:, 0, 0].abs().sqrt())


class Experts(nn.Module):
    """Each token goes to one expert, which is called once, on as many tokens as come."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.route, self.head = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.inner(x).tanh().reshape(-1, 8)
        share, which = self.route(tokens).softmax(-1).max(-1)
        out = tokens
        for j, expert in enumerate(self.experts):
            mine = torch.where(which == j)[0]
            if len(mine):
                out = out.index_add(0, mine, expert(tokens[mine]).tanh() * share[mine, None])
        return self.head(out.reshape(len(x), -1, 8).mean(1))


def test_an_expert_seen_with_another_number_of_tokens_is_not_read_again() -> None:
    torch.manual_seed(2)
    model = Experts().double()
    data = batches(6, 8, 4, 6)
    W = rows(model, data)
    found = consolidate(hf.Diagonal(), model, data).diagonal()
    wrong = (found - W.square().mean(0)).norm() / W.square().mean(0).norm()
    assert wrong < 0.05, "batches before that moment may be read wrongly, no others"


class Picking(nn.Module):
    """A layer sees the tokens under a mask: as many as there are examples, and not one of each."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.picked, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        mask, z = x[:, :, 0] > 0, self.inner(x).tanh()
        out = z.clone()
        out[mask] = self.picked(z[mask]).tanh()
        return self.head(out.mean(1))


def picked(order: Sequence[int], seed: int) -> list[Batch]:
    """Batches of sixteen examples of five tokens, some picked, on average one."""
    data = []
    for x, y in batches(3, 16, 5, 6):
        x[:, :, 0] = -x[:, :, 0].abs()
        for i in range(16):
            x[i, : order[(i + seed) % len(order)], 0] *= -1
        data.append((x, y))
    return data


@pytest.mark.parametrize("seed", range(6))
def test_as_many_tokens_as_examples_are_not_taken_for_them(seed: int) -> None:
    torch.manual_seed(seed)
    model, data = Picking().double(), picked((1, 1, 2, 0, 1, 1, 0, 2), seed)
    W = rows(model, data)
    own = slice(42, 84)
    exact = W[:, own].square().sum() / len(W)
    check(model, data)
    for approximation in (
        hf.Kronecker(correction="eigen"),
        hf.KroneckerPlusLowRank(rank=2, group=1),
    ):
        found = consolidate(approximation, model, data).diagonal()[own].sum()
        torch.testing.assert_close(found, exact)


def test_one_token_of_every_example_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever order they are in: nothing is written out, row by row."""
    torch.manual_seed(0)
    model, data = Sorted().double(), picked((1,), 0)
    check(model, data)

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a layer was not read")

    monkeypatch.setattr("holdfast.gradients.Gradients.rows", refused)
    consolidate(hf.Diagonal(), model, data)


class Sorted(Picking):
    """The same in an order of its own."""

    def forward(self, x: Tensor) -> Tensor:
        mask, z = x[:, :, 0] > 0, self.inner(x).tanh()
        one = z[mask]
        order = one[:, 0].argsort()
        out = torch.empty_like(one)
        out[order] = self.picked(one[order]).tanh()
        return self.head(out + z.mean(1))


def test_an_embedding_with_sparse_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4, sparse=True), Averaging(), nn.Linear(4, 3)).double()
    dense = nn.Sequential(nn.Embedding(7, 4), Averaging(), nn.Linear(4, 3)).double()
    dense.load_state_dict(model.state_dict())
    draw = torch.Generator().manual_seed(0)
    data = [
        (torch.randint(7, (8, 5), generator=draw), torch.randint(3, (8,), generator=draw))
        for _ in range(3)
    ]
    for approximation in (hf.Diagonal(), hf.Kronecker(rank=64), hf.KroneckerPlusLowRank(rank=2)):
        found, expected = (consolidate(approximation, m, data).dense() for m in (model, dense))
        torch.testing.assert_close(found, expected)


class Averaging(nn.Module):
    """Over positions."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Heads(nn.Module):
    """One of several heads is in use."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[0](self.trunk(x).tanh())


def test_heads_that_are_not_called_cost_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Heads().double()
    check(model, batches(5, 8, 6))

    def refuse(*_: Any) -> None:
        raise AssertionError("rows were written out for parameters without a gradient")

    monkeypatch.setattr(hf.gradients.Gradients, "rows", refuse)
    consolidate(hf.Diagonal(), model, batches(5, 8, 6))


class Projected(nn.Module):
    """A layer that is called on one vector, not on one per example."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(6))
        self.project, self.inner, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x) * self.project(self.token))


class Checkpointed(nn.Module):
    """A checkpoint that begins with a layer without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.inner, x, use_reentrant=False))


class Normalising(nn.Module):
    """Writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.sub_(0.5).mul_(2))


class Energy(nn.Module):
    """Differentiates inside its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        force = torch.autograd.grad(self.inner(x).tanh().sum(), x, create_graph=True)[0]
        return self.head(force)


@pytest.mark.parametrize("build", [Projected, Checkpointed, Normalising, Energy])
def test_unusual_networks(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, data = build().double(), batches(3, 8, 6)
    before = [x.clone() for x, _ in data]
    check(model, data)
    assert all(
        torch.equal(x, b) and not x.requires_grad for (x, _), b in zip(data, before, strict=True)
    )


def test_inputs_that_require_a_gradient() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    data = [(x.requires_grad_(), y) for x, y in batches(3, 8, 6)]
    check(model, data)
    assert all(x.requires_grad and x.grad is None for x, _ in data)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo looks at it
def test_a_part_that_is_compiled() -> None:
    torch.manual_seed(0)
    part = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), backend="eager")
    model = nn.Sequential(nn.Linear(6, 8), part, nn.Linear(8, 3)).double()
    data = batches(3, 4, 6)
    check(model, data)
    W = rows(model, data)
    found = consolidate(hf.LowRank(rank=30), model, data).dense()
    torch.testing.assert_close(found, W.T @ W / len(W), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("how", ["wrapped", "in place", "the whole in place"])
def test_what_is_compiled_by_consolidating_gives_what_is_not_compiled(how: str) -> None:
    """The first pass that a compiled part sees is like all later ones, and it comes back compiled."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    data = batches(3, 4, 6)
    expected = consolidate(hf.Kronecker(), model, data).dense()
    if how == "wrapped":
        model[0] = torch.compile(model[0], backend="eager")
    else:
        (model[0] if how == "in place" else model).compile(backend="eager")

    def parts() -> list[object]:
        return [(m, m._compiled_call_impl, m.__dict__.get("forward")) for m in model.modules()]

    before = parts()
    for _ in range(2):
        assert torch.equal(consolidate(hf.Kronecker(), model, data).dense(), expected)
        assert parts() == before


class Bag(nn.Module):
    """Texts of unlike lengths, their words one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        text = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        sums = torch.zeros(len(lengths), 4, dtype=torch.float64)
        return self.head(sums.index_add(0, text, self.words(tokens)))


@pytest.mark.parametrize("last", [4, 8])
def test_low_rank_of_batches_of_which_some_cannot_be_cut(last: int) -> None:
    torch.manual_seed(0)
    model = Bag().double()

    def batch(lengths: list[int]) -> dict[str, Tensor]:
        labels = torch.randint(0, 3, (len(lengths),))
        tokens = torch.randint(0, 20, (sum(lengths),))
        return {"tokens": tokens, "lengths": torch.tensor(lengths), "labels": labels}

    data = [batch(lengths) for lengths in ([1] * 7, [2] * 6, [1] * last)]
    recipe = hf.LowRank(rank=2, group=8)
    found = consolidate(recipe, model, data)
    # the same rows, none of which can be cut
    whole = [{**b, "kind": "whole"} for b in data]
    forward = lambda m, b: m(b["tokens"], b["lengths"])  # noqa: E731
    other = consolidate(recipe, model, whole, forward=forward)
    torch.testing.assert_close(found.dense(), other.dense(), rtol=1e-8, atol=1e-12)


def test_a_small_first_batch_does_not_make_passes_small() -> None:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            return super().forward(x)

    model = nn.Sequential(Counting(6, 3)).double()
    data = batches(1, 1, 6) + batches(10, 64, 6)
    consolidate(hf.CountSketch(5), model, data)
    assert Counting.calls < 40


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_trimming_keeps_the_storage(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    data = [(x.float(), y) for x, y in batches(3, 8, 6)]
    recipe = hf.Regularizer(hf.EWC(), hf.CountSketch(5))
    penalty = recipe.consolidate(model, data, seed=0, progress=False).to(dtype=dtype)
    trimmed = penalty.trim(0.01)
    assert trimmed.matrix.tensors["rows"].dtype == dtype
    assert trimmed.nbytes <= penalty.nbytes
