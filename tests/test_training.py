"""Training is plain Adam on the cross-entropy plus the penalty, only cheaper."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import holdfast as hf
from holdfast.adam import FlatAdam
from holdfast.backpropagation import cross_entropy_gradient
from holdfast.models import mlp
from holdfast.streams import Split, Toy
from holdfast.training import Training, accuracies, learn


def small_split(count: int = 60) -> Split:
    return Toy(train=count).tasks(0)[0].train


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def reference(
    model: nn.Module, split: Split, training: Training, penalty: hf.Penalty | None = None
) -> None:
    """The same training in the most ordinary way."""
    draw, optimizer = generator(), torch.optim.Adam(model.parameters(), lr=training.lr)
    for _ in range(training.epochs):
        if training.reset == "epoch":
            optimizer = torch.optim.Adam(model.parameters(), lr=training.lr)
        order = torch.arange(len(split))
        if training.shuffle:
            order = torch.randperm(len(split), generator=draw)
        for chosen in order.split(training.batch_size):
            loss = functional.cross_entropy(model(split.inputs[chosen]), split.labels[chosen])
            if penalty is not None:
                loss = loss + penalty(model)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def trained(training: Training, penalty: hf.Penalty | None = None) -> tuple[nn.Module, nn.Module]:
    """The same network trained by the library and by the reference, in float64."""
    ours, theirs = (mlp((2, 8, 6, 2)).double() for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    split = small_split()
    split = Split(split.inputs.double(), split.labels)
    learn(
        ours, split, training, FlatAdam(ours, training.lr), generator=generator(), penalty=penalty
    )
    reference(theirs, split, training, penalty)
    return ours, theirs


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("reset", ["never", "task", "epoch"])
def test_training_is_adam(reset: str, shuffle: bool) -> None:
    training = Training(epochs=4, batch_size=25, lr=0.01, reset=reset, shuffle=shuffle)  # type: ignore[arg-type]
    ours, theirs = trained(training)
    torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-9, atol=1e-12)


def test_the_reset_policies_differ() -> None:
    ends = {}
    for reset in ("task", "epoch"):
        model = mlp((2, 8, 2))
        model.load_state_dict(ends.get("start", model.state_dict()))
        ends.setdefault("start", {k: v.clone() for k, v in model.state_dict().items()})
        training = Training(epochs=3, batch_size=20, reset=reset)  # type: ignore[arg-type]
        learn(model, small_split(), training, FlatAdam(model, 0.01), generator=generator())
        ends[reset] = flat(model)
    assert not torch.equal(ends["task"], ends["epoch"])


@pytest.mark.parametrize(("reset", "equal"), [("task", True), ("never", False)])
def test_reset_at_a_task_is_a_new_optimiser(reset: str, equal: bool) -> None:
    training = Training(epochs=2, batch_size=20, lr=0.01, reset=reset)  # type: ignore[arg-type]
    model = mlp((2, 8, 2))
    optimizer = FlatAdam(model, training.lr)
    learn(model, small_split(), training, optimizer, generator=generator(1))
    other = mlp((2, 8, 2))
    other.load_state_dict(model.state_dict())
    learn(model, small_split(), training, optimizer, generator=generator(2))
    learn(other, small_split(), training, FlatAdam(other, training.lr), generator=generator(2))
    assert torch.equal(flat(model), flat(other)) is equal


def penalty_for(
    model: nn.Module, approximation: hf.Approximation, anchor: str = "latest"
) -> hf.Penalty:
    regularizer = hf.Regularizer(hf.EWC(), approximation, strength=3.0, anchor=anchor)  # type: ignore[arg-type]
    data = [(torch.randn(10, 2).to(next(model.parameters())), torch.randint(0, 2, (10,)))]
    first = regularizer.consolidate(model, data, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    return regularizer.consolidate(model, data, previous=first, seed=0)


@pytest.mark.parametrize("anchor", ["latest", "each"])
@pytest.mark.parametrize(
    "approximation",
    [hf.Diagonal(), hf.BlockDiagonal(7), hf.CountSketch(4), hf.LowRank(3), hf.Full()],
    ids=repr,
)
def test_the_penalty_pulls_as_in_the_loss(approximation: hf.Approximation, anchor: str) -> None:
    penalty = penalty_for(mlp((2, 8, 6, 2)).double(), approximation, anchor)
    training = Training(epochs=2, batch_size=20, lr=0.01)
    ours, theirs = trained(training, penalty)
    torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-8, atol=1e-10)
    without, _ = trained(training)
    assert not torch.allclose(flat(ours), flat(without), atol=1e-4)


def test_a_penalty_on_some_parameters_goes_the_general_way() -> None:
    model = mlp((2, 8, 6, 2)).double()
    regularizer = hf.Regularizer(hf.EWC(), hf.Diagonal(), strength=50.0, include=("0.*",))
    data = [(torch.randn(10, 2).double(), torch.randint(0, 2, (10,)))]
    penalty = regularizer.consolidate(model, data, seed=0)
    ours, theirs = trained(Training(epochs=2, batch_size=20, lr=0.01), penalty)
    torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-8, atol=1e-10)


@given(
    widths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    bias=st.booleans(),
    count=st.integers(1, 7),
)
@settings(max_examples=30, deadline=None)
def test_the_written_out_gradient_is_the_gradient(
    widths: list[int], bias: bool, count: int
) -> None:
    torch.manual_seed(count)
    model = mlp((3, *widths, 4), bias=bias).double()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)  # what is there must not survive
    x, y = torch.randn(count, 3).double(), torch.randint(0, 4, (count,))
    gradient = cross_entropy_gradient(model)
    assert "written_out" in gradient.__qualname__
    gradient(x, y)
    expected = torch.autograd.grad(functional.cross_entropy(model(x), y), list(model.parameters()))
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, wanted)


def unusual_models() -> list[nn.Module]:
    twice = nn.Linear(2, 2)
    frozen = mlp((2, 3, 2))
    frozen[0].weight.requires_grad_(False)
    hooked = mlp((2, 3, 2))
    hooked[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    return [
        nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)),
        nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)),
        nn.Sequential(twice, nn.ReLU(), twice),
        nn.Sequential(nn.Linear(2, 3), nn.ReLU()),
        nn.Sequential(nn.Unflatten(1, (1, 2)), nn.Conv1d(1, 2, 1), nn.Flatten(), nn.Linear(4, 2)),
        frozen,
        hooked,
    ]


@pytest.mark.parametrize("index", range(7))
def test_every_other_model_goes_through_autograd(index: int) -> None:
    model = unusual_models()[index]
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = FlatAdam(model, 0.01)
    x, y = torch.randn(5, 2), torch.randint(0, 2, (5,))
    model.eval()
    expected = torch.autograd.grad(functional.cross_entropy(model(x), y), trainable)
    for _ in range(2):  # twice: nothing adds up
        cross_entropy_gradient(model)(x, y)
    for parameter, wanted in zip(trainable, expected, strict=True):
        torch.testing.assert_close(parameter.grad, wanted)
    before = flat(model)
    optimizer.step()
    assert not torch.equal(flat(model), before)


def test_flat_adam_keeps_values_shapes_and_tied_parameters() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU(), nn.Linear(3, 3, bias=False))
    model[2].weight = model[0].weight
    before = model[0].weight.clone()
    optimizer = FlatAdam(model, 0.1)
    assert model[2].weight is model[0].weight
    assert torch.equal(model[0].weight, before)
    assert optimizer.flat is not None
    assert optimizer.flat.shape == (9,)
    with pytest.raises(ValueError, match="no trainable parameter"):
        FlatAdam(nn.ReLU(), 0.1)


def test_parameters_of_two_precisions_are_trained() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.high = nn.Linear(2, 2), nn.Linear(2, 2).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.high(self.low(x).double())

    model = Mixed()
    before = [p.detach().clone() for p in model.parameters()]
    learn(model, small_split(), Training(epochs=1), FlatAdam(model, 0.01), generator=generator())
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_divergence_is_an_error_that_says_what_to_do() -> None:
    model = mlp((2, 8, 2))
    with pytest.raises(FloatingPointError, match=r"diverged in epoch 1.*lower the learning rate"):
        learn(
            model,
            small_split(),
            Training(epochs=2, batch_size=10, lr=1e38),
            FlatAdam(model, 1e38),
            generator=generator(),
        )


def test_accuracies_are_fractions_of_right_answers() -> None:
    model = mlp((2, 8, 2)).train()
    splits = [task.test for task in Toy(test=50).tasks(0)]
    expected = []
    for split in splits:
        right = sum(
            int(model(x.unsqueeze(0)).argmax()) == int(y)
            for x, y in zip(split.inputs, split.labels, strict=True)
        )
        expected.append(right / len(split))
    assert accuracies(model, splits) == expected
    assert accuracies(model, splits, batch_size=7) == expected
    assert model.training


def test_accuracies_use_evaluation_mode_and_change_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.9), nn.Linear(4, 2))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    first = accuracies(model, [small_split()])
    assert first == accuracies(model, [small_split()])
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"epochs": 0}, "epochs is 1 or larger"),
        ({"batch_size": 0}, "batch_size is 1 or larger"),
        ({"lr": 0.0}, "lr is larger than 0"),
        ({"lr": float("nan")}, "lr is larger than 0"),
        ({"reset": "always"}, "unknown reset 'always'; known: never, task, epoch"),
    ],
)
def test_impossible_settings_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(Training(), **fields)  # type: ignore[arg-type]
