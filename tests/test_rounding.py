"""In half precision a matrix stays positive semi-definite: no direction is rewarded."""

import pytest
import torch
from torch import Tensor, nn

import holdfast as hf
from holdfast.matrices.kronecker_block import KroneckerBlock
from holdfast.matrices.rounding import rounded

HALF = [torch.bfloat16, torch.float16]


def few_directions(n: int, rows: int = 12, *, batch: tuple[int, ...] = ()) -> Tensor:
    """The second moments of inputs with a mean: most directions are free, entries are of all sizes."""
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(*batch, 500, rows, generator=generator) @ torch.randn(
        rows, n, generator=generator
    )
    x = (x / 3 + 1) * torch.logspace(-2, 0, n)
    x[..., ::7] = 0  # pixels at the border
    return x.mT @ x / 500


def least(matrix: Tensor) -> float:
    """The smallest eigenvalue, as a share of the largest."""
    values = torch.linalg.eigvalsh(matrix.double())
    return float((values[..., 0] / values[..., -1]).min())


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("shape", [(60,), (2, 3, 40), (1,)])
def test_nothing_becomes_negative_and_little_changes(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    *batch, n = shape
    matrix = few_directions(n, batch=tuple(batch)) if n > 1 else torch.full((1, 1), 0.3)
    stored = rounded(matrix, dtype)
    assert stored.dtype == dtype
    assert torch.equal(stored, stored.mT)
    assert least(stored) > -1e-7
    if n > 1:
        assert least(matrix.to(dtype)) < -1e-6  # rounding alone would do it
        assert not stored[..., ::7].any()  # what was free stays free
    error = float((stored.float() - matrix).norm() / matrix.norm())
    assert error < 4 * torch.finfo(dtype).eps
    assert torch.equal(rounded(stored.float(), dtype), stored)  # once, not every time


def test_the_diagonal_rises_by_the_same_share() -> None:
    matrix = few_directions(60)
    before, after = (m.diagonal().double() for m in (matrix, rounded(matrix, torch.bfloat16)))
    share = (after / before)[before > 0]
    assert 1 <= float(share.min())
    assert float(share.max()) < 1.03


def test_what_needs_nothing_gets_nothing() -> None:
    for dtype in HALF:
        well = torch.eye(5) + torch.full((5, 5), 0.01)
        assert torch.equal(rounded(well, dtype), well.to(dtype))
    matrix = few_directions(20)
    assert rounded(matrix, None) is matrix
    assert torch.equal(rounded(matrix.double(), torch.float32), matrix)
    broken = torch.full((2, 2), torch.nan)
    assert bool(rounded(broken, torch.bfloat16).isnan().all())


def matrices() -> dict[str, hf.PSDMatrix]:
    A, G = few_directions(30)[None, None], few_directions(8, 3)[None, None]
    return {
        "dense": hf.DenseMatrix(few_directions(40)),
        "blocks": hf.BlockDiagonalMatrix([few_directions(30, batch=(3,)), torch.eye(7)[None]]),
        "kronecker": hf.KroneckerMatrix.on([KroneckerBlock(0, None, A, G)], torch.ones(250)),
    }


@pytest.mark.parametrize("kind", matrices())
@pytest.mark.parametrize("dtype", HALF)
def test_matrices_that_are_stored_entry_by_entry(kind: str, dtype: torch.dtype) -> None:
    matrix = matrices()[kind]
    small = matrix.to(dtype=dtype)
    for found in (small, 0.3 * small):
        assert {t.dtype for t in found.tensors.values()} == {dtype}
        assert least(found.dense()) > -1e-7
    torch.testing.assert_close((0.3 * small).trace(), 0.3 * matrix.trace(), rtol=0.05, atol=0)


@pytest.mark.parametrize("approximation", [hf.Kronecker(), hf.BlockDiagonal(50), hf.Full()])
@pytest.mark.parametrize("dtype", HALF)
def test_an_optimiser_finds_no_reward(approximation: hf.Approximation, dtype: torch.dtype) -> None:
    """The penalty alone, minimised from far away, ends at zero and not below."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 12), nn.ReLU(), nn.Linear(12, 3))
    x = torch.randn(300, 8) @ torch.randn(8, 40) / 3 + 1
    data = [(x, torch.randint(0, 3, (300,)))]
    recipe = hf.Regularizer(hf.EWC(), approximation, strength=1e3)
    penalty = recipe.consolidate(model, data, seed=0).to(dtype=dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter)
    start = float(penalty(model).detach())
    for _ in range(300):
        optimizer.zero_grad()
        value = penalty(model)
        value.backward()
        optimizer.step()
        assert float(value.detach()) >= -1e-6 * start
