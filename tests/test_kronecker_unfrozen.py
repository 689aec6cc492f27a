"""Parameters that are freed between tasks: a layer's product gets a column, or its weight."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import holdfast as hf
import kronecker_oracle as oracle
from models_zoo import batches, flat, nudge
from recipes_table import close
from test_kronecker import expected, inputs, oracle_or_stack

FORMS = list(itertools.product(["none", "eigen"], ["average", "nearest", "stack"]))
forms = pytest.mark.parametrize(("correction", "merge"), FORMS)


class Grouped(nn.Module):
    """A convolution in groups and a linear layer, both with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv1d(4, 4, 2, groups=2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1).tanh())


def tasks(frozen: tuple[str, ...]) -> tuple[nn.Module, nn.Module]:
    """A network with frozen parameters, and the same one later, when nothing is frozen any more."""
    torch.manual_seed(3)
    first = Grouped().double()
    second = nudge(copy.deepcopy(first), seed=1)
    for name in frozen:
        first.get_parameter(name).requires_grad_(False)
        with torch.no_grad():
            second.get_parameter(name).copy_(first.get_parameter(name))
    return first, second


def held_in(second: nn.Module, first: nn.Module) -> Tensor:
    """Where the entries held first are among those held later."""
    now = {n: p.numel() for n, p in second.named_parameters() if p.requires_grad}
    before = {n for n, p in first.named_parameters() if p.requires_grad}
    return torch.cat([torch.full((size,), name in before) for name, size in now.items()])


@forms
@pytest.mark.parametrize("anchor", ["latest", "each"])
@pytest.mark.parametrize(
    "frozen", [("body.bias",), ("body.bias", "head.bias"), ("head.weight",), ("body.weight",)]
)
def test_what_was_frozen_is_held_by_the_later_task_alone(
    frozen: tuple[str, ...], anchor: str, correction: str, merge: str
) -> None:
    """The old matrix is zero there; a diagonal of biases is a product too."""
    first, second = tasks(frozen)
    columns, later = inputs(4, 3), inputs(4, 3)
    approximation = hf.Kronecker(correction=correction, merge=merge)
    recipe = hf.Regularizer(hf.EWC(), approximation, anchor=anchor)
    start = recipe.consolidate(first, batches(columns, 4), seed=0)
    both = recipe.consolidate(second, batches(later, 4), previous=start, seed=0)
    held = held_in(second, first)
    new = expected(second, later, approximation)
    old = torch.zeros_like(new)
    old[held.nonzero(), held.nonzero().T] = start.matrix.dense()
    if (correction, merge) != ("eigen", "nearest"):  # which the sum alone does not say
        close(both.matrix.dense(), oracle.merged(approximation, old + new, second), 1e-8)
    for probe in (first, second, nudge(copy.deepcopy(second), seed=2)):
        assert float(both(probe).detach()) >= -1e-12
    if anchor == "each" and merge == "stack":
        probe = nudge(copy.deepcopy(second), seed=2)
        before, now = flat(probe) - flat_all(first), flat(probe) - flat(second)
        close(both(probe).detach(), 0.5 * (before @ old @ before + now @ new @ now), 1e-8)


def flat_all(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@forms
def test_outputs_and_a_bias_at_once(correction: str, merge: str) -> None:
    small, columns = nn.Linear(4, 3).double(), inputs(4)
    small.bias.requires_grad_(False)
    approximation = hf.Kronecker(correction=correction, merge=merge)
    recipe = hf.Regularizer(hf.EWC(), approximation)
    first = recipe.consolidate(small, [columns], seed=0)
    large = nn.Linear(4, 5).double()
    both = recipe.consolidate(large, [columns], previous=first, seed=0).matrix.dense()
    new = expected(large, columns, approximation)
    old = torch.zeros_like(new)
    old[:12, :12] = first.matrix.dense()
    close(both, oracle_or_stack(approximation, old, new, large), 1e-8)


def test_with_a_low_rank_and_in_a_composite() -> None:
    first, second = tasks(("body.bias",))
    columns = inputs(4, 3)
    recipes: dict[str, hf.Approximation] = {
        "plus": hf.KroneckerPlusLowRank(rank=2, group=1, merge="stack"),
        "part": hf.Composite({"body.*": hf.Kronecker(merge="stack"), "*": hf.Diagonal()}),
    }
    for approximation in recipes.values():
        recipe = hf.Regularizer(hf.EWC(), approximation)
        start = recipe.consolidate(first, [columns], seed=0)
        both = recipe.consolidate(second, [columns], previous=start, seed=1)
        alone = recipe.consolidate(second, [columns], seed=2)
        close(both.matrix.trace(), start.matrix.trace() + alone.matrix.trace(), 1e-8)


def refusal(first: nn.Module, second: nn.Module, shape: tuple[int, ...], **how: Any) -> str:
    recipe = hf.Regularizer(hf.EWC(), hf.Kronecker(), **how)
    start = recipe.consolidate(first, [inputs(*shape)], seed=0)
    with pytest.raises(ValueError, match="consolidate without previous=") as error:
        recipe.consolidate(second, [inputs(*shape)], previous=start, seed=0)
    return str(error.value)


def test_layers_that_cannot_be_added_are_named() -> None:
    """And it is said what to do."""

    class Images(nn.Module):
        def __init__(self, groups: int) -> None:
            super().__init__()
            self.body = nn.Conv1d(2 * groups, 4, 2, groups=groups)
            self.head, self.repeat = nn.Linear(8, 3), groups

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x.repeat(1, self.repeat, 1)).flatten(1).tanh())

    said = refusal(Images(1).double(), Images(2).double(), (2, 3))
    assert "the layer body was 4 x 5 with its bias and is 2 groups of 2 x 5 with its bias" in said
    assert "Diagonal()" in said

    class Own(nn.Module):
        """What a linear layer does, in another class."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))
            self.bias = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.T + self.bias

    layers = nn.Sequential(nn.Linear(4, 3)).double(), nn.Sequential(Own()).double()
    for first, second in (layers, layers[::-1]):
        said = refusal(first, second, (4,))
        assert "the layer 0 is a matrix of its own in one of the two tasks" in said
        assert "has a diagonal in the other" in said
    assert oracle.places(layers[1]) == {}
