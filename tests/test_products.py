"""Both libraries give the same product; the faster one is asked only where it applies."""

import dataclasses

import pytest
import torch
from torch import Tensor

from holdfast import products
from holdfast.matrices.kronecker_block import KroneckerBlock

SIZES = [(3, 5, 2), (100, 784, 1024), (100, 1024, 512), (784, 100, 784), (257, 129, 65)]


def _matrices(m: int, k: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m + k + n)
    return tuple(torch.randn(*s, generator=generator, dtype=dtype) for s in ((m, k), (k, n)))


@pytest.fixture(params=[False, True], ids=["torch", "oneDNN"])
def wide(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(products, "wide", lambda: request.param)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", SIZES)
def test_products_are_exact_to_rounding(
    sizes: tuple[int, int, int], dtype: torch.dtype, wide: bool
) -> None:
    a, b = _matrices(*sizes, dtype)
    exact = a.double() @ b.double()
    limit = 20 * torch.finfo(dtype).eps * exact.norm()  # float32 by any road: 1 to 3 × eps
    out = torch.full_like(exact, torch.nan).to(dtype)
    products.multiply_(out, a, b)
    transposed = products.linear(a.t().contiguous().t(), b.t())
    added = torch.ones_like(out)
    products.add_product_(added, a, b)
    for found in (added - 1, out, products.linear(a, b.t().contiguous()), transposed):
        assert found.dtype is dtype
        assert (found.double() - exact).norm() < limit


def test_a_graph_is_kept_where_one_is_asked_for(wide: bool) -> None:
    a, b = _matrices(100, 784, 1024, torch.float32)
    a.requires_grad_()
    products.linear(a, b.t()).sum().backward()
    assert a.grad is not None
    torch.testing.assert_close(a.grad, b.sum(1).expand_as(a), rtol=1e-4, atol=1e-3)


def test_the_other_library_is_really_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    a, b = _matrices(100, 784, 1024, torch.float32)
    for wide in (False, True):
        monkeypatch.setattr(products, "wide", lambda wide=wide: wide)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            products.linear(a, b.t())
        assert any("mkldnn" in event.key for event in profile.key_averages()) is wide


def _block(terms: int, groups: int, outputs: int, columns: int, corrected: bool) -> KroneckerBlock:
    generator = torch.Generator().manual_seed(terms + groups + outputs + columns)

    def half(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    values = half(terms, groups, outputs, columns).abs() if corrected else None
    A, G = half(terms, groups, columns, columns), half(terms, groups, outputs, outputs)
    return KroneckerBlock(0, None, A, G, values)


@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize(("terms", "groups"), [(1, 1), (3, 1), (1, 2), (2, 2)])
def test_blocks_stored_in_bfloat16(
    terms: int, groups: int, corrected: bool, narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers that are rounded once per product; in float32 to its own rounding."""
    monkeypatch.setattr(products, "narrow", lambda: narrow)
    block = _block(terms, groups, 144, 160, corrected)
    exact = dataclasses.replace(block, **{n: p.double() for n, p in block.parts.items()})
    v = torch.randn(block.size, generator=torch.Generator().manual_seed(0))
    found, expected = torch.empty_like(v), torch.empty_like(v, dtype=torch.float64)
    block.write_product(found, v)
    exact.write_product(expected, v.double())
    error = float((found - expected).norm() / expected.norm())
    assert (2**-12 < error < 2**-6) if narrow else error < 1e-6


def test_what_is_multiplied_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is stored so, for float32 vectors, where it gains."""
    monkeypatch.setattr(products, "narrow", lambda: True)
    x, stored, many = torch.ones(1), torch.ones(1, dtype=torch.bfloat16), 10**7
    assert products.precision(stored, x, many) is torch.bfloat16
    assert products.precision(stored, x, 1000) is torch.float32
    assert products.precision(x, x, many) is torch.float32
    assert products.precision(stored, x.double(), many) is torch.float64
    monkeypatch.setattr(products, "narrow", lambda: False)
    assert products.precision(stored, x, many) is torch.float32
