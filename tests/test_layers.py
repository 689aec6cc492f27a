"""Squares read from layers are those of the rows, for every layer, and where layers cannot be read."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import holdfast as hf
from holdfast import signed_sums
from holdfast.approximation import kronecker_readers
from holdfast.batches import Examples
from holdfast.gradients import Gradients
from holdfast.layers import RULES
from holdfast.parameters import ParameterSpace
from holdfast.rows import Rows

BATCH = 5


class Head(nn.Module):
    """Any features, flattened and squeezed, then a linear layer."""

    def __init__(self, body: nn.Module, features: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(features, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1).tanh())


def conv(*args: Any, features: int, **kwargs: Any) -> Callable[[], nn.Module]:
    return lambda: Head(nn.Conv2d(*args, **kwargs), features)


def warm(norm: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    for _ in range(2):
        norm.double()(2 + 3 * torch.randn(8, *shape).double())
    return norm


class Attention(nn.Module):
    """One head of attention, whose keys may have a bias: softmax does not see it."""

    def __init__(self, width: int, bias: bool = True) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=bias)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).mT
        return self.head((scores.softmax(-1) @ self.value(x)).tanh().mean(1))


def normalised(norm: nn.Module) -> nn.Module:
    """A convolution whose bias the normalisation takes off again."""
    return Head(nn.Sequential(nn.Conv2d(4, 2, 3), norm), 24)


IMAGE, SERIES, VECTOR, SENTENCE = (4, 6, 5), (4, 7), (4,), ()
READ: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 3), VECTOR),
    "no bias": (lambda: nn.Linear(4, 3, bias=False), VECTOR),
    "two layers": (
        lambda: nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(True), nn.Linear(6, 3)),
        VECTOR,
    ),
    "sequence": (lambda: Head(nn.Linear(7, 2), 8), SERIES),
    "deep sequence": (lambda: Head(nn.Linear(5, 2), 48), IMAGE),
    "conv": (conv(4, 2, 3, features=24), IMAGE),
    "strided": (conv(4, 2, 3, stride=2, padding=1, features=18), IMAGE),
    "uneven": (conv(4, 2, (3, 2), stride=(2, 1), padding=(0, 2), features=32), IMAGE),
    "dilated": (conv(4, 2, 2, dilation=2, features=24), IMAGE),
    "grouped": (conv(4, 6, 3, groups=2, features=72), IMAGE),
    "depthwise": (conv(4, 4, 3, groups=4, bias=False, features=48), IMAGE),
    "pointwise": (conv(4, 2, 1, features=60), IMAGE),
    "same": (conv(4, 2, (3, 5), padding="same", features=60), IMAGE),
    "circular": (conv(4, 2, 3, padding=1, padding_mode="circular", features=60), IMAGE),
    "conv 1d": (lambda: Head(nn.Conv1d(4, 2, 3, padding=1, stride=2), 8), SERIES),
    "layer norm": (lambda: Head(nn.LayerNorm(4), 4), VECTOR),
    "layer norm of a sequence": (lambda: Head(nn.LayerNorm(7), 28), SERIES),
    "layer norm of images": (lambda: Head(nn.LayerNorm((6, 5)), 120), IMAGE),
    "rms norm": (lambda: Head(nn.RMSNorm(7), 28), SERIES),
    "group norm": (lambda: Head(nn.GroupNorm(2, 4), 120), IMAGE),
    "batch norm": (lambda: Head(warm(nn.BatchNorm1d(4), (4,)), 4), VECTOR),
    "batch norm of images": (lambda: Head(warm(nn.BatchNorm2d(4), IMAGE), 120), IMAGE),
    "embedding": (lambda: Head(nn.Embedding(6, 3), 12), SENTENCE),
    "padded embedding": (lambda: Head(nn.Embedding(6, 3, padding_idx=2), 12), SENTENCE),
    "key bias": (lambda: Attention(7), SERIES),
    "bias before group norm": (lambda: normalised(nn.GroupNorm(2, 2)), IMAGE),
    "bias before instance norm": (lambda: normalised(nn.InstanceNorm2d(2)), IMAGE),
}


class Twice(nn.Module):
    """One layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.body(x).tanh()).tanh())


class Tied(nn.Module):
    """Two layers that share a weight, each with its own bias."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(x).tanh()).tanh())


class Functional(nn.Module):
    """A layer that is called, and whose weight is also used without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh() @ self.body.weight.T)


class NeverCalled(nn.Module):
    """A layer that only lends its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.linear(x, self.body.weight, self.body.bias).tanh())


class TimeFirst(nn.Module):
    """The layer's first dimension is time, and there are as many steps as probed examples."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:  # (B, 4) -> (4, B, 4) -> (4, B, 2)
        steps = torch.stack([x.roll(k, 1) for k in range(4)])
        return self.head(self.body(steps).tanh().transpose(0, 1).flatten(1))


class Mixed(nn.Module):
    """The batch is folded into one long sequence: no leading dimension of examples."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.reshape(-1, 2)).tanh().reshape(len(x), -1))


class Loose(nn.Module):
    """Parameters of the network itself, beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.head = nn.Parameter(torch.randn(4)), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.head((x + self.shift).tanh())


class Checkpointed(nn.Module):
    """The forward pass of a layer is repeated in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        return self.head(checkpoint(self.body, z, use_reentrant=self.reentrant).tanh())


class Unused(nn.Module):
    """A layer that is called but does not reach the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.idle, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.idle(x)
        return self.head(x)


class ScaledLinear(nn.Linear):
    """A subclass that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def weight_norm() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))


TRICKY: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "called twice": (Twice, VECTOR),
    "tied": (Tied, VECTOR),
    "functional": (Functional, VECTOR),
    "never called": (NeverCalled, VECTOR),
    "time first": (TimeFirst, VECTOR),
    "folded": (Mixed, VECTOR),
    "loose parameters": (Loose, VECTOR),
    "unused": (Unused, VECTOR),
    "subclass": (lambda: ScaledLinear(4, 3), VECTOR),
    "reparametrised": (weight_norm, VECTOR),
    "recurrent": (lambda: Recurrent(), SERIES),
}


class Recurrent(nn.Module):
    """A recurrent layer, which is not of a known kind."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.GRU(7, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0][:, -1])


def examples(shape: tuple[int, ...], count: int = BATCH) -> tuple[Tensor, Tensor]:
    labels = torch.randint(3, (count,))
    if shape == SENTENCE:
        return torch.randint(6, (count, 4)), labels
    return torch.randn(count, *shape, dtype=torch.float64), labels


def rows_one_by_one(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The oracle: one backward pass per example, by hand."""
    model.eval()
    held = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for a, b in zip(x, y, strict=True):
        loss = nn.functional.cross_entropy(model(a.unsqueeze(0)), b.unsqueeze(0))
        found = torch.autograd.grad(loss, held, allow_unused=True)
        pieces = [
            torch.zeros(p.numel()).double() if g is None else g.reshape(-1)
            for p, g in zip(held, found, strict=True)
        ]
        rows.append(torch.cat(pieces))
    return torch.stack(rows)


def diagonal(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> Tensor:
    regularizer = hf.Regularizer(hf.EWC(), hf.Diagonal())
    return regularizer.consolidate(model, data, progress=False, seed=0).matrix.diagonal()


def sites(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[int, int]:
    """How many layers are read, of how many that look readable."""
    space = ParameterSpace.of(model)
    rows = Rows(model.eval(), [batch], space, hf.EWC(), hf.hashing.Draw(0))
    reader = rows.gradients.squares
    candidates = len(reader._sites)
    for part in rows:
        part.add_squared_sum_(torch.zeros(space.dim, dtype=torch.float64))
    return sum(site.certain for site in reader._sites), candidates


@pytest.mark.filterwarnings("ignore::holdfast.gradients.VectorisationWarning")
@pytest.mark.parametrize("name", [*READ, *TRICKY])
def test_squares_are_those_of_single_rows(name: str) -> None:
    build, shape = {**READ, **TRICKY}[name]
    model = build().double()
    x, y = examples(shape)
    expected = rows_one_by_one(model, x, y).square().mean(0)
    found = diagonal(model, [(x, y)])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-13)
    parts = diagonal(model, [(x[:2], y[:2]), (x[2:], y[2:])])
    torch.testing.assert_close(parts, expected, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("name", READ)
def test_layers_are_read(name: str) -> None:
    build, shape = READ[name]
    certain, candidates = sites(build().double(), examples(shape))
    assert certain == candidates > 0


@pytest.mark.filterwarnings("ignore::holdfast.gradients.VectorisationWarning")
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("called twice", 1),
        ("tied", 1),
        ("functional", 1),
        ("never called", 1),
        ("time first", 1),
        ("folded", 1),
        ("loose parameters", 1),
        ("unused", 1),  # a layer without a gradient proves nothing
        ("subclass", 0),
        ("reparametrised", 0),
        ("recurrent", 1),
    ],
)
def test_only_what_is_certain_is_read(name: str, read: int) -> None:
    build, shape = TRICKY[name]
    certain, _ = sites(build().double(), examples(shape))
    assert certain == read


def test_every_rule_is_tested() -> None:
    used = {type(m) for build, _ in READ.values() for m in build().modules()}
    assert set(RULES) - used == {nn.BatchNorm3d}, "BatchNorm3d shares its rule with the others"


@pytest.mark.filterwarnings("ignore::holdfast.gradients.VectorisationWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_repeated_forward_pass(reentrant: bool) -> None:
    model = Checkpointed(reentrant).double()
    x, y = examples(VECTOR)
    expected = rows_of_plain(model, x, y).square().mean(0)
    torch.testing.assert_close(diagonal(model, [(x, y)]), expected)
    assert sites(model, (x, y)) == (3, 3)


def rows_of_plain(model: Checkpointed, x: Tensor, y: Tensor) -> Tensor:
    plain = nn.Sequential(model.first, model.body, nn.Tanh(), model.head)
    return rows_one_by_one(plain, x, y)


@pytest.mark.parametrize("frozen", ["body.weight", "body.bias", "head.weight", "body.*"])
def test_frozen_parameters(frozen: str) -> None:
    model = READ["strided"][0]().double()
    x, y = examples(IMAGE)
    for name, p in model.named_parameters():
        if name == frozen or (frozen == "body.*" and name.startswith("body")):
            p.requires_grad_(False)
    before = [p.requires_grad for p in model.parameters()]
    expected = rows_one_by_one(model, x, y).square().mean(0)
    torch.testing.assert_close(diagonal(model, [(x, y)]), expected)
    assert [p.requires_grad for p in model.parameters()] == before


def test_excluded_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = examples(VECTOR)
    regularizer = hf.Regularizer(hf.EWC(), hf.Diagonal(), exclude=("0.weight",))
    found = regularizer.consolidate(model, [(x, y)], progress=False, seed=0).matrix.diagonal()
    expected = rows_one_by_one(model, x, y).square().mean(0)[16:]
    torch.testing.assert_close(found, expected)


def test_several_rows_per_example() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = examples(VECTOR)
    expected = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for a in x:
        p = model(a.unsqueeze(0)).softmax(1).detach()
        for c in range(3):
            row = rows_one_by_one(model, a.unsqueeze(0), torch.tensor([c]))[0]
            expected += p[0, c] * row.square()
    regularizer = hf.Regularizer(hf.EWC(labels="expected"), hf.Diagonal())
    found = regularizer.consolidate(model, [(x, y)], progress=False, seed=0).matrix.diagonal()
    torch.testing.assert_close(found, expected / BATCH)


@pytest.mark.filterwarnings("ignore::holdfast.gradients.VectorisationWarning")
def test_a_layer_that_leaves_its_shape_is_written_out() -> None:
    """Certain on the first batch, then called with other things: the rows of that batch are exact."""

    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            z = self.body(x).tanh()
            return self.head(self.body(z) if x.mean() > 5 else z)

    model = Moody().double()
    x, y = examples(VECTOR, 8)
    x[5:] += 10
    expected = rows_one_by_one(model, x, y).square().mean(0)
    found = diagonal(model, [(x[:5], y[:5]), (x[5:], y[5:])])
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected)


def test_one_pass_and_no_hooks_left() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    calls = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    x, y = examples(VECTOR, 20)
    diagonal(model, [(x[:10], y[:10]), (x[10:], y[10:])])
    first = len(calls)
    calls.clear()
    diagonal(model, [(x[i : i + 2], y[i : i + 2]) for i in range(0, 20, 2)])
    assert len(calls) - first == 8, "one pass per further batch"
    handle.remove()
    assert not any(m._forward_hooks for m in model.modules())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_a_loss_that_is_not_finite_is_named() -> None:
    model = nn.Linear(4, 3).double()
    x, y = examples(VECTOR)
    x[3] = torch.inf
    with pytest.raises(ValueError, match="example 3"):
        diagonal(model, [(x, y)])


def test_half_precision_layers_accumulate_in_float32() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).to(torch.bfloat16)
    x, y = examples(VECTOR)
    found = diagonal(model, [(x.to(torch.bfloat16), y)])
    assert found.dtype == torch.float32
    expected = rows_one_by_one(model, x.to(torch.bfloat16), y).float().square().mean(0)
    torch.testing.assert_close(found, expected, rtol=0.1, atol=1e-3)


def test_general_rows_of_chosen_parameters() -> None:
    model = Loose().double().eval()
    space = ParameterSpace.of(model)
    gradients = Gradients(model, space, hf.EWC(), lambda m, b: m(b[0]), None)
    x, y = examples(VECTOR)
    which, uniforms = torch.zeros(BATCH, dtype=torch.int64), torch.zeros(BATCH)
    index = torch.arange(BATCH)
    source = Examples((x, y), [x, y, which, uniforms], index)
    whole = torch.cat(list(gradients.rows(source)))
    some = torch.cat(list(gradients.rows(source, [0, 2])))
    pieces = whole.split(space.sizes, 1)
    assert torch.equal(some, torch.cat([pieces[0], pieces[2]], 1))
    assert not some.requires_grad


def sketch(model: nn.Module, x: Tensor, y: Tensor, size: int) -> Tensor:
    regularizer = hf.Regularizer(hf.EWC(), hf.CountSketch(size, merge="rows"))
    data = list(zip(x.split(size), y.split(size), strict=True))
    found = regularizer.consolidate(model, data, progress=False, seed=0).matrix
    assert isinstance(found, hf.FactoredMatrix)
    return found.factor


@pytest.mark.filterwarnings("ignore::holdfast.gradients.VectorisationWarning")
@pytest.mark.parametrize("name", [*READ, *TRICKY])
def test_signed_sums_written_in_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, shape = {**READ, **TRICKY}[name]
    model = build().double()
    x, y = examples(shape, 9)
    plain = sketch(model, x, y, 4)
    monkeypatch.setattr(signed_sums, "_LARGE", 1)
    direct = sketch(model, x, y, 4)
    torch.testing.assert_close(direct, plain, rtol=1e-10, atol=1e-14)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_only_linear_layers_that_prove_themselves_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signed_sums, "_LARGE", 1)
    left = {}
    for name in ("two layers", "functional", "never called", "called twice", "tied"):
        model = {**READ, **TRICKY}[name][0]().double().eval()
        space = ParameterSpace.of(model)
        rows = Rows(model, [examples(VECTOR)], space, hf.EWC(), hf.hashing.Draw(0))
        for part in rows:
            out = torch.zeros(space.dim, dtype=torch.float64)
            part.add_signed_sum_(out, torch.ones(BATCH, dtype=torch.int64))
        left[name] = len(rows.gradients.sums._sites)
    # a layer that cannot be read leaves the others alone
    assert left == {
        "two layers": 2, "functional": 1, "never called": 1, "called twice": 1, "tied": 1
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_layers_of_a_network_in_half_precision_are_read(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own gradients are rounded, which is no reason to write every row out."""

    def written(self: object, layer: int, rows: Tensor) -> None:
        raise AssertionError("written out")

    monkeypatch.setattr(kronecker_readers.Factors, "rows", written)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 20), nn.ReLU())
    model, shape = Head(model, 20), (20,)
    if kind == "conv":
        model, shape = Head(nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU()), 72), (4, 6, 5)
    model = model.to(dtype)
    x, y = torch.randn(200, *shape).to(dtype), torch.randint(0, 3, (200,))
    recipe = hf.Regularizer(hf.EWC(), hf.Kronecker())
    small = recipe.consolidate(model, [(x, y)], seed=0).matrix
    whole = recipe.consolidate(model.float(), [(x.float(), y)], seed=0).matrix
    assert hf.frobenius_error(small, whole) < 1e-3
