"""The diagnosis of a penalty against definitions written out."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import holdfast as hf

Data = list[tuple[Tensor, Tensor]]


def setting(n: int = 400) -> tuple[nn.Module, Data, Data, Data]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()

    def draw(count: int, seed: int) -> Data:
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(count, 4, generator=g, dtype=torch.float64)
        y = torch.randint(0, 3, (count,), generator=g)
        return list(zip(x.split(50), y.split(50), strict=True))

    return model, draw(n, 1), draw(n, 2), draw(100, 3)


def flat_gradient(model: nn.Module, data: Data) -> Tensor:
    x, y = (torch.cat(column) for column in zip(*data, strict=True))
    found = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    return torch.cat([g.flatten() for g in found])


def test_the_strength_balances_the_gradients_after_a_step_of_one_per_cent() -> None:
    model, old, held_out, new = setting()
    penalty = hf.Regularizer(hf.EWC(), hf.Full()).consolidate(model, old)
    found = penalty.diagnose(model, held_out, new=new)
    start = nn.utils.parameters_to_vector(model.parameters()).detach()
    g = flat_gradient(model, new)
    step = -0.01 * start.norm() * g / g.norm()
    nn.utils.vector_to_parameters(start + step, model.parameters())
    after = flat_gradient(model, new)
    pull = penalty.matrix.dense() @ step
    assert found.suggested_strength == pytest.approx(float(after.norm() / pull.norm()), rel=1e-5)


def test_loss_penalty_trace_and_shares() -> None:
    model, old, held_out, new = setting()
    regularizer = hf.Regularizer(hf.EWC(), hf.Diagonal(), strength=3.0)
    penalty = regularizer.consolidate(model, old)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1
    before = [p.clone() for p in model.parameters()]
    found = penalty.diagnose(model, held_out, new=new)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    x, y = (torch.cat(column) for column in zip(*new, strict=True))
    assert found.loss == pytest.approx(F.cross_entropy(model(x), y).item())
    assert found.penalty == pytest.approx(penalty(model).item())
    diagonal = penalty.matrix.diagonal()
    assert found.trace == pytest.approx(float(diagonal.sum()))
    share = float(diagonal[:30].sum() / diagonal.sum())  # the first layer: 24 weights, 6 biases
    assert found.importance_per_layer == pytest.approx({"0": share, "2": 1 - share})
    assert found.largest_eigenvalue == pytest.approx(float(diagonal.max()))
    assert found.stable_rank == pytest.approx(float(diagonal.sum() / diagonal.max()))
    assert found.stability_limit(0.5) == pytest.approx(4 / float(diagonal.max()))


def test_the_error_is_near_zero_for_the_full_matrix_and_large_for_a_wrong_one() -> None:
    model, old, held_out, _ = setting(4000)
    full = hf.Regularizer(hf.EWC(), hf.Full()).consolidate(model, old)
    found = full.diagnose(model, held_out, limit=4000)
    assert found.quadratic_interval is not None
    low, high = found.quadratic_interval
    assert low < 0 < high
    assert high - low < 0.3
    tripled = hf.Penalty(
        full.space, 3.0 * full.matrix, full.anchor, 1.0, (), full.recipe, full.tasks
    )
    wrong = tripled.diagnose(model, held_out, limit=4000)
    assert wrong.quadratic_interval is not None
    assert wrong.quadratic_interval[0] > 1.5


def test_the_error_is_not_claimed_when_rows_are_gone() -> None:
    model, old, held_out, new = setting()
    regularizer = hf.Regularizer(hf.EWC(), hf.Full())
    first = regularizer.consolidate(model, old)
    found = regularizer.consolidate(model, new, previous=first).diagnose(model, held_out)
    assert found.quadratic_error is None
    assert "earlier tasks are gone" in str(found)


@pytest.mark.parametrize("target", [0.1, 0.3])
def test_the_advised_size_has_the_expected_error(target: float) -> None:
    model, old, _, _ = setting()
    penalty = hf.Regularizer(hf.EWC(), hf.Full()).consolidate(model, old)
    t = penalty.diagnose(model, old, target=target).advised_size
    omega = penalty.matrix.dense()
    rows = []
    for x, y in ((x, y) for xs, ys in old for x, y in zip(xs, ys, strict=True)):
        rows.append(flat_gradient(model, [(x[None], y[None])]).norm() ** 4)
    quartic = float(sum(rows)) / 400**2
    squared = float(omega.square().sum())
    error = (float(omega.trace()) ** 2 + squared - 2 * quartic) / t / squared
    assert math.sqrt(error) == pytest.approx(target, rel=0.01)
