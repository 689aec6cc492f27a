"""Which parameters are held: frozen, tied, chosen by name, grown, new, gone."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import holdfast as hf
import kronecker_oracle
import reference
from models_zoo import CASES, Network, PartlyFrozen, Transformer, batches, flat, nudge
from recipes_table import ALL_APPROXIMATIONS, approximate, close, sketched

SEED = 6
FULL = hf.Regularizer(hf.EWC(), hf.Full())


def test_flat_order_is_that_of_named_parameters() -> None:
    model = Network()
    space = hf.ParameterSpace.of(model)
    assert space.names == ("body.weight", "body.bias", "head.weight", "head.bias")
    assert space.shapes == ((3, 4), (3,), (3, 3), (3,))
    assert space.dim == 27
    theta = space.flatten(space.tensors(model))
    assert torch.equal(theta, flat(model))
    for piece, parameter in zip(space.split(theta), model.parameters(), strict=True):
        assert torch.equal(piece, parameter)
    rows = torch.randn(5, 27)
    assert [tuple(p.shape) for p in space.split(rows)] == [(5, 3, 4), (5, 3), (5, 3, 3), (5, 3)]
    assert space.layers == {"body": (0, 15), "head": (15, 27)}


def test_frozen_parameters_are_left_out() -> None:
    space = hf.ParameterSpace.of(PartlyFrozen())
    assert space.names == ("unused", "first.weight", "first.bias", "last.weight")


def test_a_parameter_without_gradient_contributes_zeros() -> None:
    case = CASES["frozen"]
    for name, approximation in ALL_APPROXIMATIONS.items():
        penalty = hf.Regularizer(hf.EWC(), approximation).consolidate(
            case.model(), batches(case.columns(8), 4), seed=SEED
        )
        unused, *others = penalty.space.split(penalty.matrix.diagonal())
        assert penalty.space.names[0] == "unused", name
        assert float(unused.abs().max()) == 0, name
        assert all(float(piece.abs().max()) > 0 for piece in others), name


def test_tied_parameters_are_counted_once() -> None:
    """The gradient of the shared tensor is the sum over its uses; its penalty acts once."""
    model = Transformer(pooled=True).double()
    space = hf.ParameterSpace.of(model)
    assert "embedding.weight" in space.names
    assert "out.weight" not in space.names
    assert space.dim == sum(p.numel() for p in model.parameters())
    x, y = CASES["transformer"].columns(8)
    penalty = FULL.consolidate(model, [(x, y)])
    untied = copy.deepcopy(model)
    untied.out.weight = nn.Parameter(untied.embedding.weight.detach().clone())
    W = reference.rows(untied, (x, y), hf.EWC())
    names = [n for n, _ in untied.named_parameters()]
    sizes = [p.numel() for p in untied.parameters()]
    pieces = dict(zip(names, W.split(sizes, 1), strict=True))
    together = {**pieces, "embedding.weight": pieces["embedding.weight"] + pieces["out.weight"]}
    tied = torch.cat([together[name] for name in space.names], 1)
    close(penalty.matrix.dense(), tied.T @ tied / 8)
    nudge(model, seed=2)
    penalty.add_grad_(model)
    delta = flat(model) - penalty.anchor
    close(model.out.weight.grad.flatten(), (penalty.matrix.dense() @ delta)[:20])


@pytest.mark.parametrize(
    ("include", "exclude", "held"),
    [
        (("body.*",), (), ("body.weight", "body.bias")),
        (("*",), ("head.*",), ("body.weight", "body.bias")),
        (("*.weight",), (), ("body.weight", "head.weight")),
        (("*.weight", "head.bias"), ("body.weight",), ("head.weight", "head.bias")),
        (["head.*"], (), ("head.weight", "head.bias")),
    ],
)
def test_include_and_exclude(include: Any, exclude: Any, held: tuple[str, ...]) -> None:
    """The held block is the whole matrix's; the others get no gradient and are not pulled."""
    case = CASES["mlp"]
    model, columns = case.model(), case.columns(8)
    W = reference.rows(model, columns, hf.EWC(), parameters=held)
    for name, approximation in ALL_APPROXIMATIONS.items():
        recipe = hf.Regularizer(hf.EWC(), approximation, include=include, exclude=exclude)
        penalty = recipe.consolidate(model, batches(columns, 4), seed=SEED)
        assert penalty.space.names == held
        if name != "block_diagonal-layer":  # its borders are those of the held layers
            source = {"columns": columns, "importance": hf.EWC(), "names": held}
            expected = approximate(approximation, W, model, divisor=8, seed=SEED, **source)
            close(penalty.matrix.dense(), expected, 1e-7)
        moved = nudge(copy.deepcopy(model), seed=3)
        penalty.add_grad_(moved)
        assert {n for n, p in moved.named_parameters() if p.grad is not None} == set(held)


@pytest.mark.parametrize("pattern", ["haed.*", "body", "weight"])
def test_a_pattern_that_matches_nothing_is_refused(pattern: str) -> None:
    model = Network()
    for options in ({"include": (pattern,)}, {"exclude": (pattern,)}):
        with pytest.raises(ValueError, match=r"no parameter matches .*body\.weight"):
            hf.ParameterSpace.of(model, **options)


def test_patterns_must_come_in_a_sequence() -> None:
    with pytest.raises(TypeError, match="tuple of patterns"):
        hf.Regularizer(hf.EWC(), hf.Diagonal(), include="head.*")


def test_nothing_to_hold_is_refused() -> None:
    model = Network().requires_grad_(False)
    with pytest.raises(ValueError, match=r"no parameter to hold.*frozen"):
        FULL.consolidate(model, [CASES["mlp"].columns(8)])
    with pytest.raises(ValueError, match="no parameter to hold"):
        hf.ParameterSpace.of(Network(), exclude=("*",))


# Another model than the one that was consolidated.


def _mismatched() -> dict[str, nn.Module]:
    renamed = Network()
    renamed.trunk, renamed.body = renamed.body, None
    return {
        "wider": Network(hidden=5),
        "narrower": Network(outputs=2),
        "inputs": Network(inputs=7),
        "renamed": renamed,
        "without bias": nn.ModuleDict({"body": nn.Linear(4, 3, bias=False), "head": nn.Linear(3, 3)}),
        "foreign": nn.Linear(2, 2),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ("wider", [r"head\.weight: expected shape \(3, 3\), got \(3, 5\)"]),
        ("narrower", [r"head\.weight: expected shape \(3, 3\), got \(2, 3\)", r"head\.bias: "]),
        ("inputs", [r"body\.weight: expected shape \(3, 4\), got \(3, 7\)"]),
        ("renamed", [r"body\.weight: .* no such parameter", r"also has: .*trunk\.weight"]),
        ("without bias", [r"body\.bias: expected shape \(3,\), the model has no such parameter"]),
        ("foreign", [r"body\.weight: ", r"head\.bias: ", r"also has: weight, bias"]),
    ],
)
def test_a_model_that_differs_is_named_parameter_by_parameter(
    other: str, named: list[str]
) -> None:
    case = CASES["mlp"]
    penalty = FULL.consolidate(case.model(), [case.columns(8)])
    model = _mismatched()[other]
    for use in (penalty, penalty.add_grad_):
        with pytest.raises(ValueError, match="does not have the parameters") as caught:
            use(model)
        for pattern in named:
            assert caught.match(pattern)
    assert all(p.grad is None for p in model.parameters())


def test_a_previous_penalty_that_does_not_fit_is_named() -> None:
    case = CASES["mlp"]
    penalty = FULL.consolidate(case.model(), [case.columns(8)])
    narrower = Network(outputs=2).double()
    x, y = case.columns(8)
    with pytest.raises(ValueError, match=r"head\.weight: shape was \(3, 3\), is \(2, 3\)"):
        FULL.consolidate(narrower, [(x, y % 2)], previous=penalty)
    frozen = case.model()
    frozen.body.bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"body\.bias: held before, now frozen, excluded or gone"):
        FULL.consolidate(frozen, [(x, y)], previous=penalty)


# An output layer that grows: old rows are held where they were, new ones are free.


def grow(model: nn.Module, outputs: int) -> nn.Module:
    """A copy with more classes; the old rows of the head are kept."""
    grown = copy.deepcopy(model)
    old = grown.head
    grown.head = nn.Linear(3, outputs).to(old.weight.dtype)
    with torch.no_grad():
        grown.head.weight[: old.out_features] = old.weight
        grown.head.bias[: old.out_features] = old.bias
    return grown


def old_places(grown: nn.Module, old: nn.Module) -> Tensor:
    """Where the entries of the old model are in the flat vector of the grown one, by marking."""
    marked = copy.deepcopy(grown)
    with torch.no_grad():
        for name, parameter in marked.named_parameters():
            before = dict(old.named_parameters()).get(name)
            parameter.zero_()
            if before is not None:
                parameter[: before.shape[0]] = 1
    return flat(marked).nonzero().squeeze(1)


@pytest.mark.parametrize("approximation", ALL_APPROXIMATIONS)
@pytest.mark.parametrize("anchor", ["latest", "each"])
def test_a_grown_output_layer_is_held_in_its_old_rows(approximation: str, anchor: str) -> None:
    case = CASES["mlp"]
    model = case.model()
    recipe = hf.Regularizer(hf.EWC(), ALL_APPROXIMATIONS[approximation], 2.0, anchor=anchor)
    penalty = recipe.consolidate(model, batches(case.columns(8), 4), seed=SEED)
    nudge(model, seed=1)
    grown = grow(model, 5)
    value = penalty(model)
    value.backward()
    found = penalty(grown)
    found.backward()
    assert torch.equal(found, value)
    for (name, old), (_, new) in zip(
        model.named_parameters(), grown.named_parameters(), strict=True
    ):
        close(new.grad[: len(old)], old.grad)
        assert new.grad.shape == new.shape, name
        assert float(new.grad[len(old) :].abs().sum()) == 0, name
    backward = [p.grad.clone() for p in grown.parameters()]
    grown.zero_grad()
    assert torch.equal(penalty.add_grad_(grown), value.detach())
    for p, g in zip(grown.parameters(), backward, strict=True):
        close(p.grad, g)


def in_place(matrix: Tensor, places: Tensor, dim: int) -> Tensor:
    """The old matrix at its places in a larger one."""
    wide = torch.zeros(dim, dim, dtype=torch.float64)
    wide[places[:, None], places] = matrix
    return wide


@pytest.mark.parametrize("approximation", ALL_APPROXIMATIONS)
def test_the_matrix_of_a_grown_model(approximation: str) -> None:
    """The old matrix in its place, plus the new task's."""
    case = CASES["mlp"]
    chosen = ALL_APPROXIMATIONS[approximation]
    recipe = hf.Regularizer(hf.EWC(), chosen, history=hf.Mean())
    old = case.model()
    first = recipe.consolidate(old, batches(case.columns(8), 4), seed=SEED)
    grown = nudge(grow(old, 5), seed=1)
    x, y = case.columns(8, seed=1)
    both = recipe.consolidate(grown, batches((x, y + 2), 4), previous=first, seed=SEED)
    W = reference.rows(grown, (x, y + 2), hf.EWC())
    places, dim = old_places(grown, old), W.shape[1]
    wide = in_place(first.matrix.dense(), places, dim)
    source = {"columns": (x, y + 2), "importance": hf.EWC()}
    new = approximate(chosen, W, grown, divisor=8, seed=SEED, task=1, **source)
    expected = 0.5 * (wide + new)
    match chosen:
        case hf.BlockDiagonal(by="size"):  # what crosses the new borders is dropped
            expected = reference.blocks(expected, [*range(0, dim, 7), dim])
        case hf.CountSketch() | hf.OSNAP() | hf.DenseSketch() | hf.SRHT():  # factors are added
            F = torch.zeros(both.matrix.factor.shape, dtype=torch.float64)
            F[:, places] = first.matrix.factor
            F = F + sketched(chosen, W, seed=SEED, task=1) / 8**0.5
            expected = 0.5 * F.T @ F
        case hf.LowRank(rank=rank, shrink=shrink) if rank < 16:
            expected = reference.best_rank(expected, rank, shrink)
        case hf.DiagonalPlusLowRank(rank=rank, shrink=shrink) if rank < 16:
            # what is dropped from the low rank goes to the diagonal
            assert isinstance(first.matrix, hf.SumMatrix)
            before = in_place(first.matrix.parts[1].dense(), places, dim)
            after = approximate(chosen.low_rank, W, grown, divisor=8, seed=SEED, task=1)
            low = reference.best_rank(0.5 * (before + after), rank, shrink)
            expected = low + (expected.diagonal() - low.diagonal()).diag()
        case hf.Composite(parts=((pattern, hf.LowRank(rank=rank)), _)) if rank < 16:
            at = reference.columns_by_pattern(grown, [pattern, "*"])[0]
            expected[at[:, None], at] = reference.best_rank(expected[at[:, None], at], rank)
        case hf.Nystrom(size=size, seed=own):  # of the old approximation plus the new matrix
            expected = reference.nystrom(0.5 * (wide + W.T @ W / 8), size, own)
        case hf.Kronecker(rank=rank, merge=merge) if rank is not None and merge != "stack":
            whole = hf.Kronecker()
            before = approximate(
                whole,
                reference.rows(old, case.columns(8), hf.EWC()),
                old,
                divisor=8,
                seed=SEED,
                task=0,
                columns=case.columns(8),
                importance=hf.EWC(),
            )
            after = approximate(whole, W, grown, divisor=8, seed=SEED, task=1, **source)
            terms = 0.5 * in_place(before, places, dim), 0.5 * after
            expected = kronecker_oracle.merged_thin(chosen, *terms, grown)
        case hf.Kronecker():
            expected = kronecker_oracle.merged(chosen, expected, grown)
        case hf.KroneckerPlusLowRank(rank=rank, correction=correction) if rank < 16:
            assert isinstance(first.matrix, hf.SumMatrix)
            products, low = (in_place(part.dense(), places, dim) for part in first.matrix.parts)
            after = approximate(chosen.low_rank, W, grown, divisor=8, seed=SEED, task=1)
            expected = kronecker_oracle.merged_plus_low_rank(
                correction,
                rank,
                (0.5 * products, 0.5 * (new - after)),
                (0.5 * low, 0.5 * after),
                kronecker_oracle.places(grown),
            )
    close(both.matrix.dense(), expected)
    assert both.space == hf.ParameterSpace.of(grown)


@pytest.mark.parametrize(
    "approximation",
    ["diagonal", "block_diagonal-layer", "low_rank-exact", "full-dense", "full-factored"],
)
@pytest.mark.parametrize("anchor", ["latest", "each"])
def test_the_value_on_a_grown_model(approximation: str, anchor: str) -> None:
    """The old task pulls its old rows to where they were, or to where they are."""
    case = CASES["mlp"]
    recipe = hf.Regularizer(hf.EWC(), ALL_APPROXIMATIONS[approximation], 2.0, anchor=anchor)
    old = case.model()
    first = recipe.consolidate(old, batches(case.columns(8), 4))
    grown = nudge(grow(old, 5), seed=1)
    data = batches(case.columns(8, seed=1), 4)
    both = recipe.consolidate(grown, data, previous=first)
    new = recipe.consolidate(grown, data)
    places, here = old_places(grown, old), flat(grown)
    wide = in_place(first.matrix.dense(), places, len(here))
    start = here.clone()
    if anchor == "each":
        start[places] = flat(old)
    probe = nudge(copy.deepcopy(grown), seed=2)
    value = reference.quadratic(wide, flat(probe), start, 2.0)
    value = value + reference.quadratic(new.matrix.dense(), flat(probe), here, 2.0)
    close(both(probe).detach(), value)


def test_growing_twice_with_each_anchor() -> None:
    """Three heads, three anchors: the sum of the separate penalties, exactly."""
    case = CASES["mlp"]
    for approximation in (hf.Diagonal(), hf.Full(form="dense"), hf.Full(form="factored")):
        recipe = hf.Regularizer(hf.EWC(), approximation, 2.0, anchor="each")
        alone = hf.Regularizer(hf.EWC(), approximation, 2.0)
        model, penalty, separate = case.model(), None, []
        for outputs in (3, 4, 6):
            model = nudge(grow(model, outputs), seed=outputs)
            data = [case.columns(8, seed=outputs)]
            penalty = recipe.consolidate(model, data, previous=penalty)
            separate.append(alone.consolidate(model, data))
        assert penalty is not None
        probe = nudge(model, seed=9)
        total = sum(part(probe).detach() for part in separate)
        close(penalty(probe).detach(), torch.as_tensor(total))


def test_parameters_that_are_new() -> None:
    """A module added later is free; consolidating holds it from then on."""
    case = CASES["mlp"]
    model = case.model()
    first = FULL.consolidate(model, [case.columns(8)])
    larger = copy.deepcopy(model)
    larger.adapter = nn.Linear(3, 3).double()
    assert torch.equal(first(larger), first(model))
    first.add_grad_(larger)
    assert larger.adapter.weight.grad is None

    def forward(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return model.adapter(model(batch[0]))

    columns = case.columns(8, seed=1)
    both = FULL.consolidate(larger, [columns], previous=first, forward=forward)
    W = reference.rows(larger, columns, hf.EWC(), forward=forward)
    expected = W.T @ W / 8
    expected[:27, :27] += first.matrix.dense()
    close(both.matrix.dense(), expected)


def test_an_embedding_that_grows() -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Flatten(), nn.Linear(6, 2)).double()
    ids, y = torch.randint(4, (8, 2)), torch.randint(2, (8,))
    penalty = FULL.consolidate(model, [(ids, y)])
    grown = copy.deepcopy(model)
    grown[0] = nn.Embedding(7, 3).double()
    with torch.no_grad():
        grown[0].weight[:4] = model[0].weight
    assert float(penalty(grown).detach()) == 0
    nudge(grown)
    assert float(penalty(grown).detach()) > 0
    penalty.add_grad_(grown)
    assert float(grown[0].weight.grad[4:].abs().sum()) == 0


def test_a_scalar_parameter() -> None:
    model = nn.Linear(2, 2).double()
    model.temperature = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return model(batch[0]) * model.temperature

    x, y = torch.randn(6, 2, dtype=torch.float64), torch.randint(2, (6,))
    W = reference.rows(model, (x, y), hf.EWC(), forward=forward)
    penalty = FULL.consolidate(model, [(x, y)], forward=forward)
    close(penalty.matrix.dense(), W.T @ W / 6)
    nudge(model)
    penalty.add_grad_(model)
    assert model.temperature.grad.shape == ()


def test_layers_of_nested_modules() -> None:
    model = nn.Sequential(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False)), nn.Linear(2, 1)
    )
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    space = hf.ParameterSpace.of(model)
    assert space.layers == {"": (0, 1), "0.0": (1, 7), "0.1": (7, 11), "1": (11, 14)}
