"""penalty(model) and penalty.add_grad_(model) against autograd of the dense formula."""

import copy
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import holdfast as hf
import reference
from holdfast.gradients import VectorisationWarning
from models_zoo import CASES, Network, batches, flat, nudge
from recipes_table import ALL_APPROXIMATIONS, close

STRENGTH = 3.0
SEED = 1


def consolidated(
    case: str, approximation: hf.Approximation, anchor: str = "latest", dtype: object = None
) -> tuple[hf.Penalty, nn.Module]:
    """A penalty (of two tasks for several anchors), and the model moved away from it."""
    recipe = hf.Regularizer(hf.EWC(), approximation, STRENGTH, anchor=anchor)
    model, penalty = CASES[case].model(), None
    for k in range(2 if anchor == "each" else 1):
        nudge(model, seed=k)
        data = batches(CASES[case].columns(8, seed=k), 4)
        penalty = recipe.consolidate(model, data, previous=penalty, seed=SEED)
    assert penalty is not None
    return penalty, nudge(copy.deepcopy(model), seed=9)


def dense(penalty: hf.Penalty, theta: Tensor) -> Tensor:
    """The formula in dense float64 algebra: ½λ(δᵀΩδ + 2bᵀδ + k), or ½λ‖Fδ + e‖²."""
    delta = theta - penalty.anchor.double()
    return 0.5 * penalty.strength * q(penalty.matrix, delta, [o.double() for o in penalty.offset])


def q(matrix: hf.PSDMatrix, delta: Tensor, offset: list[Tensor]) -> Tensor:
    """The quadratic function; takes its own tensors from the front of ``offset``."""
    match matrix:
        case hf.SumMatrix(parts=parts):
            return sum((q(part, delta, offset) for part in parts), torch.zeros(()))
        case hf.PartsMatrix(parts=parts):
            pieces = zip(parts, matrix.entries(), strict=True)
            return sum((q(part, delta[at], offset) for part, at in pieces), torch.zeros(()))
        case hf.FactoredMatrix(factor=factor):
            e = offset.pop(0) if offset else 0
            return (factor.double() @ delta + e).square().sum()
    b, k = (offset.pop(0), offset.pop(0)) if offset else (0 * delta, torch.zeros(()))
    return delta @ matrix.dense().double() @ delta + 2 * b @ delta + k


def numbers(matrix: hf.PSDMatrix) -> list[Tensor]:
    """The stored tensors without those that say where things are."""
    return [t for t in matrix.tensors.values() if t.dtype != torch.int64]


def expected(penalty: hf.Penalty, model: nn.Module) -> tuple[Tensor, Tensor]:
    theta = flat(model, penalty.space.names).double().requires_grad_()
    value = dense(penalty, theta)
    (gradient,) = torch.autograd.grad(value, theta)
    return value.detach(), gradient


def gradients(model: nn.Module, names: tuple[str, ...]) -> Tensor:
    named = dict(model.named_parameters())
    return torch.cat([named[name].grad.flatten().double() for name in names])


def check(penalty: hf.Penalty, model: nn.Module, relative: float = 1e-10) -> None:
    """Both ways to value and gradient."""
    value, gradient = expected(penalty, model)
    for p in model.parameters():
        p.grad = None
    found = penalty(model)
    assert found.shape == ()
    close(found.detach(), value, relative)
    found.backward()
    close(gradients(model, penalty.space.names), gradient, relative)
    for p in model.parameters():
        p.grad = None
    added = penalty.add_grad_(model)
    assert added.shape == ()
    assert not added.requires_grad
    close(added, value, relative)
    close(gradients(model, penalty.space.names), gradient, relative)


@pytest.mark.parametrize("case", ["mlp", "conv", "transformer", "frozen"])
@pytest.mark.parametrize("approximation", ALL_APPROXIMATIONS)
@pytest.mark.parametrize("anchor", ["latest", "each"])
def test_the_dense_formula(case: str, approximation: str, anchor: str) -> None:
    penalty, model = consolidated(case, ALL_APPROXIMATIONS[approximation], anchor)
    check(penalty, model)
    assert bool(penalty.offset) == (anchor == "each")


@pytest.mark.parametrize("approximation", ALL_APPROXIMATIONS)
def test_zero_at_the_anchor_and_never_negative(approximation: str) -> None:
    penalty, model = consolidated("mlp", ALL_APPROXIMATIONS[approximation])
    assert float(penalty(model).detach()) > 0
    with torch.no_grad():
        for p, a in zip(model.parameters(), penalty.space.split(penalty.anchor), strict=True):
            p.copy_(a)
    assert float(penalty(model).detach()) == 0


@pytest.mark.parametrize(
    ("dtype", "relative"),
    [(torch.float32, 1e-4), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)],
)
@pytest.mark.parametrize("approximation", ALL_APPROXIMATIONS)
def test_other_precisions_of_the_model(
    approximation: str, dtype: torch.dtype, relative: float
) -> None:
    """Consolidated and evaluated in that precision; arithmetic is float32, gradients are rounded."""
    case = CASES["mlp"]
    model = case.model().to(dtype)
    x, y = case.columns(8)
    recipe = hf.Regularizer(hf.EWC(), ALL_APPROXIMATIONS[approximation], STRENGTH)
    penalty = recipe.consolidate(model, [(x.to(dtype), y)], seed=SEED)
    assert penalty.anchor.dtype == torch.float32
    assert {t.dtype for t in numbers(penalty.matrix)} == {torch.float32}
    nudge(model, seed=9)
    check(penalty, model, relative)
    assert penalty(model).dtype == torch.float32
    assert {p.grad.dtype for p in model.parameters()} == {dtype}


def test_a_double_precision_model_gives_a_double_precision_penalty() -> None:
    for approximation in ALL_APPROXIMATIONS.values():
        penalty, model = consolidated("mlp", approximation)
        assert penalty.anchor.dtype == torch.float64
        assert {t.dtype for t in numbers(penalty.matrix)} == {torch.float64}
        assert penalty(model).dtype == torch.float64


def test_a_model_of_two_precisions_is_held_in_the_wider() -> None:
    model = Network()
    model.head.double()

    def forward(model: Network, batch: tuple[Tensor, ...]) -> Tensor:
        return model.head(model.body(batch[0]).tanh().double())

    x, y = CASES["mlp"].columns(8)
    for approximation in ALL_APPROXIMATIONS.values():
        recipe = hf.Regularizer(hf.EWC(), approximation, STRENGTH)
        penalty = recipe.consolidate(model, [(x.float(), y)], forward=forward, seed=SEED)
        assert penalty.matrix.dense().dtype == torch.float64
        check(penalty, nudge(copy.deepcopy(model), seed=3), 1e-6)


@pytest.mark.parametrize("approximation", ALL_APPROXIMATIONS)
@pytest.mark.parametrize("anchor", ["latest", "each"])
def test_stored_in_bfloat16(approximation: str, anchor: str) -> None:
    """Entries are off by at most 2⁻⁸, so the value by about twice that; and ½ or less the bytes."""
    penalty, model = consolidated("mlp", ALL_APPROXIMATIONS[approximation], anchor)
    small = penalty.to(dtype=torch.bfloat16)
    before = sum(t.nbytes for t in numbers(penalty.matrix))
    assert sum(t.nbytes for t in numbers(small.matrix)) * 4 == before
    assert small.anchor.dtype == penalty.anchor.dtype
    check(small, model, 1e-6)  # its own matrix, in float32
    # with several anchors a small value may be the difference of large ones
    delta = flat(model, penalty.space.names).double() - penalty.anchor.double()
    scale = 0.5 * STRENGTH * float(penalty.matrix.quadratic(delta))
    exact, found = float(penalty(model).detach()), float(small(model).detach())
    assert abs(found - exact) <= 0.03 * max(exact, scale)


@pytest.mark.parametrize("name", ["count_sketch", "count_sketch-copies", "low_rank-exact"])
def test_stored_in_int8(name: str) -> None:
    """A scale per row: entries are off by half of 1/127 of the largest of their row."""
    penalty, model = consolidated("transformer", ALL_APPROXIMATIONS[name])
    small = penalty.to(dtype=torch.int8)
    rows = len(penalty.matrix.factor)
    assert small.matrix.nbytes == penalty.matrix.nbytes // 8 + 8 * rows
    check(small, model, 1e-6)
    largest = penalty.matrix.factor.abs().amax(1, keepdim=True)
    assert ((small.matrix.factor - penalty.matrix.factor).abs() <= 0.51 / 127 * largest).all()
    close(small(model).detach(), penalty(model).detach(), 0.1)


def test_history_continues_from_a_stored_precision() -> None:
    for approximation in (hf.CountSketch(size=3), hf.LowRank(rank=3), hf.Diagonal(), hf.Full()):
        recipe = hf.Regularizer(hf.EWC(), approximation, anchor="each")
        case = CASES["mlp"]
        model = case.model()
        first = recipe.consolidate(model, [case.columns(8)], seed=SEED)
        dtype = torch.int8 if isinstance(first.matrix, hf.FactoredMatrix) else torch.bfloat16
        nudge(model, seed=4)
        data = [case.columns(8, seed=1)]
        exact = recipe.consolidate(model, data, previous=first, seed=SEED)
        rounded = recipe.consolidate(model, data, previous=first.to(dtype=dtype), seed=SEED)
        nudge(model, seed=5)
        close(rounded(model).detach(), exact(model).detach(), 0.05)


def test_a_penalty_of_another_precision_than_the_model() -> None:
    penalty, model = consolidated("mlp", hf.CountSketch(size=3))
    check(penalty, model.float(), 1e-5)
    single = CASES["mlp"].model().float()
    x, y = CASES["mlp"].columns(8)
    made = hf.Regularizer(hf.EWC(), hf.CountSketch(size=3)).consolidate(single, [(x.float(), y)])
    check(made, nudge(single.double(), seed=2), 1e-7)


@pytest.mark.parametrize("approximation", ["diagonal", "count_sketch", "block_diagonal-layer"])
def test_small_products_times_a_large_strength_survive_half_precision(approximation: str) -> None:
    """Ωδ below the smallest half-precision number, λΩδ well above it: scaled before rounding."""
    model = CASES["mlp"].model().half()
    x, y = CASES["mlp"].columns(8)
    recipe = hf.Regularizer(hf.EWC(), ALL_APPROXIMATIONS[approximation], strength=1e9)
    penalty = recipe.consolidate(
        model,
        [(x.half(), y)],
        loss=lambda z, b: 1e-5 * nn.functional.cross_entropy(z, b[1], reduction="none"),
        seed=SEED,
    )
    nudge(model, seed=9)
    check(penalty, model, 5e-3)


def test_gradients_are_added_to_what_is_there() -> None:
    penalty, model = consolidated("mlp", hf.CountSketch(size=3))
    x, y = CASES["mlp"].columns(8)

    def loss() -> Tensor:
        return nn.functional.cross_entropy(model(x), y)

    (loss() + penalty(model)).backward()
    together = gradients(model, penalty.space.names)
    model.zero_grad()
    loss().backward()
    kept = [p.grad for p in model.parameters()]
    penalty.add_grad_(model)
    close(gradients(model, penalty.space.names), together, 1e-12)
    assert all(p.grad is g for p, g in zip(model.parameters(), kept, strict=True))


def test_gradients_are_created_where_there_are_none() -> None:
    penalty, model = consolidated("mlp", hf.Diagonal())
    model.head.bias.grad = torch.ones_like(model.head.bias)
    _, gradient = expected(penalty, model)
    penalty.add_grad_(model)
    found = gradients(model, penalty.space.names)
    gradient[-3:] += 1
    close(found, gradient)


@pytest.mark.parametrize("name", ["diagonal", "count_sketch", "full-dense"])
def test_what_is_frozen_later_gets_no_gradient(name: str) -> None:
    """It still counts in the value: the others are pulled by where it stands."""
    penalty, model = consolidated("mlp", ALL_APPROXIMATIONS[name])
    value, gradient = expected(penalty, model)
    model.body.weight.requires_grad_(False)
    rest = gradient[model.body.weight.numel() :]
    for step in (lambda: penalty(model).backward(), lambda: penalty.add_grad_(model)):
        model.zero_grad()
        step()
        assert model.body.weight.grad is None
        close(gradients(model, penalty.space.names[1:]), rest)
    close(penalty(model).detach(), value)


def test_a_model_that_is_frozen_whole() -> None:
    penalty, model = consolidated("mlp", hf.CountSketch(size=3))
    value, _ = expected(penalty, model)
    model.requires_grad_(False)
    close(penalty.add_grad_(model), value)
    assert not penalty(model).requires_grad
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's, before it gives up
def test_sparse_gradients_of_an_embedding() -> None:
    """The penalty's gradient is dense, and so is the sum."""
    model = nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Flatten(), nn.Linear(6, 2)).double()
    ids, y = torch.randint(6, (8, 2)), torch.randint(2, (8,))
    W = reference.rows(
        nn.Sequential(nn.Embedding.from_pretrained(model[0].weight, False), *model[1:]),
        (ids, y),
        hf.EWC(),
    )
    for approximation in (hf.Full(), hf.LowRank(rank=8), hf.BlockDiagonal(size=32)):
        with pytest.warns(VectorisationWarning):
            penalty = hf.Regularizer(hf.EWC(), approximation).consolidate(model, [(ids, y)])
        close(penalty.matrix.dense(), W.T @ W / 8)
    nudge(model, seed=1)
    nn.functional.cross_entropy(model(ids), y).backward()
    task = model[0].weight.grad.to_dense().clone()
    penalty.add_grad_(model)
    _, gradient = expected(penalty, model)
    close(model[0].weight.grad.flatten() - task.flatten(), gradient[:18])


@pytest.mark.parametrize("name", ["diagonal", "block_diagonal-size", "count_sketch", "full-dense"])
def test_autocast_changes_nothing(name: str) -> None:
    case = CASES["mlp"]
    model = case.model().float()
    x, y = case.columns(8)
    recipe = hf.Regularizer(hf.EWC(), ALL_APPROXIMATIONS[name], STRENGTH, anchor="each")
    first = recipe.consolidate(model, [(x.float(), y)], seed=SEED)
    penalty = recipe.consolidate(nudge(model), [(x.float(), y)], previous=first, seed=SEED)
    nudge(model, seed=9)
    plain = penalty(model)
    plain.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = penalty(model)
        inside.backward()
    assert torch.equal(inside, plain)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    model.zero_grad()
    added = penalty.add_grad_(model)
    outside = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(penalty.add_grad_(model), added)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), outside, strict=True))


def test_no_graph_where_none_is_wanted() -> None:
    penalty, model = consolidated("mlp", hf.CountSketch(size=3))
    value = penalty(model)
    assert value.requires_grad
    with torch.no_grad():
        assert not penalty(model).requires_grad
        close(penalty.add_grad_(model), value.detach())
    with torch.inference_mode():
        close(penalty(model), value.detach())


def test_differentiable_in_the_parameters_alone() -> None:
    penalty, model = consolidated("mlp", hf.CountSketch(size=3))
    stored = (*penalty.matrix.tensors.values(), penalty.anchor, *penalty.offset)
    assert not any(t.requires_grad for t in stored)
    before = [t.clone() for t in stored]
    (7 * penalty(model)).backward()
    _, gradient = expected(penalty, model)
    close(gradients(model, penalty.space.names), 7 * gradient)
    assert all(torch.equal(a, b) for a, b in zip(stored, before, strict=True))


@pytest.mark.parametrize("name", ["diagonal", "count_sketch", "full-dense"])
@pytest.mark.parametrize("anchor", ["latest", "each"])
def test_second_derivatives(name: str, anchor: str) -> None:
    """Hessian-vector products see λΩ; a graph through the gradient is what autograd would make."""
    penalty, model = consolidated("mlp", ALL_APPROXIMATIONS[name], anchor)
    parameters = list(model.parameters())
    v = torch.randn(penalty.space.dim, dtype=torch.float64)
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    first = torch.autograd.grad(scale * penalty(model), parameters, create_graph=True)
    slope = torch.cat([g.flatten() for g in first]) @ v
    *second, by_scale = torch.autograd.grad(slope, [*parameters, scale])
    product = STRENGTH * penalty.matrix.dense() @ v
    close(torch.cat([g.flatten() for g in second]), 2 * product)
    close(by_scale, expected(penalty, model)[1] @ v)


def test_with_strength() -> None:
    penalty, model = consolidated("mlp", hf.CountSketch(size=3))
    stronger = penalty.with_strength(30.0)
    assert (penalty.strength, stronger.strength) == (STRENGTH, 30.0)
    close(stronger(model).detach(), 10 * penalty(model).detach())
    check(stronger, model)
    assert stronger.matrix is penalty.matrix  # shared, not copied
    assert stronger.tasks == penalty.tasks
    assert float(penalty.with_strength(0)(model).detach()) == 0
    for bad in (-1.0, math.inf, math.nan, "1", True, None):
        with pytest.raises(ValueError, match="strength must be a finite number"):
            penalty.with_strength(bad)


def test_learning_with_the_penalty_holds_the_parameters() -> None:
    """Gradient descent on a strong penalty alone returns to the anchor along every held direction."""
    penalty, model = consolidated("mlp", hf.Full())
    delta = flat(model) - penalty.anchor
    largest = float(torch.linalg.eigvalsh(penalty.matrix.dense())[-1])
    optimiser = torch.optim.SGD(model.parameters(), lr=1 / (STRENGTH * largest))
    start = float(penalty(model).detach())
    for _ in range(300):
        optimiser.zero_grad()
        penalty.add_grad_(model)
        optimiser.step()
    assert float(penalty(model).detach()) < 0.02 * start
    assert float((flat(model) - penalty.anchor).norm()) < float(delta.norm())


@pytest.fixture
def process_group(tmp_path: object) -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["diagonal", "count_sketch", "low_rank-exact"])
def test_wrapped_models(name: str, process_group: None) -> None:
    """A penalty made on one works on the other, whichever way around."""
    case = CASES["mlp"]
    plain = case.model()
    recipe = hf.Regularizer(hf.EWC(), ALL_APPROXIMATIONS[name], STRENGTH)
    data = batches(case.columns(8), 4)
    penalty = recipe.consolidate(plain, data, seed=SEED)
    wrapped = {
        "DataParallel": nn.DataParallel(plain),
        "DDP": nn.parallel.DistributedDataParallel(plain),
        "compiled": torch.compile(plain, backend="eager"),
        "compiled inside": nn.DataParallel(torch.compile(plain, backend="eager")),
        "DDP of compiled": nn.parallel.DistributedDataParallel(
            torch.compile(plain, backend="eager")
        ),
    }
    for wrapper in wrapped.values():
        made = recipe.consolidate(wrapper, data, seed=SEED)
        assert made.space == penalty.space
        assert torch.equal(made.matrix.dense(), penalty.matrix.dense())
        assert torch.equal(made.anchor, penalty.anchor)
        again = recipe.consolidate(wrapper, data, previous=made, seed=SEED)
        assert again.space == penalty.space
    moved = nudge(plain, seed=9)
    value = penalty(moved)
    for wrapper in wrapped.values():
        assert torch.equal(penalty(wrapper), value)
        moved.zero_grad()
        assert torch.equal(penalty.add_grad_(wrapper), value.detach())
        assert all(p.grad is not None for p in moved.parameters())


def test_a_compiled_part_of_a_model() -> None:
    case = CASES["mlp"]
    plain, partly = case.model(), case.model()
    partly.head = torch.compile(partly.head, backend="eager")
    recipe = hf.Regularizer(hf.EWC(), hf.CountSketch(size=3))
    penalty = recipe.consolidate(plain, [case.columns(8)], seed=SEED)
    made = recipe.consolidate(
        partly,
        [case.columns(8)],
        seed=SEED,
        forward=lambda model, batch: model.head._orig_mod(model.body(batch[0]).tanh()),
    )
    assert made.space == penalty.space
    close(made.matrix.dense(), penalty.matrix.dense())
    nudge(partly, seed=2)
    nudge(plain, seed=2)
    close(penalty(partly).detach(), made(plain).detach())
    made.add_grad_(partly)
    assert partly.head._orig_mod.weight.grad is not None
