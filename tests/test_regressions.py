"""Things that broke in the hands of users, each the smallest script that showed it."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import holdfast as hf

Batches = list[tuple[Tensor, Tensor]]


def _data(n: int = 12, width: int = 5) -> Batches:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, width, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (n,), generator=generator)
    return list(zip(x.split(4), y.split(4), strict=True))


def _exact(model: nn.Module, data: Batches) -> Tensor:
    """Ω of EWC from one autograd call per example."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for x, y in data:
        for i in range(len(x)):
            loss = F.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
            rows.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters)]))
    W = torch.stack(rows)
    return W.T @ W / len(W)


def _shared_layer() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.Linear(5, 5)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(5, 3)).double()


def _shared_norm() -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(5)
    model = nn.Sequential(norm, nn.Linear(5, 5), nn.Tanh(), norm, nn.Linear(5, 3)).double()
    model(torch.randn(8, 5, dtype=torch.float64))
    return model.eval()


def _tied_tensor_and_shared_layer() -> nn.Module:
    model = _shared_layer()
    assert isinstance(model, nn.Sequential)
    other = nn.Linear(5, 5).double()
    other.weight = model[0].weight
    return nn.Sequential(other, nn.Tanh(), *model)


@pytest.mark.parametrize("make", [_shared_layer, _shared_norm, _tied_tensor_and_shared_layer])
@pytest.mark.parametrize("approximation", [hf.Full(), hf.Diagonal(), hf.LowRank(rank=20)])
def test_a_module_that_is_used_twice_comes_back_whole(
    make: object, approximation: hf.Approximation
) -> None:
    assert callable(make)
    model, data = make(), _data()
    before = dict(model.named_parameters(remove_duplicate=False))
    exact = _exact(model, data)
    matrix = hf.Regularizer(hf.EWC(), approximation).consolidate(model, data, seed=0).matrix
    after = dict(model.named_parameters(remove_duplicate=False))
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    if not isinstance(approximation, hf.Diagonal):
        torch.testing.assert_close(matrix.dense(), exact)
    torch.testing.assert_close(matrix.diagonal(), exact.diagonal())
