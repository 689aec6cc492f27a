"""In half precision a matrix stays positive semi-definite: no direction is rewarded."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import holdfast as hf
from holdfast.matrices.centre import centre
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


def three_tasks(
    approximation: hf.Approximation, size: float = 1.0
) -> tuple[hf.Penalty, nn.Module]:
    """Three anchors, far from each other, and the network at the last."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    recipe, penalty = hf.Regularizer(hf.EWC(), approximation, anchor="each"), None
    for task in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.3 * torch.randn_like(parameter)
        x = torch.randn(40, 6, dtype=torch.float64) * (1 + task) * size
        data = [(x, torch.randint(0, 3, (40,)))]
        penalty = recipe.consolidate(model, data, previous=penalty, seed=task, progress=False)
    assert penalty is not None
    return penalty, model


@pytest.mark.parametrize(
    "approximation",
    [
        hf.Kronecker(rank=2),
        hf.Kronecker(correction="eigen"),
        hf.Kronecker(correction="eigen", merge="stack"),
        hf.KroneckerPlusLowRank(rank=3, correction="eigen"),
        hf.Kronecker(),
        hf.Full(),
        hf.Diagonal(),
        hf.Composite({"0.*": hf.Kronecker(rank=1), "*": hf.DiagonalPlusLowRank(rank=2)}),
    ],
    ids=repr,
)
@pytest.mark.parametrize("dtype", HALF)
def test_several_anchors_keep_their_centre(
    approximation: hf.Approximation, dtype: torch.dtype
) -> None:
    """No minimum far away, and none below zero, for an optimiser to find in a thousand steps."""
    exact, _ = three_tasks(approximation)
    lowest, furthest = [], []
    for penalty in (exact, exact.to(dtype=dtype)):
        dense = penalty.matrix.dense().double()
        zero = torch.zeros(penalty.matrix.dim, dtype=torch.float64)
        start, b = penalty.matrix.value_and_product(zero, penalty.offset)
        values, vectors = torch.linalg.eigh(dense)
        held = values > 1e-9 * values[-1]
        along = (vectors.T @ b.double())[held]
        lowest.append(float(start - (along.square() / values[held]).sum()) / float(start))
        furthest.append(float((along / values[held]).norm()))
    assert lowest[1] > -1e-6
    assert lowest[1] == pytest.approx(lowest[0], abs=0.03)
    assert furthest[1] < 1.5 * furthest[0]


@pytest.mark.parametrize("scale", [1e-10, 1e10])
@pytest.mark.parametrize(
    "approximation", [hf.Diagonal(), hf.Kronecker(), hf.Kronecker(rank=2), hf.LowRank(3)], ids=repr
)
def test_numbers_that_float16_does_not_reach_are_refused(
    approximation: hf.Approximation, scale: float
) -> None:
    """A network that has nothing left to learn has such importances: all would be zero."""
    found, model = three_tasks(approximation)
    matrix = scale * found.matrix
    if isinstance(matrix, hf.FactoredMatrix):
        matrix = scale * matrix  # of whose entries these are the roots
    penalty = dataclasses.replace(found, matrix=matrix, offset=())
    with pytest.raises(ValueError, match=r"float16 does not reach .* torch\.bfloat16"):
        penalty.to(dtype=torch.float16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    exact, stored = (float(p(model).detach()) for p in (penalty, penalty.to(dtype=torch.bfloat16)))
    assert stored == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int16, torch.complex64])
def test_other_precisions_are_refused(dtype: torch.dtype) -> None:
    penalty, _ = three_tasks(hf.Diagonal())
    with pytest.raises(ValueError, match=r"a matrix is stored as one of torch\.float64"):
        penalty.to(dtype=dtype)


def test_int8_has_a_scale_per_row() -> None:
    """What float16 must reach, int8 need not: small entries beside large ones are lost, and that is all."""
    rows = torch.full((16, 100), 0.0035)
    rows[range(16), range(16)] = 1.0
    space = hf.ParameterSpace.of(nn.Linear(99, 1))
    stored = hf.Penalty(space, hf.FactoredMatrix(rows), torch.zeros(100), 1.0).to(dtype=torch.int8)
    assert float(stored.matrix.trace()) == pytest.approx(16.0, rel=0.01)


@pytest.mark.parametrize("approximation", [hf.Kronecker(), hf.Kronecker(rank=2)], ids=repr)
def test_a_second_time_changes_nothing(approximation: hf.Approximation) -> None:
    once = three_tasks(approximation)[0].to(dtype=torch.bfloat16)
    twice = once.to(dtype=torch.bfloat16)
    for a, b in zip(once.offset, twice.offset, strict=True):
        assert torch.equal(a, b)


def test_a_sum_is_raised_where_it_can_be() -> None:
    """The constant of a factored matrix is that of its rows; of a diagonal it is a number."""
    factored, diagonal = hf.FactoredMatrix(torch.randn(2, 4)), hf.DiagonalMatrix(torch.ones(4))
    for parts in ([factored, diagonal], [diagonal, factored]):
        matrix = hf.SumMatrix(parts)
        offset = matrix.moved((), torch.randn(4))
        point = torch.randn(4)
        before, after = (
            matrix.value_and_product(point, o)[0] for o in (offset, matrix.raised(offset, 2.0))
        )
        assert float(after - before) == pytest.approx(2.0, abs=1e-5)


def test_a_centre_is_not_far_along_what_is_hardly_held() -> None:
    """b has a little of such a direction, which only rounding put there."""
    values = torch.tensor([1.0, 0.5, 1e-9], dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q
    matrix = turn @ values.diag() @ turn.T
    b = matrix @ turn[:, 0] + 1e-6 * turn[:, 2]
    found = [centre(lambda v: matrix @ v, matrix.diagonal(), b, share) for share in (0.0, 1e-3)]
    assert float(torch.linalg.solve(matrix, b).norm()) > 100
    assert all(float(c.norm()) < 2 for c in found)


def test_a_centre_is_that_of_the_sum_and_a_share_of_its_diagonal() -> None:
    turn = torch.linalg.qr(torch.randn(30, 30, dtype=torch.float64)).Q
    matrix = turn @ torch.logspace(0, -6, 30, dtype=torch.float64).diag() @ turn.T
    b, diagonal = torch.randn(30, dtype=torch.float64), matrix.diagonal()
    c = centre(lambda v: matrix @ v, diagonal, b, 0.1)
    torch.testing.assert_close(
        c, torch.linalg.solve(matrix + 0.1 * diagonal.diag(), b), rtol=1e-2, atol=0.1
    )


def test_a_centre_changes_no_more_than_rounding_does() -> None:
    """Eigenvalues of every size, as networks have them: the weak ones are reached in part, and alike."""
    generator = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(200, 200, generator=generator, dtype=torch.float64)).Q
    matrix = turn @ torch.logspace(0, -12, 200, dtype=torch.float64).diag() @ turn.T
    b = matrix @ torch.randn(200, generator=generator, dtype=torch.float64)
    noise = 1e-13 * torch.randn(200, 200, generator=generator, dtype=torch.float64)
    other = matrix + (noise + noise.T) * matrix.diagonal().mean()
    one, two = (centre(lambda v, A=A: A @ v, A.diagonal(), b, 0.0) for A in (matrix, other))
    assert float((one - two).norm()) < 1e-7 * float(one.norm())
    value = 2 * b @ one - one @ matrix @ one
    assert float(value) > 0.999 * float(b @ torch.linalg.solve(matrix, b))


def test_a_centre_is_found_where_the_largest_eigenvalue_was_taken_for_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beyond the bound the steps go astray, which their residual shows."""
    monkeypatch.setattr("holdfast.matrices.centre._ABOVE", 0.1)
    turn = torch.linalg.qr(torch.randn(61, 61, dtype=torch.float64)).Q
    matrix = turn @ torch.linspace(1, 50, 61, dtype=torch.float64).diag() @ turn.T
    b = torch.randn(61, dtype=torch.float64)
    c = centre(lambda v: matrix @ v, matrix.diagonal(), b, 0.0)
    torch.testing.assert_close(c, torch.linalg.solve(matrix, b), rtol=1e-2, atol=1e-3)
    for broken in (torch.nan, torch.inf):  # a matrix like that is refused by name, later
        assert not bool(centre(lambda v, a=broken: a * v, matrix.diagonal(), b, 0.0).any())


@pytest.mark.parametrize(
    "approximation",
    [
        hf.Kronecker(rank=2, merge="stack"),
        hf.Kronecker(correction="eigen", merge="stack"),
        hf.KroneckerPlusLowRank(rank=3, correction="eigen"),
        hf.Kronecker(rank=2),
        hf.Kronecker(),
    ],
    ids=repr,
)
def test_a_task_may_follow_a_penalty_in_half_precision(approximation: hf.Approximation) -> None:
    """What rounding left along free directions has no curvature there that the next task could hold."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    recipe, whole, half = hf.Regularizer(hf.EWC(), approximation, anchor="each"), None, None
    for task in range(5):
        x = torch.randn(6, 8)
        x[:, :2] = 0  # inputs without any signal
        data = [(x, torch.randint(0, 3, (6,)))]
        whole = recipe.consolidate(model, data, previous=whole, seed=task, progress=False)
        stored = None if half is None else half.to(dtype=torch.bfloat16)
        half = recipe.consolidate(model, data, previous=stored, seed=task, progress=False)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.3 * torch.randn_like(parameter)
    furthest = []
    for penalty in (whole, half):
        assert penalty is not None
        zero = torch.zeros(penalty.matrix.dim, dtype=torch.float64)
        _, b = penalty.matrix.value_and_product(zero, penalty.offset)
        values, vectors = torch.linalg.eigh(penalty.matrix.dense().double())
        held = values > 1e-7 * values[-1]
        furthest.append(float(((vectors.T @ b)[held] / values[held]).norm()))
    assert furthest[1] < 3 * furthest[0]


def test_a_small_negative_value_beside_a_large_one_is_lifted_too() -> None:
    """253 · 255 is just less than 254²: what rounding leaves is negative by little."""
    small = torch.tensor([[253.1, 254.0], [254.0, 255.1]], dtype=torch.float64) / 256
    matrix = torch.block_diag(torch.ones(8, 8, dtype=torch.float64), small)
    assert least(matrix) > -1e-15
    assert least(matrix.to(torch.bfloat16)) < -1e-7
    assert least(rounded(matrix, torch.bfloat16)) > -1e-14
