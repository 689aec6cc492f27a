"""The result belongs to the examples: not to the batch size, the container or (often) the order."""

import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import holdfast as hf
import reference
from models_zoo import CASES, Columns, Network, Transformer, batches, shuffled
from recipes_table import (
    ALL_APPROXIMATIONS,
    ALL_IMPORTANCES,
    ORDERLESS,
    ROW_ORDERLESS,
    approximate,
    close,
    too_small_to_sketch,
)

COUNT = 35  # more than one buffer of LowRank, and not a multiple of 7
SEED = 3


def matrix(
    importance: hf.Importance,
    approximation: hf.Approximation,
    model: nn.Module,
    data: Iterable[Any],
    **options: Any,
) -> Tensor:
    recipe = hf.Regularizer(importance, approximation)
    rows = importance.slices or 3 if isinstance(importance, hf.SCP) else COUNT
    with too_small_to_sketch(approximation, min(rows, 3) if rows < COUNT else rows):
        penalty = recipe.consolidate(model, data, seed=SEED, **options)
    return penalty.matrix.dense()


@pytest.mark.parametrize("importance", ALL_IMPORTANCES)
@pytest.mark.parametrize("approximation", ALL_APPROXIMATIONS)
def test_batch_size_does_not_matter(importance: str, approximation: str) -> None:
    case = CASES["mlp"]
    model, columns = case.model(), case.columns(COUNT)
    chosen = ALL_IMPORTANCES[importance], ALL_APPROXIMATIONS[approximation]
    whole = matrix(*chosen, model, batches(columns, 64))
    tolerance = 1e-7 if approximation == "full-factored" else 1e-9
    close(matrix(*chosen, model, batches(columns, 7)), whole, tolerance)
    close(matrix(*chosen, model, batches(columns, 1)), whole, tolerance)


@pytest.mark.parametrize("case", ["conv", "transformer", "tokens", "frozen"])
@pytest.mark.parametrize("approximation", ["diagonal", "count_sketch", "low_rank-groups"])
def test_batch_size_does_not_matter_for_other_networks(case: str, approximation: str) -> None:
    model, columns = CASES[case].model(), CASES[case].columns(COUNT)
    chosen = hf.EWC(), ALL_APPROXIMATIONS[approximation]
    whole = matrix(*chosen, model, batches(columns, 64))
    for size in (1, 7):
        close(matrix(*chosen, model, batches(columns, size)), whole)


@pytest.mark.parametrize(
    "approximation",
    [
        hf.LowRank(rank=2, group=1),
        hf.LowRank(rank=2, group=1, shrink=True),
        hf.LowRank(rank=40, group=1),
        hf.LowRank(rank=2, group=2),
    ],
    ids=str,
)
def test_truncation_while_streaming_does_not_see_batches(approximation: hf.LowRank) -> None:
    """More rows than two buffers, more parameters than a buffer: directions are really lost."""
    case = CASES["transformer"]
    model, columns = case.model(), case.columns(COUNT)
    chosen = hf.EWC(labels="expected"), approximation
    W = reference.rows(model, columns, chosen[0], seed=SEED)
    width = max(approximation.rank, 32)
    assert len(W) > 4 * width
    assert W.shape[1] > 2 * width
    whole = matrix(*chosen, model, batches(columns, 64))
    close(whole, approximate(approximation, W, model, divisor=COUNT, seed=SEED), 1e-8)
    for size in (1, 7):
        close(matrix(*chosen, model, batches(columns, size)), whole)


@pytest.mark.parametrize("importance", ROW_ORDERLESS)
@pytest.mark.parametrize("approximation", ORDERLESS)
def test_order_does_not_matter(importance: str, approximation: str) -> None:
    case = CASES["mlp"]
    model, columns = case.model(), case.columns(COUNT)
    chosen = ALL_IMPORTANCES[importance], ALL_APPROXIMATIONS[approximation]
    expected = matrix(*chosen, model, batches(columns, 7))
    mixed = matrix(*chosen, model, batches(shuffled(columns), 7))
    close(mixed, expected, 1e-7 if approximation == "full-factored" else 1e-9)


def test_a_new_order_is_a_new_draw_of_a_sketch() -> None:
    case = CASES["mlp"]
    model, columns = case.model(), case.columns(COUNT)
    for name in ("count_sketch", "low_rank-groups", "dense_sketch-rademacher", "osnap", "srht"):
        one = matrix(hf.EWC(), ALL_APPROXIMATIONS[name], model, batches(columns, 7))
        two = matrix(hf.EWC(), ALL_APPROXIMATIONS[name], model, batches(shuffled(columns), 7))
        assert not torch.allclose(one, two)


class Pair(NamedTuple):
    inputs: Tensor
    labels: Tensor


class Stream(IterableDataset):  # type: ignore[type-arg]
    """A dataset of unknown length."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns

    def __iter__(self) -> Iterator[Columns]:
        yield from zip(*self.columns, strict=True)


class Keyed(nn.Module):
    """A network that is called with keywords and returns an object, as language models do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, pixels: Tensor, scale: Tensor | None = None) -> types.SimpleNamespace:
        assert scale is None
        return types.SimpleNamespace(logits=self.inner(pixels))


def endless(columns: Columns) -> Iterator[Columns]:
    while True:
        yield from batches(columns, 8)


KINDS: dict[str, Callable[[Columns], Any]] = {
    "lists": lambda c: [list(batch) for batch in batches(c, 8)],
    "named tuples": lambda c: [Pair(*batch) for batch in batches(c, 8)],
    "numpy": lambda c: [tuple(t.numpy() for t in batch) for batch in batches(c, 8)],
    "generator": lambda c: (batch for batch in batches(c, 8)),
    "DataLoader": lambda c: DataLoader(TensorDataset(*c), batch_size=8),
    "IterableDataset": lambda c: DataLoader(Stream(c), batch_size=8),
    "a third column": lambda c: [(x, y, torch.arange(len(x))) for x, y in batches(c, 8)],
    "an empty entry": lambda c: [(x, y, None) for x, y in batches(c, 8)],
    "nested": lambda c: [(x, y, {"more": [x, (y,)]}) for x, y in batches(c, 8)],
    "an entry that is not a tensor": lambda c: [(x, y, "name") for x, y in batches(c, 8)],
    "a shared tensor": lambda c: [(x, y, torch.eye(77)) for x, y in batches(c, 8)],
    "a shared number": lambda c: [(x, y, torch.tensor(2.0)) for x, y in batches(c, 8)],
    "some empty batches": lambda c: [*batches(c, 8)[:1], (c[0][:0], c[1][:0]), *batches(c, 8)[1:]],
    "mixed": lambda c: [batch if len(batch[0]) % 2 else (*batch, 7) for batch in batches(c, 5)],
}
STREAMED = (
    "diagonal",
    "count_sketch",
    "low_rank-groups",
    "full-factored",
    "diagonal_plus_low_rank-groups",
    "composite-groups",
    "dense_sketch-rademacher",
    "nystrom",
)
CELLS = [("ewc-true", approximation) for approximation in STREAMED] + [
    ("ewc-expected", "count_sketch"),
    ("ewc-expected", "low_rank-groups"),
    ("ewc-sampled", "diagonal"),
    ("scp-few", "full-factored"),
]


@pytest.mark.parametrize(
    ("kind", "importance", "approximation"),
    [
        (kind, *cell)
        for kind in KINDS
        for cell in CELLS
        # rows that cannot be held back enter their group at once: another draw of LowRank's groups
        if not (kind == "mixed" and cell[1].endswith("-groups"))
    ],
)
def test_any_container(kind: str, importance: str, approximation: str) -> None:
    case = CASES["mlp"]
    model, columns = case.model(), case.columns(19)
    chosen = ALL_IMPORTANCES[importance], ALL_APPROXIMATIONS[approximation]
    expected = matrix(*chosen, model, batches(columns, 8))
    close(matrix(*chosen, model, KINDS[kind](columns)), expected, 1e-7)


@pytest.mark.parametrize("approximation", STREAMED)
@pytest.mark.parametrize("extra", [{}, {"scale": None}, {"note": "text"}])
def test_mappings_and_output_objects(approximation: str, extra: dict[str, Any]) -> None:
    case = CASES["mlp"]
    model, columns = case.model(), case.columns(19)
    data = [{"pixels": x, "labels": y, **extra} for x, y in batches(columns, 8)]
    forward = None
    if "note" in extra:  # cannot be cut, and the model must not see it
        forward = lambda model, batch: model(batch["pixels"]).logits  # noqa: E731
    recipe = hf.EWC(), ALL_APPROXIMATIONS[approximation]
    found = matrix(*recipe, Keyed(model), data, forward=forward)
    close(found, matrix(*recipe, model, batches(columns, 8)), 1e-7)


def test_a_shuffling_loader_is_the_order_it_draws() -> None:
    case = CASES["mlp"]
    model, columns = case.model(), case.columns(19)
    loader = DataLoader(TensorDataset(*columns), batch_size=8, shuffle=True)
    torch.manual_seed(11)
    found = matrix(hf.EWC(), hf.CountSketch(size=3), model, loader)
    torch.manual_seed(11)
    drawn = [tuple(batch) for batch in loader]
    order = tuple(torch.cat(column) for column in zip(*drawn, strict=True))
    W = reference.rows(model, order, hf.EWC())
    close(found, approximate(hf.CountSketch(size=3), W, model, divisor=19, seed=SEED))


@pytest.mark.parametrize("approximation", ["diagonal", "count_sketch", "low_rank-single"])
@pytest.mark.parametrize("batch", [1, 3])
def test_sequences_of_different_lengths(approximation: str, batch: int) -> None:
    """Only equal shapes are joined; the row index is still the position of arrival."""
    model = CASES["transformer"].model()
    data, W = [], []
    for k in range(9):
        ids = torch.randint(5, (batch, 2 + k % 3))
        data.append((ids, torch.randint(5, (batch,))))
        W.append(reference.rows(model, data[-1], hf.EWC()))
    recipe = ALL_APPROXIMATIONS[approximation]
    found = hf.Regularizer(hf.EWC(), recipe).consolidate(model, data, seed=SEED).matrix.dense()
    stacked = torch.cat(W)
    close(found, approximate(recipe, stacked, model, divisor=len(stacked), seed=SEED))


@pytest.mark.parametrize(("importance", "approximation"), CELLS)
@pytest.mark.parametrize("limit", [3, 8, 11, 1000])
@pytest.mark.parametrize("cut", [True, False])
def test_limit_takes_the_first_examples(
    importance: str, approximation: str, limit: int, cut: bool
) -> None:
    case = CASES["mlp"]
    model, columns = case.model(), case.columns(19)
    chosen = hf.Regularizer(ALL_IMPORTANCES[importance], ALL_APPROXIMATIONS[approximation])
    first = tuple(column[:limit] for column in columns)
    expected = chosen.consolidate(model, batches(first, 8), seed=SEED)
    data = [batch if cut else (*batch, "uncut") for batch in batches(columns, 8)]
    found = chosen.consolidate(model, data, seed=SEED, limit=limit)
    close(found.matrix.dense(), expected.matrix.dense(), 1e-7)
    assert found.tasks[0].examples == expected.tasks[0].examples == min(limit, 19)


@pytest.mark.parametrize("limit", [7, 8])
def test_limit_does_not_pull_a_batch_it_does_not_need(limit: int) -> None:
    case = CASES["mlp"]
    model, columns = case.model(), case.columns(19)
    pulled = []

    def source() -> Iterator[Columns]:
        for batch in endless(columns):
            pulled.append(batch)
            yield batch

    hf.Regularizer(hf.EWC(), hf.Diagonal()).consolidate(model, source(), limit=limit)
    assert len(pulled) == 1


def test_examples_are_counted_in_what_the_loss_returns() -> None:
    """A batch that cannot be cut, with outputs per node and a loss per graph: n is the graphs."""
    model = Network(4, 3, 2).double()
    x = torch.randn(10, 4, dtype=torch.float64)
    owner = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 2])
    target = torch.randn(3, 2, dtype=torch.float64)

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        pooled = torch.zeros(3, 2, dtype=torch.float64).index_add(0, batch[1], outputs)
        return (pooled - batch[2]).square().sum(1)

    recipe = hf.Regularizer(hf.EWC(), hf.Full())
    penalty = recipe.consolidate(model, [(x, owner, target)] * 2, loss=loss)
    W = []
    for graph in range(3):
        z = model(x[owner == graph]).sum(0)
        W.append(reference.gradient((z - target[graph]).square().sum(), list(model.parameters())))
    stacked = torch.stack(W)
    assert penalty.tasks[0].examples == 6
    close(penalty.matrix.dense(), stacked.T @ stacked / 3)
    for name in ("count_sketch", "low_rank-groups", "dense_sketch-gaussian", "srht", "nystrom"):
        sketched = hf.Regularizer(hf.EWC(), ALL_APPROXIMATIONS[name])
        found = sketched.consolidate(model, [(x, owner, target)] * 2, loss=loss, seed=SEED)
        expected = approximate(
            sketched.approximation, torch.cat([stacked, stacked]), model, divisor=6, seed=SEED
        )
        close(found.matrix.dense(), expected)


def test_the_token_model_sees_sequences_as_examples() -> None:
    """One row per sequence, whatever its length: a sum over tokens, never a mean."""
    model = Transformer(pooled=False).double()
    ids = torch.randint(5, (3, 4))
    penalty = hf.Regularizer(hf.EWC(), hf.LowRank(rank=9)).consolidate(model, [(ids, ids.flip(1))])
    assert penalty.tasks[0].examples == 3
    assert len(penalty.matrix.factor) == 3
