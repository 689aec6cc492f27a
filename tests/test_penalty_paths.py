"""Every road that a penalty takes to value and gradient gives the formula's numbers."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from holdfast import kernels
from holdfast import penalty as penalty_module
from holdfast.matrices import DiagonalMatrix, FactoredMatrix, PSDMatrix
from holdfast.parameters import ParameterSpace
from holdfast.penalty import Penalty, side_by_side

STRENGTH = 3.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.head = nn.Linear(12, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))


def flat_storage(model: nn.Module) -> None:
    """Parameters and gradients become views of one vector each, as flattening optimisers do."""
    parameters = list(model.parameters())
    values = torch.cat([p.detach().reshape(-1) for p in parameters])
    gradients = torch.zeros_like(values)
    start = 0
    for p in parameters:
        part = slice(start, start + p.numel())
        p.data, p.grad = values[part].view_as(p), gradients[part].view_as(p)
        start = part.stop


def channels_last(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)


def freeze(model: Net) -> None:
    model.head.bias.requires_grad_(False)
    model.head.bias.grad = torch.zeros_like(model.head.bias)


def grow(model: Net) -> None:
    old, model.head = model.head, nn.Linear(12, 6)
    with torch.no_grad():
        model.head.weight[:4], model.head.bias[:4] = old.weight, old.bias


CHANGES: dict[str, Callable[..., object]] = {
    "as it is": lambda model: None,
    "one storage": flat_storage,
    "channels last": channels_last,
    "frozen": freeze,
    "grown": grow,
    "half precision": lambda model: model.to(torch.bfloat16),
    "double precision": lambda model: model.double(),
}


def matrices(dim: int) -> dict[str, PSDMatrix]:
    draw = torch.Generator().manual_seed(1)
    rows = FactoredMatrix(torch.randn(5, dim, generator=draw))
    return {
        "factored": rows,
        "bfloat16": rows.to(dtype=torch.bfloat16),
        "int8": rows.to(dtype=torch.int8),
        "diagonal": DiagonalMatrix(torch.rand(dim, generator=draw)),
    }


@pytest.mark.parametrize("small", [True, False], ids=["flat", "per parameter"])
@pytest.mark.parametrize("offset", [False, True], ids=["one anchor", "several"])
@pytest.mark.parametrize("kind", ["factored", "bfloat16", "int8", "diagonal"])
@pytest.mark.parametrize("change", CHANGES)
def test_value_and_gradient(
    change: str, kind: str, offset: bool, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Net()
    space = ParameterSpace.of(model)
    matrix = matrices(space.dim)[kind]
    anchor = space.flatten([t.detach() for t in space.tensors(model)]) + 0.1
    e: tuple[Tensor, ...] = ()
    if offset:
        e = matrix.moved((), 0.3 * torch.randn(space.dim))
    penalty = Penalty(space, matrix, anchor, STRENGTH, e)
    monkeypatch.setattr(penalty_module, "_SMALL", 2**16 if small else 0)
    CHANGES[change](model)

    tensors = [t.detach().double() for t in space.tensors(model)]
    delta = space.flatten(tensors) - anchor.double()
    dense = matrix.to(dtype=torch.float64)
    value, product = dense.value_and_product(delta, tuple(part.double() for part in e))
    expected = space.split(STRENGTH * product)
    exact = next(model.parameters()).dtype != torch.bfloat16
    close = {"rtol": 1e-4, "atol": 1e-4} if exact else {"rtol": 2e-2, "atol": 2e-2}

    before = [None if p.grad is None else p.grad.clone() for p in space.parameters(model)]
    got = penalty.add_grad_(model)
    torch.testing.assert_close(got.double(), 0.5 * STRENGTH * value, **close)
    assert not got.requires_grad
    for p, shape, old, piece in zip(
        space.parameters(model), space.shapes, before, expected, strict=True
    ):
        if not p.requires_grad:
            assert torch.equal(p.grad, old)
            continue
        held = p.grad[: shape[0]] if shape else p.grad
        torch.testing.assert_close(held.double(), piece, **close)
        assert not shape or p.grad[shape[0] :].count_nonzero() == 0

    first = [None if p.grad is None else p.grad.clone() for p in space.parameters(model)]
    for p in model.parameters():
        p.grad = None
    loss = penalty(model)
    torch.testing.assert_close(loss.detach().double(), 0.5 * STRENGTH * value, **close)
    loss.backward()
    for p, old in zip(space.parameters(model), first, strict=True):
        if p.requires_grad:
            torch.testing.assert_close(p.grad, old, **close)


def test_gradients_are_added() -> None:
    model = Net()
    space = ParameterSpace.of(model)
    anchor = space.flatten([t.detach() for t in space.tensors(model)]) + 0.1
    penalty = Penalty(space, matrices(space.dim)["factored"], anchor, STRENGTH)
    penalty.add_grad_(model)
    once = [p.grad.clone() for p in model.parameters()]
    penalty.add_grad_(model)
    for p, g in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(p.grad, 2 * g)


def test_side_by_side() -> None:
    x = torch.arange(10.0)
    flat = side_by_side([x[:4].view(2, 2), x[4:9]], torch.float32)
    assert flat is not None
    assert flat.tolist() == x[:9].tolist()
    assert flat.data_ptr() == x.data_ptr()
    assert side_by_side([x[:4], x[5:]], torch.float32) is None, "a gap"
    assert side_by_side([x[4:], x[:4]], torch.float32) is None, "another order"
    assert side_by_side([x[:4].view(2, 2).T, x[4:]], torch.float32) is None, "another layout"
    assert side_by_side([x[:4], x[4:]], torch.float64) is None, "another precision"
    assert side_by_side([x[:4].clone(), x[4:].clone()], torch.float32) is None


@pytest.mark.parametrize("kind", ["factored", "int8"])
def test_autocast_does_not_reach_in(kind: str) -> None:
    model = Net()
    space = ParameterSpace.of(model)
    anchor = space.flatten([t.detach() for t in space.tensors(model)]) + 0.1
    penalty = Penalty(space, matrices(space.dim)[kind], anchor, STRENGTH)
    plain = penalty(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = penalty(model)
    assert torch.equal(plain, inside)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [1, 4, 7])
@pytest.mark.parametrize("dim", [1, 4095, 4097, 10_000])
def test_compiled_and_torch_products_agree(
    dim: int, rows: int, threads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = FactoredMatrix(torch.randn(rows, dim)).to(dtype=dtype)
    cuts = [dim // 3, dim - dim // 3]
    deltas = list(torch.randn(dim).split(cuts))
    assert kernels.library() is not None, "a C compiler belongs to the development set-up"
    monkeypatch.setattr(kernels, "_LEAST", 1)

    def run() -> tuple[Tensor, Tensor]:
        value, state = matrix.evaluate(deltas)
        into = list(torch.ones(dim).split(cuts))
        matrix.add_product_(into, state, 0.5)
        return value, torch.cat(into)

    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    compiled = run()
    monkeypatch.setattr(kernels, "library", lambda: None)
    plain = run()
    exact = matrix.to(dtype=torch.float64).value_and_product(torch.cat(deltas).double())
    size = float(exact[1].abs().max())
    for got in (compiled, plain):
        torch.testing.assert_close(got[0].double(), exact[0], rtol=1e-5, atol=1e-4)
        gradient = (got[1].double() - 1) / 0.5
        torch.testing.assert_close(gradient, exact[1], rtol=1e-5, atol=1e-5 * size + 1e-6)


def test_kernels_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.library.cache_clear()
    monkeypatch.setenv("HOLDFAST_KERNELS", "0")
    assert kernels.library() is None
    kernels.library.cache_clear()


def test_no_compiler_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernels.library.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert kernels.library() is None
    kernels.library.cache_clear()


def test_kernels_are_built_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = kernels._build()
    stamp = first.stat().st_mtime_ns
    assert kernels._build() == first
    assert first.stat().st_mtime_ns == stamp
    assert list(first.parent.iterdir()) == [first]


def test_loading_the_kernels_leaves_the_arithmetic_of_the_process_alone() -> None:
    """Subnormal numbers are still numbers: some compilers' fast mathematics would make them zero."""
    code = (
        "import sys; from holdfast import kernels; assert kernels.library() is not None; "
        "assert sys.float_info.min / 2 > 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
