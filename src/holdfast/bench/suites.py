"""What is measured: the penalty, a step with it, consolidation, memory, growth."""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from holdfast.adam import FlatAdam
from holdfast.approximation import Approximation, CountSketch, Diagonal, Kronecker, LowRank
from holdfast.backpropagation import cross_entropy_gradient
from holdfast.bench.measuring import (
    Measurement,
    Ratio,
    exponent,
    freed_memory_kept,
    peak_bytes,
    ratio,
)
from holdfast.importance import EWC
from holdfast.matrices import FactoredMatrix
from holdfast.parameters import ParameterSpace
from holdfast.penalised_step import penalised
from holdfast.penalty import Penalty
from holdfast.regularizer import Regularizer

__all__ = ["SUITES"]


_SIZES = (784, 1024, 512, 256, 10)  # permuted MNIST
_KRONECKER = (  # what it is called, rank, precision
    ("Kronecker", None, torch.float32),
    ("Kronecker", None, torch.bfloat16),
    ("Kronecker of rank 64", 64, torch.float32),
)


def perceptron(sizes: Sequence[int] = _SIZES) -> nn.Sequential:
    """The network of the permuted-MNIST experiments."""
    from holdfast.models import mlp

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return mlp(sizes, bias=False)


class _Work:
    """A network with random data of the right shape, and one plain epoch over them."""

    def __init__(
        self, model: nn.Module, shape: tuple[int, ...], examples: int, batch: int
    ) -> None:
        draw = torch.Generator().manual_seed(0)
        x = torch.rand((examples, *shape), generator=draw)
        y = torch.randint(10, (examples,), generator=draw)
        self.model, self.batch = model.eval(), batch
        self.data = list(zip(torch.split(x, batch), torch.split(y, batch), strict=True))

    def epoch(self) -> None:
        """Forward and backward over every batch, as plain training does."""
        for x, y in self.data:
            self.model.zero_grad()
            torch.autograd.backward(functional.cross_entropy(self.model(x), y))
        self.model.zero_grad()

    def train(self) -> None:
        """Train for an epoch, which takes memory for gradients, activations and Adam; nothing moves."""
        optimizer = torch.optim.Adam(self.model.parameters(), 0.0, fused=True)
        for x, y in self.data:
            optimizer.zero_grad()
            torch.autograd.backward(functional.cross_entropy(self.model(x), y))
            optimizer.step()
        self.model.zero_grad()

    def consolidate(self, approximation: Approximation) -> Penalty:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            recipe = Regularizer(EWC(), approximation)
            return recipe.consolidate(self.model, self.data, seed=0, progress=False)


def _factored(model: nn.Module, t: int, dtype: torch.dtype = torch.float32) -> Penalty:
    space = ParameterSpace.of(model)
    anchor = space.flatten([p.detach() for p in space.tensors(model)]) + 0.01
    rows = torch.randn(t, space.dim, generator=torch.Generator().manual_seed(0))
    return Penalty(space, FactoredMatrix(rows).to(dtype=dtype), anchor, 1e-3)


def _resnet() -> nn.Module:
    from holdfast.models import WideResNet

    return WideResNet(classes=10).build(0)


def penalty_suite(pairs: int, quick: bool) -> Iterator[Measurement]:
    """Value and gradient together, in units of one float32 read of the factor."""
    model = perceptron((784, 64, 10) if quick else _SIZES)
    plain = _factored(model, 50)
    F, v = plain.matrix.tensors["rows"], torch.randn(plain.space.dim)
    exact = float(plain(model).detach())
    for dtype, target in ((torch.float32, 2.1), (torch.bfloat16, 1.4), (torch.int8, 1.0)):
        penalty = plain.to(dtype=dtype)
        found = ratio(partial(torch.mv, F, v), partial(penalty.add_grad_, model), pairs)
        change = abs(float(penalty(model).detach()) / exact - 1)
        name = str(dtype).removeprefix("torch.")
        note = "" if dtype == torch.float32 else f"storage changes the penalty by {change:.1e}"
        yield _line("penalty", f"add_grad_, {name} / one float32 read", found, target, note)


def step_suite(pairs: int, quick: bool) -> Iterator[Measurement]:
    """A training step with the sketched penalty, in units of a plain one."""
    targets = {torch.float32: 3.6, torch.bfloat16: 2.8, torch.int8: 2.3}
    work = perceptron, (100, 784), targets, 4 * pairs  # milliseconds each
    yield from _steps("MLP, batch 100", *work)
    yield from _own_steps("MLP, batch 100", *work)
    if not quick:
        yield from _steps(
            "WRN-16-4, batch 64", _resnet, (64, 3, 32, 32), {torch.float32: 1.1}, pairs
        )


def _steps(
    name: str,
    build: Callable[[], nn.Module],
    shape: tuple[int, ...],
    targets: dict[torch.dtype, float],
    pairs: int,
) -> Iterator[Measurement]:
    """In anyone's loop: ``add_grad_`` between ``backward`` and a fused Adam."""
    x, y = torch.rand(shape), torch.randint(10, (shape[0],))
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), 1e-5, fused=True)

    def step(penalty: Penalty | None) -> None:
        optimizer.zero_grad()
        torch.autograd.backward(functional.cross_entropy(model(x), y))
        if penalty is not None:
            penalty.add_grad_(model)
        optimizer.step()

    plain = _factored(model, 50)
    for dtype, target in targets.items():
        penalty = plain.to(dtype=dtype)
        found = ratio(partial(step, None), partial(step, penalty), pairs)
        kind = str(dtype).removeprefix("torch.")
        yield _line("step", f"{name}, {kind} / a plain step", found, target, _both(found))
    if len(targets) == 1:
        return
    for method, rank, dtype in _KRONECKER:
        held, kind = _kronecker(model, (x, y), rank, dtype), str(dtype).removeprefix("torch.")
        found = ratio(partial(step, None), partial(step, held), pairs)
        what = f"{name}, {method}, {kind} / a plain step"
        yield _line("step", what, found, 3.0, _both(found))


def _kronecker(
    model: nn.Module, batch: tuple[Tensor, Tensor], rank: int | None, dtype: torch.dtype
) -> Penalty:
    """A penalty from few examples, which will do: the time does not depend on them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recipe = Regularizer(EWC(), Kronecker(rank=rank), 1e-3)
        return recipe.consolidate(model, [batch], progress=False).to(dtype=dtype)


def _own_steps(
    name: str,
    build: Callable[[], nn.Module],
    shape: tuple[int, ...],
    targets: dict[torch.dtype, float],
    pairs: int,
) -> Iterator[Measurement]:
    """In the loop of the experiments, which reads the factor once per step."""
    x, y = torch.rand(shape), torch.randint(10, (shape[0],))

    def prepare(held: Callable[[nn.Module], Penalty | None]) -> Callable[[], None]:
        model = build()
        optimizer, gradient = FlatAdam(model, 1e-5), cross_entropy_gradient(model)
        take = penalised(model, held(model), optimizer)()

        def step() -> None:
            gradient(x, y)
            take()

        return step

    methods: list[tuple[str, Callable[[nn.Module], Penalty | None], torch.dtype, float]] = [
        ("", partial(_factored, t=50, dtype=dtype), dtype, target)
        for dtype, target in targets.items()
    ]
    for said, rank, dtype in _KRONECKER:
        own = partial(_kronecker, batch=(x, y), rank=rank, dtype=dtype)
        methods.append((f"{said}, ", own, dtype, 3.0))
    for method, held, dtype, target in methods:
        found = ratio(prepare(lambda _: None), prepare(held), pairs)
        kind = str(dtype).removeprefix("torch.")
        what = f"{name}, {method}{kind}, in the experiments' loop / a plain step there"
        yield _line("step", what, found, target, _both(found))


def _both(found: Ratio) -> str:
    """What was divided by what, as a person likes to know too."""
    return f"{1e3 * found.subject_seconds:.1f} ms / {1e3 * found.reference_seconds:.1f} ms"


def consolidation_suite(pairs: int, quick: bool) -> Iterator[Measurement]:
    """Consolidation, in units of one plain epoch of forward and backward at the same batch size."""
    examples = 1_000 if quick else 60_000
    cases: list[tuple[Approximation, float]] = [(CountSketch(50), 1.15), (Diagonal(), 2.0)]
    cases.append((Diagonal(estimate="signs"), 1.15))
    if not quick:
        cases += [(LowRank(50), 2.0), (CountSketch(500), 1.5)]
    yield from _consolidations("MLP", perceptron(), (784,), examples, 100, cases, pairs)
    if not quick:
        cases = [(CountSketch(50), 1.15), (Diagonal(), 3.0)]
        shape = (3, 32, 32)
        yield from _consolidations("WRN-16-4", _resnet(), shape, 640, 64, cases, pairs)


def _consolidations(
    name: str,
    model: nn.Module,
    shape: tuple[int, ...],
    examples: int,
    batch: int,
    cases: Sequence[tuple[Approximation, float]],
    pairs: int,
) -> Iterator[Measurement]:
    work = _Work(model, shape, examples, batch)
    for approximation, target in cases:
        subject = partial(work.consolidate, approximation)
        with freed_memory_kept() as kept:
            found = ratio(work.epoch, subject, pairs)
        fresh = ratio(work.epoch, subject, 1).median if kept else None
        note = "" if fresh is None else f"{fresh:.2f} in memory fresh from the system, one pair"
        what = f"{name}, n = {examples}, {approximation!r} / one epoch"
        yield _line("consolidation", what, found, target, note)


def memory_suite(pairs: int, quick: bool) -> Iterator[Measurement]:
    """Memory while consolidating, beyond the result, in units of a training step's."""
    work = _Work(perceptron(), (784,), 1_000 if quick else 10_000, 100)
    consolidate = partial(work.consolidate, CountSketch(50))
    work.train()
    consolidate()  # what is imported on first use is no part of it
    _, step = peak_bytes(work.train)
    penalty, peak = peak_bytes(consolidate)
    beyond = max(0, peak - penalty.nbytes)
    note = f"{beyond / 1e6:.0f} MB against {step / 1e6:.0f} MB"
    value = beyond / max(step, 1)
    yield Measurement(
        "memory", "CountSketch(50) / a training step", value, value, value, 2.0, note
    )


def growth_suite(pairs: int, quick: bool) -> Iterator[Measurement]:
    """Fitted exponents of time in the number of parameters, examples, rows and tasks."""
    scale, few = (1, CountSketch(10)) if quick else (4, CountSketch(10))
    models = [perceptron((784, width * scale, 10)) for width in (128, 256, 512)]
    dims = [ParameterSpace.of(model).dim for model in models]
    works = [_Work(model, (784,), 2_000 * scale, 100) for model in models]
    runs = [partial(work.consolidate, few) for work in works]
    yield _growth("consolidation in m", dims, runs, 1.1)
    counts = [2_000 * scale, 4_000 * scale, 8_000 * scale]
    works = [_Work(models[0], (784,), count, 100) for count in counts]
    runs = [partial(work.consolidate, few) for work in works]
    yield _growth("consolidation in n", counts, runs, 1.1)
    sizes = [5, 10, 20]
    runs = [partial(works[-1].consolidate, CountSketch(size)) for size in sizes]
    yield _growth("consolidation in t", sizes, runs, 0.15)
    rows = [25, 50, 100]
    steps = [partial(_factored(models[-1], t).add_grad_, models[-1]) for t in rows]
    yield _growth("penalty step in t", rows, steps, 1.1, 60)
    steps = [partial(_factored(model, 50).add_grad_, model) for model in models]
    yield _growth("penalty step in m", dims, steps, 1.1, 60)
    recipe, work = Regularizer(EWC(), CountSketch(10)), works[0]
    penalty, steps = None, []
    for _ in range(4):
        penalty = recipe.consolidate(
            work.model, work.data[:2], previous=penalty, seed=0, progress=False
        )
        steps.append(partial(penalty.add_grad_, work.model))
    steps = [steps[0], steps[1], steps[3]]
    yield _growth("penalty step in tasks", [1, 2, 4], steps, 0.15, 60)


def _growth(
    what: str,
    sizes: Sequence[int],
    runs: Sequence[Callable[[], object]],
    target: float,
    rounds: int = 6,
) -> Measurement:
    """Runs are taken in turn, so that a slow moment falls on all sizes; each counts with its best."""
    best = [float("inf")] * len(runs)
    for _ in range(rounds):
        for i, run in enumerate(runs):
            start = time.perf_counter()
            run()
            best[i] = min(best[i], time.perf_counter() - start)
    slope = exponent(sizes, best)
    note = ", ".join(f"{size}: {1e3 * s:.2f} ms" for size, s in zip(sizes, best, strict=True))
    return Measurement("growth", what, slope, slope, slope, target, note)


def _line(suite: str, what: str, found: Ratio, target: float, note: str = "") -> Measurement:
    return Measurement(suite, what, found.median, found.low, found.high, target, note)


SUITES: dict[str, Callable[[int, bool], Iterator[Measurement]]] = {
    "penalty": penalty_suite,
    "step": step_suite,
    "memory": memory_suite,
    "growth": growth_suite,
    "consolidation": consolidation_suite,
}
