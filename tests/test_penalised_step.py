"""A step with a penalty, in one read of the factor: equal to adding the gradient and stepping."""

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor, nn

import holdfast as hf
from holdfast import kernels, penalised_step
from holdfast.adam import FlatAdam
from holdfast.matrices import FactoredMatrix, SumMatrix
from holdfast.models import MLP
from holdfast.penalised_step import penalised
from holdfast.penalty import Penalty

X = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] > 0).long()
SHAPE = MLP(
    (3, 37, 71, 2), init="xavier"
)  # 3,000 parameters: one block of columns and a part of one


def held(
    approximation: hf.Approximation | int,
    dtype: torch.dtype = torch.float32,
    anchor: str = "latest",
) -> Penalty:
    """A penalty of two tasks, stored in ``dtype``; a number stands for a low rank of so many rows."""
    model = SHAPE.build(0)
    if isinstance(approximation, int):
        approximation = hf.LowRank(approximation)
    recipe = hf.Regularizer(
        hf.EWC(), approximation, strength=30.0, history=hf.Sum(), anchor=anchor
    )
    penalty = recipe.consolidate(model, [(X, Y)], progress=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    penalty = recipe.consolidate(model, [(X, Y)], previous=penalty, progress=False)
    return penalty if dtype == torch.float32 else penalty.to(dtype=dtype)


def trained(penalty: Penalty, steps: int = 40, ask_every: int = 40) -> tuple[Tensor, str]:
    """The parameters after some steps, and how they were made."""
    model = SHAPE.build(2)
    optimizer = FlatAdam(model, 1e-2)
    begin = penalised(model, penalty, optimizer)
    for index in range(steps):
        if index % ask_every == 0:
            step = begin()
        nn.functional.cross_entropy(model(X), Y).backward()
        step()
        optimizer.flat.grad.zero_()
    return optimizer.flat.detach(), type(step).__name__


@pytest.mark.parametrize("rows", [1, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("anchor", ["latest", "each"])
def test_fused_is_gradient_then_step(
    rows: int, dtype: torch.dtype, anchor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    penalty = held(rows, dtype, anchor)
    assert isinstance(penalty.matrix, FactoredMatrix)
    fused, how = trained(penalty)
    assert how == "_FusedStep"
    monkeypatch.setattr(kernels, "library", lambda: None)
    plain, how = trained(penalty)
    assert how == "function"
    free, _ = trained(dataclasses.replace(penalty, strength=0.0))
    assert (fused - plain).norm() < 2e-3 * (plain - free).norm()


@pytest.mark.parametrize(
    "approximation",
    [hf.DiagonalPlusLowRank(rank=5), hf.KroneckerPlusLowRank(rank=5)],
    ids=lambda a: type(a).__name__,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("anchor", ["latest", "each"])
def test_the_factor_of_a_sum_is_read_once(
    approximation: hf.Approximation,
    dtype: torch.dtype,
    anchor: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    penalty = held(approximation, dtype, anchor)
    assert any(isinstance(part, FactoredMatrix) for part in penalty.matrix.parts)
    fused, how = trained(penalty)
    assert how == "_FusedStep"
    monkeypatch.setattr(kernels, "library", lambda: None)
    plain, how = trained(penalty)
    assert how == "function"
    for place in range(len(penalty.matrix.parts)):  # every summand has a say
        assert (fused - plain).norm() < 0.02 * (plain - trained(without(penalty, place))[0]).norm()


def without(penalty: Penalty, place: int) -> Penalty:
    """The penalty without one summand."""
    parts = list(penalty.matrix.parts)
    offsets = penalty.matrix.offsets(penalty.offset)
    del parts[place], offsets[place]
    offset = tuple(itertools.chain(*offsets))
    return dataclasses.replace(penalty, matrix=SumMatrix(parts), offset=offset)


def test_threads_and_columns_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    penalty = held(5)
    alone, _ = trained(penalty)
    monkeypatch.setattr(kernels, "_LEAST", 500)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        together, how = trained(penalty)
    finally:
        torch.set_num_threads(before)
    assert how == "_FusedStep"
    assert torch.allclose(alone, together, atol=1e-5)


@pytest.mark.parametrize("kind", ["alone", "first", "last"])
def test_one_step_is_adam_in_float64(kind: str) -> None:
    """Against the obvious: the dense matrix, one step of torch's own Adam; wherever a sum has its factor."""
    penalty = held(6)
    diagonal = hf.DiagonalMatrix(torch.linspace(0, 1, penalty.matrix.dim))
    parts = {"alone": [], "first": [penalty.matrix, diagonal], "last": [diagonal, penalty.matrix]}
    if parts[kind]:
        penalty = dataclasses.replace(penalty, matrix=SumMatrix(parts[kind]))
    model = SHAPE.build(2)
    optimizer = FlatAdam(model, 1e-2)
    before = optimizer.flat.detach().double()
    nn.functional.cross_entropy(model(X), Y).backward()
    gradient = optimizer.flat.grad.double()
    gradient += penalty.strength * (penalty.matrix.dense().double() @ (before - penalty.anchor))
    slow = nn.Parameter(before.clone())
    slow.grad = gradient
    torch.optim.Adam([slow], lr=1e-2).step()
    step = penalised(model, penalty, optimizer)()
    assert isinstance(step, penalised_step._FusedStep)
    step()
    moved = optimizer.flat.detach() - before
    certain = gradient.abs() > 1e-4  # the first step of Adam is the sign of the gradient
    assert certain.sum() > 100
    assert torch.allclose(moved[certain], (slow.detach() - before)[certain], atol=1e-6)


def test_what_adds_up_is_renewed() -> None:
    """Asking anew at every step gives what keeping u over all steps gives, but for rounding."""
    penalty = held(7)
    kept, _ = trained(penalty, steps=300, ask_every=300)
    renewed, _ = trained(penalty, steps=300, ask_every=1)
    assert (kept - renewed).norm() < 1e-3 * kept.norm()


def test_a_penalty_on_a_part_goes_by_pieces() -> None:
    model = SHAPE.build(0)
    recipe = hf.Regularizer(hf.EWC(), hf.LowRank(3), include=["0.weight"])
    penalty = recipe.consolidate(model, [(X, Y)], progress=False)
    _, how = trained(penalty)
    assert how == "function"


def test_a_penalty_of_another_network_is_refused() -> None:
    """Names and the number of parameters agree, shapes do not."""
    one, other = (nn.Sequential(nn.Linear(*s, bias=False)) for s in ((4, 6), (6, 4)))
    x, y = torch.randn(8, 4), torch.arange(8) % 6
    recipe = hf.Regularizer(hf.EWC(), hf.LowRank(2))
    penalty = recipe.consolidate(one, [(x, y)], progress=False)
    with pytest.raises(ValueError, match="shape"):
        penalised(other, penalty, FlatAdam(other, 1e-3))


def test_no_columns_are_no_work() -> None:
    empty = torch.zeros(0)
    constants = kernels.AdamConstants(0.1, 0.001, 0.1, 1.0, 1e-8)
    moved = kernels.adam_step_(
        torch.zeros(3, 0), torch.ones(3), empty, empty, empty, empty, constants
    )
    assert moved.tolist() == [0.0, 0.0, 0.0]
