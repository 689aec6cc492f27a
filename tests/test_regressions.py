"""Things that broke in the hands of users, each the smallest script that showed it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import holdfast as hf
from holdfast.coupling import CouplingWarning

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
    make: Callable[[], nn.Module], approximation: hf.Approximation
) -> None:
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


@pytest.mark.parametrize("approximation", [hf.Diagonal(), hf.Full(), hf.LowRank(rank=3)])
@pytest.mark.parametrize("shape", [(33, 33), (33, 3), (1,), ()])
def test_a_product_with_anything_but_a_vector_is_refused(
    approximation: hf.Approximation, shape: tuple[int, ...]
) -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3), nn.Linear(3, 1, bias=False)).double()
    loss = lambda outputs, batch: outputs.sum(1)  # noqa: E731
    regularizer = hf.Regularizer(hf.EWC(), approximation)
    matrix = regularizer.consolidate(model, _data(), loss=loss, seed=0).matrix
    assert matrix.dim == 33
    with pytest.raises(ValueError, match="vector of length 33"):
        matrix @ torch.ones(shape)
    with pytest.raises(ValueError, match="vector of length 33"):
        matrix.quadratic(torch.ones(shape))


@pytest.mark.parametrize("model", [None, nn.Linear, [torch.ones(2)], torch.ones(2)])
def test_what_is_not_a_model_is_named(model: Any) -> None:
    regularizer = hf.Regularizer(hf.EWC(), hf.Diagonal())
    penalty = regularizer.consolidate(nn.Linear(5, 3).double(), _data())
    for call in (penalty, penalty.add_grad_, lambda m: regularizer.consolidate(m, _data())):
        with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
            call(model)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_is_refused_by_name() -> None:
    model = torch.jit.trace(nn.Linear(5, 3).double(), torch.ones(1, 5).double())
    with pytest.raises(TypeError, match="model is TorchScript"):
        hf.Regularizer().consolidate(model, _data())


def test_a_rule_that_cannot_be_stored_is_refused_before_the_data_is_read() -> None:
    class Plain(hf.Importance):
        def potentials(
            self, outputs: Any, batch: Any, *, loss: Any, uniforms: Tensor | None
        ) -> Tensor:
            return outputs.sum(1)

    with pytest.raises(
        TypeError, match=r"Plain must be a dataclass: put @dataclass\(frozen=True\)"
    ):
        hf.Regularizer(Plain(), hf.Diagonal())


def test_a_model_without_memory_or_on_two_devices_is_refused() -> None:
    regularizer = hf.Regularizer(hf.EWC(), hf.Diagonal())
    with pytest.raises(ValueError, match="on meta, expected one device"):
        regularizer.consolidate(nn.Linear(5, 3, device="meta"), _data())
    halves = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3, device="meta"))
    with pytest.raises(ValueError, match="on cpu, meta, expected one device"):
        regularizer.consolidate(halves, _data())


def _head(**options: Any) -> tuple[nn.Module, hf.Penalty]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    regularizer = hf.Regularizer(options.pop("importance", hf.EWC()), hf.LowRank(rank=20))
    return model, regularizer.consolidate(model, options.pop("data", _data()), seed=0)


def test_diagnose_sees_parameters_that_were_frozen_after_consolidation() -> None:
    model, penalty = _head()
    before = penalty.diagnose(model, _data())
    model[0].requires_grad_(False)  # type: ignore[operator]
    after = penalty.diagnose(model, _data())
    assert after == before
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]


@pytest.mark.parametrize("importance", [hf.MAS(), hf.SCP(slices=3), hf.EWC(labels="sampled")])
def test_diagnose_without_labels_says_where_to_take_a_loss_from(importance: hf.Importance) -> None:
    unlabelled = [(x,) for x, _ in _data()]
    model, penalty = _head(importance=importance, data=unlabelled)
    with pytest.raises(ValueError, match="pass new= with labelled batches"):
        penalty.diagnose(model, unlabelled)
    assert penalty.diagnose(model, unlabelled, new=_data()).loss > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 0}, "limit must be a positive integer"),
        ({"seed": -1}, "seed must be a non-negative integer"),
        ({"loss": lambda outputs, batch: outputs.mean()}, "one loss per example"),
        ({"data": []}, "the data is empty"),
    ],
)
def test_diagnose_refuses_bad_options(options: dict[str, Any], message: str) -> None:
    model, penalty = _head()
    with pytest.raises(ValueError, match=message):
        penalty.diagnose(model, **{"data": _data(), **options})


def test_a_loss_module_of_torch_is_refused_with_the_way_to_wrap_it() -> None:
    with pytest.raises(TypeError, match=r"CrossEntropyLoss takes \(outputs, labels\)"):
        hf.Regularizer(hf.EWC(), hf.Diagonal()).consolidate(
            nn.Linear(5, 3).double(), _data(), loss=nn.CrossEntropyLoss(reduction="none")
        )


def test_complex_parameters_are_refused_by_name() -> None:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.waves = nn.Parameter(torch.ones(5, 3, dtype=torch.complex128))

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(torch.complex128) @ self.waves).abs()

    with pytest.raises(ValueError, match="parameter waves is complex"):
        hf.Regularizer(hf.EWC(), hf.Diagonal()).consolidate(Waves(), _data())


@dataclass(frozen=True)
class _TwoValuesOneRow(hf.Importance):
    @property
    def several(self) -> bool:
        return True

    def potentials(
        self, outputs: Any, batch: Any, *, loss: Any, uniforms: Tensor | None
    ) -> Tensor:
        return outputs[:, :2]


def test_a_rule_with_more_values_than_rows_is_refused() -> None:
    with pytest.raises(
        ValueError, match="returned 2 values per example, and its rows_per_example"
    ):
        hf.Regularizer(_TwoValuesOneRow(), hf.Full()).consolidate(
            nn.Linear(5, 3).double(), _data()
        )


class _Centred(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


def test_a_model_that_mixes_the_examples_of_a_batch_is_reported() -> None:
    model = _Centred(5, 3).double()
    with pytest.warns(CouplingWarning, match="mixes the examples of a batch"):
        hf.Regularizer(hf.EWC(), hf.CountSketch(size=2)).consolidate(model, _data(), seed=0)


def test_a_normalisation_by_the_batch_alone_is_refused_in_words() -> None:
    model = nn.Sequential(
        nn.Linear(5, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3)
    ).double()
    with pytest.raises(ValueError, match=r"works on a batch and not on one example.*running ones"):
        hf.Regularizer().consolidate(model, _data())


def test_gradients_that_count_the_words_of_a_batch_are_reported() -> None:
    words = nn.EmbeddingBag(7, 3, scale_grad_by_freq=True, mode="sum")
    data = [(torch.randint(7, (4, 5)), torch.randint(3, (4,)))]
    with pytest.warns(CouplingWarning, match="scale_grad_by_freq=True"):
        hf.Regularizer(hf.EWC(), hf.CountSketch(2)).consolidate(words, data)
