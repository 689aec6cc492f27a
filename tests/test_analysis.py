"""Numbers about matrices against dense algebra."""

import itertools

import pytest
import torch
from torch import Tensor

import holdfast as hf
from holdfast import memory
from holdfast.matrices.kronecker_block import KroneckerBlock
from holdfast.matrices.thin_block import ThinBlock


def matrices() -> dict[str, hf.PSDMatrix]:
    g = torch.Generator().manual_seed(0)

    def rows(n: int, m: int = 11) -> Tensor:
        return torch.randn(n, m, generator=g, dtype=torch.float64)

    stack, rest = rows(12, 4).view(3, 4, 4), rows(3, 3)[None]
    return {
        "diagonal": hf.DiagonalMatrix(torch.rand(11, generator=g, dtype=torch.float64)),
        "blocks": hf.BlockDiagonalMatrix(
            [stack[:2] @ stack[:2].mT, rest @ rest.mT],
        ),
        "few rows": hf.FactoredMatrix(rows(3)),
        "many rows": hf.FactoredMatrix(rows(20)),
        "dense": hf.DenseMatrix(rows(9).T.cov(correction=0)),
        "products": kronecker(2, 1, False, 0),
        "other products": kronecker(2, 1, False, 1),
        "groups": kronecker(1, 2, False, 2),
        "stacked products": kronecker(2, 1, False, 3) + kronecker(2, 1, False, 4),
        "corrected": kronecker(2, 1, True, 5),
        "other corrected": kronecker(2, 1, True, 6),
        "stacked corrected": kronecker(2, 1, True, 7) + kronecker(2, 1, True, 8),
    }


def kronecker(outputs: int, groups: int, corrected: bool, seed: int) -> hf.KroneckerMatrix:
    """A layer with two inputs and a bias in the middle of eleven entries."""
    g = torch.Generator().manual_seed(seed)
    sizes = (3, outputs)
    roots = [torch.randn(1, groups, n, n, generator=g, dtype=torch.float64) for n in sizes]
    factors = [torch.linalg.qr(root)[0] if corrected else root @ root.mT for root in roots]
    shape = (1, groups, outputs, 3)
    values = torch.rand(shape, generator=g, dtype=torch.float64) if corrected else None
    rest = torch.rand(11, generator=g, dtype=torch.float64)
    return hf.KroneckerMatrix.on([KroneckerBlock(1, 7, *factors, values)], rest)


@pytest.mark.parametrize(("a", "b"), list(itertools.product(matrices(), repeat=2)))
def test_frobenius_error_is_that_of_the_dense_matrices(a: str, b: str) -> None:
    first, second = matrices()[a], matrices()[b]
    A, B = first.dense(), second.dense()
    expected = float((A - B).square().sum() / B.square().sum())
    assert hf.frobenius_error(first, second) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("a", "b"), [("products", "corrected"), ("stacked corrected", "products")]
)
def test_products_of_all_kinds_are_compared_in_their_own_memory(
    monkeypatch: pytest.MonkeyPatch, a: str, b: str
) -> None:
    """A layer of 50,000 weights, written out, would be 20 GB."""

    def dense(self: object) -> torch.Tensor:
        raise AssertionError("written out")

    monkeypatch.setattr(hf.KroneckerMatrix, "dense", dense)
    assert hf.frobenius_error(matrices()[a], matrices()[b]) > 0


def test_what_must_be_written_out_and_does_not_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "available", lambda _: 1000)
    with pytest.raises(MemoryError, match="written out, needs"):
        hf.frobenius_error(matrices()["products"], matrices()["blocks"])


@pytest.mark.parametrize("name", matrices())
def test_spectrum_has_all_eigenvalues_largest_first(name: str) -> None:
    matrix = matrices()[name]
    expected = torch.linalg.eigvalsh(matrix.dense()).flip(0)
    torch.testing.assert_close(hf.spectrum(matrix), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", matrices())
def test_stable_rank_by_both_definitions(name: str) -> None:
    matrix = matrices()[name]
    W = matrix.dense()
    largest = float(torch.linalg.matrix_norm(W, 2))
    assert hf.stable_rank(matrix) == pytest.approx(float(W.trace()) / largest)
    frobenius = float(W.square().sum()) / largest**2
    assert hf.stable_rank(matrix, "frobenius") == pytest.approx(frobenius)


def test_what_is_not_defined_is_refused() -> None:
    zero = hf.DiagonalMatrix(torch.zeros(3))
    with pytest.raises(ValueError, match="zero"):
        hf.frobenius_error(zero, zero)
    with pytest.raises(ValueError, match="zero"):
        hf.stable_rank(zero)
    with pytest.raises(ValueError, match="same size"):
        hf.frobenius_error(zero, hf.DiagonalMatrix(torch.ones(4)))
    with pytest.raises(ValueError, match="'trace' or 'frobenius'"):
        hf.stable_rank(hf.DiagonalMatrix(torch.ones(4)), "nuclear")  # type: ignore[arg-type]


def test_wide_thin_products_need_no_more_than_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest eigenvalue and the stable rank of a layer whose factors, written out, would be large."""
    torch.manual_seed(0)
    F, H = (torch.randn(1, 1, n, 3, dtype=torch.float64) for n in (90, 40))
    d, e = (torch.rand(1, 1, n, dtype=torch.float64) for n in (90, 40))
    block = ThinBlock(0, None, F, H, inputs_rest=d, outputs_rest=e)
    matrix = hf.KroneckerMatrix.on([block], torch.zeros(3600, dtype=torch.float64))
    largest = float(block.spectrum().max())
    trace, squares = float(matrix.trace()), float(block.spectrum().square().sum())
    monkeypatch.setattr(ThinBlock, "factors", None)  # n × n entries
    monkeypatch.setattr(ThinBlock, "spectrum", None)
    assert hf.analysis.largest_eigenvalue(matrix) == pytest.approx(largest, rel=1e-6)
    assert hf.stable_rank(matrix) == pytest.approx(trace / largest, rel=1e-6)
    monkeypatch.undo()
    assert hf.stable_rank(matrix, "frobenius") == pytest.approx(squares / largest**2, rel=1e-6)


def test_a_spectrum_that_does_not_fit_is_refused_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda _: 500)
    with pytest.raises(MemoryError, match=r"all eigenvalues of a layer of 2 x 3 needs"):
        hf.spectrum(matrices()["stacked products"])
