"""What a corrected Kronecker product holds back, and what it promises of data that fits and that does not."""

import warnings

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.approximation import kronecker as module
from holdfast.hashing import Draw
from holdfast.importance import Importance
from holdfast.rows import Rows
from holdfast.structure import layer_shapes
from models_zoo import Columns, batches, shuffled

EIGEN = hf.Kronecker(correction="eigen")


def sorted_by_class() -> tuple[nn.Module, Columns]:
    """The first class is isotropic, all others lie along one direction."""
    torch.manual_seed(0)
    y = torch.arange(384) * 3 // 384
    x = 0.01 * torch.randn(384, 12, dtype=torch.float64)
    x[y == 0] += 0.3 * torch.randn(128, 12, dtype=torch.float64)
    x[y > 0] += 3 * torch.randn(12, dtype=torch.float64)
    model = nn.Linear(12, 3).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model, (x, y)


def error(model: nn.Module, columns: Columns, approximation: hf.Approximation) -> float:
    def of(chosen: hf.Approximation) -> hf.PSDMatrix:
        recipe = hf.Regularizer(hf.EWC(labels="expected"), chosen)
        return recipe.consolidate(model, batches(columns, 64), seed=0).matrix

    return hf.frobenius_error(of(approximation), of(hf.Full(form="dense")))


def test_data_that_fits_is_never_worse_in_any_order() -> None:
    model, columns = sorted_by_class()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert error(model, columns, EIGEN) <= error(model, columns, hf.Kronecker()) + 1e-12


def test_data_that_does_not_fit_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorted, the first examples say nothing of the others; in random order they do."""
    monkeypatch.setattr(module, "HELD_BYTES", 0)
    model, columns = sorted_by_class()
    plain = error(model, columns, hf.Kronecker())
    with pytest.warns(UserWarning, match=r"first 128 rows.*shuffle the data"):
        assert error(model, columns, EIGEN) > plain + 0.1
    with pytest.warns(UserWarning, match="first 128 rows"):
        assert error(model, shuffled(columns), EIGEN) < plain + 1e-3


def test_nothing_is_said_where_nothing_comes_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELD_BYTES", 0)
    model, (x, y) = sorted_by_class()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf.Regularizer(hf.EWC(), EIGEN).consolidate(model, [(x[:128], y[:128])], seed=0)


def held(importance: Importance, model: nn.Module, columns: Columns) -> tuple[int, hf.PSDMatrix]:
    """Bytes that wait for the bases, and the matrix."""
    space = hf.ParameterSpace.of(model)
    rows = Rows(model.eval(), batches(columns, 50), space, importance, Draw(0))
    layers = layer_shapes(model, space)
    state = EIGEN.start(hf.Setting(space, Draw(0), dtype=torch.float64, layers=layers))
    for batch in rows:
        EIGEN.update(state, batch)
    state.groups.flush()
    count = sum(each.nbytes for each in state.held)
    assert state.nbytes == count
    return count, EIGEN.finish(state)


def test_an_example_is_held_once_for_all_its_rows() -> None:
    """Expected labels make three rows of it, which differ in the label alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    columns = torch.randn(128, 40, dtype=torch.float64), torch.randint(3, (128,))
    once, _ = held(hf.EWC(), model, columns)
    thrice, found = held(hf.EWC(labels="expected"), model, columns)
    inputs = columns[0].nbytes
    assert inputs < once < 1.3 * inputs
    assert thrice < 1.6 * inputs  # labels and places only
    W = torch.cat(
        [
            block
            for rows in Rows(
                model.eval(),
                [columns],
                hf.ParameterSpace.of(model),
                hf.EWC(labels="expected"),
                Draw(0),
            )
            for block in rows.blocks()
        ]
    )
    torch.testing.assert_close(found.trace(), W.square().sum())


def test_what_is_held_counts() -> None:
    model = nn.Linear(4, 3)
    space = hf.ParameterSpace.of(model)
    setting = hf.Setting(space, Draw(0), layers=layer_shapes(model, space))
    least = EIGEN.nbytes(setting) - module.HELD_BYTES
    assert least > hf.Kronecker().nbytes(setting) > 0
    both = hf.KroneckerPlusLowRank(rank=2, correction="eigen")
    assert both.nbytes(setting) > module.HELD_BYTES
