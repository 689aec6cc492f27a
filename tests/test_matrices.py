"""Algebra that every matrix obeys, whatever it is stored as."""

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import holdfast as hf
from holdfast.matrices import MATRICES
from holdfast.matrices.base import Offset, PSDMatrix
from holdfast.matrices.kronecker_block import KroneckerBlock

DOUBLE = torch.float64


def _factor(dim: int, rows: int, seed: int, dtype: torch.dtype = DOUBLE) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, dim, generator=generator, dtype=dtype)


def _diagonal(dim: int, seed: int) -> PSDMatrix:
    return hf.DiagonalMatrix(_factor(dim, 3, seed).square().sum(0))


def _blocks(dim: int, seed: int) -> PSDMatrix:
    """Blocks of three sizes: a stack of small ones, then what is left in one."""
    generator = torch.Generator().manual_seed(seed)
    small = max(1, dim // 3)
    shapes = [(dim // small, small)] + ([(1, dim % small)] if dim % small else [])
    rows = [torch.randn(k, 2, b, generator=generator, dtype=DOUBLE) for k, b in shapes]
    return hf.BlockDiagonalMatrix([r.transpose(1, 2) @ r for r in rows])


def _factored(dim: int, seed: int) -> PSDMatrix:
    return hf.FactoredMatrix(_factor(dim, 3, seed))


def _dense(dim: int, seed: int) -> PSDMatrix:
    F = _factor(dim, 3, seed)
    return hf.DenseMatrix(F.T @ F)


def _sum(dim: int, seed: int) -> PSDMatrix:
    return hf.SumMatrix([_diagonal(dim, seed), _factored(dim, seed + 1)])


def _parts(dim: int, seed: int) -> PSDMatrix:
    """A part in two ranges around the others, the last of them a sum; one part where there is no room."""
    if dim < 5:
        return hf.PartsMatrix([_factored(dim, seed)], [[(0, dim)]], dim)
    places = [[(0, 1), (dim - 1, dim)], [(1, 3)], [(3, dim - 1)]]
    parts = [_factored(2, seed), _diagonal(2, seed), _sum(dim - 4, seed)]
    return hf.PartsMatrix(parts, places, dim)


def _kronecker(dim: int, seed: int) -> PSDMatrix:
    """What fits of: a layer with a bias, two groups in their eigenvectors, and a diagonal."""
    generator = torch.Generator().manual_seed(seed)

    def factor(groups: int, size: int) -> Tensor:
        rows = torch.randn(1, groups, size, size, generator=generator, dtype=DOUBLE)
        return rows.mT @ rows

    blocks = []
    if dim >= 6:  # 2 × 2 entries of a weight at 0, its bias at 4
        blocks.append(KroneckerBlock(0, 4, factor(1, 3), factor(1, 2)))
    if dim >= 11:  # 2 × (1 × 2) entries at 7
        bases = (torch.linalg.qr(factor(2, size))[0] for size in (2, 1))
        values = torch.rand(1, 2, 1, 2, generator=generator, dtype=DOUBLE)
        blocks.append(KroneckerBlock(7, None, *bases, values))
    return hf.KroneckerMatrix.on(blocks, _factor(dim, 3, seed).square().sum(0))


# One row per representation; a new one is tested by adding its row.
MAKE: dict[str, Callable[[int, int], PSDMatrix]] = {
    "diagonal": _diagonal,
    "block_diagonal": _blocks,
    "factored": _factored,
    "dense": _dense,
    "sum": _sum,
    "parts": _parts,
    "kronecker": _kronecker,
}
every = pytest.mark.parametrize("kind", MATRICES)
dims = st.integers(1, 17)


def vector(dim: int, seed: int = 99) -> Tensor:
    return _factor(dim, 1, seed)[0]


def offset_of(matrix: PSDMatrix, seed: int = 5) -> Offset:
    """An offset as a moved reference point makes it."""
    return matrix.moved((), vector(matrix.dim, seed))


def q(matrix: PSDMatrix, delta: Tensor, offset: Offset) -> Tensor:
    return matrix.value_and_product(delta, offset)[0]


def numbers(matrix: PSDMatrix) -> list[Tensor]:
    """The stored tensors without those that say where things are."""
    return [t for t in matrix.tensors.values() if t.dtype != torch.int64]


def bytes_of_numbers(matrix: PSDMatrix) -> int:
    return sum(t.nbytes for t in numbers(matrix))


def test_every_representation_is_tested() -> None:
    assert MAKE.keys() == MATRICES.keys()
    for name, make in MAKE.items():
        assert type(make(5, 0)) is MATRICES[name]


@every
@settings(deadline=None, max_examples=15)
@given(dim=dims, seed=st.integers(0, 99))
def test_products_agree_with_the_dense_form(kind: str, dim: int, seed: int) -> None:
    matrix, v = MAKE[kind](dim, seed), vector(dim)
    dense = matrix.dense()
    assert matrix.dim == dim
    assert dense.shape == (dim, dim)
    torch.testing.assert_close(dense, dense.T)
    assert float(torch.linalg.eigvalsh(dense)[0]) >= -1e-9
    torch.testing.assert_close(matrix @ v, dense @ v)
    torch.testing.assert_close(matrix.quadratic(v), v @ dense @ v)
    torch.testing.assert_close(matrix.diagonal(), dense.diagonal())
    torch.testing.assert_close(matrix.trace(), dense.trace())
    value, product = matrix.value_and_product(v)
    torch.testing.assert_close(value, v @ dense @ v)
    torch.testing.assert_close(product, dense @ v)


@every
@settings(deadline=None, max_examples=10)
@given(dim=dims, cuts=st.lists(st.integers(0, 17), max_size=3), with_offset=st.booleans())
def test_pieces_of_a_vector_give_what_the_whole_gives(
    kind: str, dim: int, cuts: list[int], with_offset: bool
) -> None:
    matrix, delta = MAKE[kind](dim, 1), vector(dim)
    offset = offset_of(matrix) if with_offset else ()
    borders = sorted({0, dim, *(c for c in cuts if c < dim)})
    sizes = [b - a for a, b in itertools.pairwise(borders)]
    value, state = matrix.evaluate(delta.split(sizes), offset)
    expected = matrix.value_and_product(delta, offset)
    torch.testing.assert_close(value, expected[0])
    torch.testing.assert_close(matrix.product(state), expected[1])
    target = torch.ones(dim, dtype=DOUBLE)
    matrix.add_product_(target.split(sizes), state, 0.7)
    torch.testing.assert_close(target, 1 + 0.7 * expected[1])


@every
@pytest.mark.parametrize("scale", [0.0, 0.25, 1.0, 3])
def test_scaling(kind: str, scale: float) -> None:
    matrix = MAKE[kind](9, 2)
    before = {name: t.clone() for name, t in matrix.tensors.items()}
    scaled = scale * matrix
    assert type(scaled) is type(matrix)
    torch.testing.assert_close(scaled.dense(), scale * matrix.dense())
    for name, t in matrix.tensors.items():  # a value is never changed
        assert torch.equal(t, before[name])
    expected = scale * matrix.dense()
    assert matrix.scale_(scale) is matrix
    torch.testing.assert_close(matrix.dense(), expected)


@every
@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf")])
def test_a_scale_that_leaves_the_cone_is_refused(kind: str, scale: float) -> None:
    with pytest.raises(ValueError, match=rf"finite number ≥ 0, got {scale}"):
        scale * MAKE[kind](4, 2)


@every
@settings(deadline=None, max_examples=8)
@given(dim=dims)
def test_addition(kind: str, dim: int) -> None:
    one, two = MAKE[kind](dim, 1), MAKE[kind](dim, 2)
    if kind in (
        "factored",
        "sum",
        "parts",
    ):  # the approximation decides: added, stacked, truncated
        assert not hasattr(one, "__add__")
        return
    total = one + two  # type: ignore[operator]
    assert type(total) is type(one)
    torch.testing.assert_close(total.dense(), one.dense() + two.dense())


@every
@settings(deadline=None, max_examples=10)
@given(dim=dims, seed=st.integers(0, 99))
def test_offsets_follow_the_reference_point(kind: str, dim: int, seed: int) -> None:
    """q'(δ) = q(δ + d), once and twice; half the gradient comes with it."""
    matrix = MAKE[kind](dim, seed)
    d, e, delta = vector(dim, 1), vector(dim, 2), vector(dim, 3)
    once = matrix.moved((), d)
    torch.testing.assert_close(q(matrix, delta, once), matrix.quadratic(delta + d))
    twice = matrix.moved(once, e)
    torch.testing.assert_close(q(matrix, delta, twice), q(matrix, delta + e, once))
    torch.testing.assert_close(q(matrix, delta, twice), matrix.quadratic(delta + d + e))
    half_gradient = matrix.value_and_product(delta, twice)[1]
    torch.testing.assert_close(half_gradient, matrix @ (delta + d + e))


@every
def test_offsets_scale_with_the_matrix(kind: str) -> None:
    matrix, delta = MAKE[kind](8, 3), vector(8)
    offset = offset_of(matrix)
    scaled, moved = 0.3 * matrix, matrix.scaled_offset(offset, 0.3)
    torch.testing.assert_close(q(scaled, delta, moved), 0.3 * q(matrix, delta, offset))
    assert matrix.scaled_offset((), 0.3) == ()


@every
@settings(deadline=None, max_examples=10)
@given(data=st.data())
def test_expansion_into_a_larger_space(kind: str, data: st.DataObject) -> None:
    """The old entries act as before, wherever they went; the new ones are free."""
    dim = data.draw(dims)
    matrix = MAKE[kind](dim, 4)
    if kind == "block_diagonal":
        with pytest.raises(TypeError, match="project"):
            matrix.expand(dim + 1, torch.arange(dim))
        return
    larger = data.draw(st.integers(dim, dim + 6))
    chosen = data.draw(st.permutations(range(larger)))[:dim]
    index = torch.tensor(chosen)
    if kind == "kronecker":  # layers stay in one piece
        index = torch.arange(dim) + data.draw(st.integers(0, larger - dim))
    grown, delta = matrix.expand(larger, index), vector(larger)
    assert type(grown) is type(matrix)
    assert grown.dim == larger
    torch.testing.assert_close(grown.quadratic(delta), matrix.quadratic(delta[index]))
    torch.testing.assert_close(grown.trace(), matrix.trace())
    offset = offset_of(matrix)
    expanded = matrix.expand_offset(offset, larger, index)
    torch.testing.assert_close(q(grown, delta, expanded), q(matrix, delta[index], offset))
    assert matrix.expand_offset((), larger, index) == ()


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_blocks_cut_anew_stay_positive(data: st.DataObject) -> None:
    """Projection keeps what lies inside the new blocks and drops the rest, nothing else."""
    old = data.draw(
        st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=3)
    )
    dim = sum(k * b for k, b in old)
    rows = [_factor(k * b, 2, i).view(2, k, b).transpose(0, 1) for i, (k, b) in enumerate(old)]
    matrix = hf.BlockDiagonalMatrix([r.transpose(1, 2) @ r for r in rows])
    larger = dim + data.draw(st.integers(0, 5))
    index = torch.tensor(sorted(data.draw(st.permutations(range(larger)))[:dim]))
    size = data.draw(st.integers(1, larger))
    shapes = [(larger // size, size)] + ([(1, larger % size)] if larger % size else [])
    found = matrix.project(index, shapes).dense()
    expected = torch.zeros(larger, larger, dtype=DOUBLE)
    expected[index.unsqueeze(1), index] = matrix.dense()
    block = torch.arange(larger) // size
    expected *= block.unsqueeze(1) == block
    torch.testing.assert_close(found, expected)
    assert float(torch.linalg.eigvalsh(found)[0]) >= -1e-9


@every
def test_rebuilt_from_its_tensors(kind: str) -> None:
    matrix = MAKE[kind](11, 6)
    again = type(matrix).from_tensors(dict(matrix.tensors))
    assert torch.equal(again.dense(), matrix.dense())
    assert matrix.nbytes == sum(t.numel() * t.element_size() for t in matrix.tensors.values())
    assert repr(matrix).startswith(f"{type(matrix).__name__}(dim=11, ")


@every
def test_half_precision_storage(kind: str) -> None:
    """Half the bytes of float32, arithmetic in float32, an error of bfloat16's rounding."""
    matrix = MAKE[kind](40, 7).to(dtype=torch.float32)
    small = matrix.to(dtype=torch.bfloat16)
    assert bytes_of_numbers(small) * 2 == bytes_of_numbers(matrix)
    v = vector(40).float()
    assert (small @ v).dtype == torch.float32
    assert small.dense().dtype == small.diagonal().dtype == torch.float32
    error, diagonal = small.dense() - matrix.dense(), matrix.diagonal()
    raised = error.diagonal() / diagonal.clamp(min=1e-9)  # so that nothing becomes negative
    assert -(2**-6) <= float(raised.min()) <= float(raised.max()) < 2**-5
    error.diagonal().zero_()
    torch.testing.assert_close(error + matrix.dense(), matrix.dense(), rtol=2**-6, atol=0.03)
    torch.testing.assert_close(small.quadratic(v), v @ small.dense() @ v, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(small.trace(), small.dense().trace(), rtol=1e-5, atol=1e-5)
    scaled = 0.25 * small
    assert {t.dtype for t in numbers(scaled)} == {torch.bfloat16}
    torch.testing.assert_close(scaled.dense(), 0.25 * small.dense())


@every
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("given_as", [torch.bfloat16, torch.float32, torch.float64])
def test_any_precision_meets_any_other(
    kind: str, stored: torch.dtype, given_as: torch.dtype
) -> None:
    """Vectors and matrices of different dtypes meet in float32, or float64 if one is."""
    matrix, v = MAKE[kind](6, 8).to(dtype=stored), vector(6).to(given_as)
    wide = torch.float64 if torch.float64 in (stored, given_as) else torch.float32
    exact = matrix.dense().double()
    w = v.double()
    tolerance = {"rtol": 1e-4, "atol": 1e-4}
    for value, expected in [
        (matrix @ v, exact @ w),
        (matrix.quadratic(v), w @ exact @ w),
        (matrix.value_and_product(v)[0], w @ exact @ w),
        (matrix.value_and_product(v)[1], exact @ w),
        (q(matrix, v, matrix.moved((), v)), 4 * w @ exact @ w),
        (q(matrix, v, matrix.moved(matrix.moved((), v), v)), 9 * w @ exact @ w),
    ]:
        assert value.dtype == wide
        torch.testing.assert_close(value.double(), expected, **tolerance)


def test_int8_storage_of_a_factor() -> None:
    """A quarter of the bytes, a scale per row, an error of half a step per entry."""
    F = _factor(60, 5, 9, torch.float32) * torch.logspace(-6, 3, 5).unsqueeze(1)
    matrix = hf.FactoredMatrix(F)
    small = matrix.to(dtype=torch.int8)
    assert small.tensors["rows"].dtype == torch.int8
    assert small.nbytes == 5 * 60 + 5 * 4
    step = F.abs().amax(1, keepdim=True) / 127
    assert bool(((small.factor - F).abs() <= 0.5001 * step).all())
    v = vector(60).float()
    torch.testing.assert_close(small @ v, small.dense() @ v, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(small.quadratic(v), (small.factor @ v).square().sum())
    torch.testing.assert_close((0.49 * small).factor, 0.7 * small.factor)
    assert (0.49 * small).tensors["rows"].dtype == torch.int8
    index = torch.arange(60) + 2
    assert float(small.expand(63, index).trace()) == pytest.approx(float(small.trace()))
    torch.testing.assert_close(small.to(dtype=torch.int8).factor, small.factor)
    torch.testing.assert_close(small.to(dtype=torch.float32).factor, small.factor)
    assert small.to().tensors["rows"].dtype == torch.int8  # without a dtype it stays what it is
    scaled = matrix.to(dtype=torch.int8).scale_(0.25)
    torch.testing.assert_close(scaled.factor, 0.5 * small.factor)


def test_int8_storage_of_rows_that_are_zero() -> None:
    F = torch.zeros(2, 4)
    F[1] = torch.tensor([0.0, 1.0, -1.0, 0.5])
    try:
        torch.set_flush_denormal(True)
        small = hf.FactoredMatrix(F).to(dtype=torch.int8)
        assert torch.equal(small.factor[0], torch.zeros(4))
        assert bool(small.factor.isfinite().all())
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("kind", [name for name in MATRICES if name != "factored"])
def test_int8_is_refused_where_entries_span_orders_of_magnitude(kind: str) -> None:
    with pytest.raises(ValueError, match=r"int8.*orders of magnitude.*use torch\.bfloat16"):
        MAKE[kind](9, 0).to(dtype=torch.int8)


def test_other_integers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"floating point or int8, not torch\.int16"):
        _factored(4, 0).to(dtype=torch.int16)


def test_a_factor_wider_than_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Low precision is widened a few columns at a time; the chunks must join."""
    from holdfast.matrices import factored

    matrix = hf.FactoredMatrix(_factor(50, 4, 1, torch.float32))
    v = vector(50).float()
    expected, gram = matrix.to(dtype=torch.bfloat16) @ v, matrix.gram()
    monkeypatch.setattr(factored, "_COLUMNS", 7)
    torch.testing.assert_close(matrix.to(dtype=torch.bfloat16) @ v, expected)
    torch.testing.assert_close(matrix.gram(), gram)
    torch.testing.assert_close(gram, matrix.factor.double() @ matrix.factor.double().T)
    small = matrix.to(dtype=torch.int8)
    torch.testing.assert_close(small.project(v), small.factor @ v)
    torch.testing.assert_close(small.lift(torch.ones(4)), small.factor.sum(0))
