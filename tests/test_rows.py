"""W is read in one pass, within its budget, at the price of one epoch for a sketch."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import holdfast as hf
import reference
from holdfast import gradients, regrouping
from holdfast.gradients import Gradients
from holdfast.hashing import Draw
from holdfast.rows import GivenRows, Rows
from models_zoo import CASES, Columns, batches
from recipes_table import ALL_APPROXIMATIONS, ALL_IMPORTANCES, approximate, close

SEED = 12


def rows_of(
    data: Any, importance: hf.Importance | None = None, case: str = "mlp", **options: Any
) -> Rows:
    model = CASES[case].model().eval()
    space = hf.ParameterSpace.of(model)
    return Rows(model, data, space, importance or hf.EWC(), Draw(SEED), **options)


@pytest.mark.parametrize("importance", ["ewc-true", "ewc-sampled", "ewc-expected", "mas-logits"])
def test_rows_arrive_in_order_with_their_index(importance: str) -> None:
    columns = CASES["mlp"].columns(9)
    rows = rows_of(batches(columns, 4), ALL_IMPORTANCES[importance])
    index, blocks = [], []
    for batch in rows:
        index += batch.index.tolist()
        assert len(batch) == len(batch.index)
        blocks += list(batch.blocks())
    W = reference.rows(CASES["mlp"].model(), columns, ALL_IMPORTANCES[importance], seed=SEED)
    assert index == list(range(len(W)))
    close(torch.cat(blocks), W)
    assert rows.examples == rows.divisor == 9


@pytest.mark.parametrize("importance", ["ewc-true", "ewc-expected", "ewc-sampled"])
@pytest.mark.parametrize("cut", [True, False])
def test_signed_sums_and_squares_are_those_of_the_rows(importance: str, cut: bool) -> None:
    columns = CASES["mlp"].columns(9)
    data = [batch if cut else (*batch, "whole") for batch in batches(columns, 4)]
    for batch in rows_of(data, ALL_IMPORTANCES[importance]):
        W = torch.cat([block.clone() for block in batch.blocks()])
        signs = 1 - 2 * torch.randint(2, (len(batch),))
        out = torch.ones(W.shape[1], dtype=torch.float64)
        batch.add_signed_sum_(out, signs)
        close(out, 1 + signs.double() @ W)
        out = torch.ones(W.shape[1], dtype=torch.float64)
        batch.add_squared_sum_(out)
        close(out, 1 + W.square().sum(0))


def test_given_rows() -> None:
    W, index = torch.randn(5, 3), torch.arange(5)
    batch = GivenRows(W, index)
    out = torch.zeros(3)
    signs = torch.tensor([1, -1, 1, 0, 1])
    batch.add_signed_sum_(out, signs)
    torch.testing.assert_close(out, signs.float() @ W)
    part = batch.like([W[:2]], index[:2])
    assert torch.equal(torch.cat(list(part.blocks())), W[:2])


def test_the_data_is_read_once_and_nothing_is_kept() -> None:
    """An iterator that can be read once only is enough, for every approximation."""
    columns = CASES["mlp"].columns(9)
    for name, approximation in ALL_APPROXIMATIONS.items():
        started = []

        def source(started: list[int] = started) -> Iterator[Columns]:
            started.append(1)
            yield from batches(columns, 4)

        penalty = hf.Regularizer(hf.EWC(), approximation).consolidate(
            CASES["mlp"].model(), source()
        )
        assert started == [1], name
        assert penalty.tasks[0].examples == 9


@pytest.mark.parametrize("rows_at_once", [1, 2, 5])
@pytest.mark.parametrize("importance", ["ewc-true", "ewc-expected", "ewc-sampled"])
@pytest.mark.parametrize(
    "approximation", ["diagonal", "block_diagonal-size", "low_rank-single", "full-dense"]
)
def test_a_small_budget_for_rows_changes_nothing(
    rows_at_once: int, importance: str, approximation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["mlp"]
    model, columns = case.model(), case.columns(9)
    recipe = hf.Regularizer(ALL_IMPORTANCES[importance], ALL_APPROXIMATIONS[approximation])
    expected = recipe.consolidate(model, batches(columns, 9), seed=SEED)
    monkeypatch.setattr(gradients, "ROW_BYTES", 3 * 8 * 27 * rows_at_once)
    seen = []
    honest = Gradients.rows

    def counted(self: Gradients, *args: Any, **options: Any) -> Iterator[Tensor]:
        for block in honest(self, *args, **options):
            seen.append(len(block))
            yield block

    monkeypatch.setattr(Gradients, "rows", counted)
    found = recipe.consolidate(model, batches(columns, 9), seed=SEED)
    close(found.matrix.dense(), expected.matrix.dense())
    assert all(count <= rows_at_once for count in seen)


def count_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of examples in every backward pass from now on."""
    sizes: list[int] = []
    honest = Gradients.potentials

    def counted(self: Gradients, batch: Any, *args: Any) -> Tensor:
        values = honest(self, batch, *args)
        if torch.is_grad_enabled():
            sizes.append(len(values))
        return values

    monkeypatch.setattr(Gradients, "potentials", counted)
    return sizes


@pytest.mark.parametrize("size", [1, 2, 5, 20])
def test_a_sketch_costs_one_epoch(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every example goes through the network once, in full batches but for the last of a bucket."""
    case = CASES["mlp"]
    model, columns = case.model(), case.columns(200)
    passes = count_passes(monkeypatch)
    recipe = hf.Regularizer(hf.EWC(), hf.CountSketch(size=size))
    penalty = recipe.consolidate(model, batches(columns, 10), seed=SEED)
    looked = passes.pop(0)  # one example is looked at first
    assert looked == 1
    assert sum(passes) == 200
    assert len(passes) <= 200 / 10 + size
    assert sum(count < 10 for count in passes) <= size
    W = reference.rows(model, columns, hf.EWC())
    expected = approximate(recipe.approximation, W, model, divisor=200, seed=SEED)
    close(penalty.matrix.dense(), expected)


def test_expected_labels_cost_one_epoch_per_class(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["mlp"]
    passes = count_passes(monkeypatch)
    recipe = hf.Regularizer(hf.EWC(labels="expected"), hf.CountSketch(size=2))
    recipe.consolidate(case.model(), batches(case.columns(40), 10), seed=SEED)
    assert sum(passes) - 1 == 3 * 40


def test_a_batch_that_cannot_be_cut_costs_one_pass_per_bucket_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = CASES["mlp"]
    data = [(*batch, "whole") for batch in batches(case.columns(12), 4)]
    passes: list[int] = []
    honest = Gradients.add_gradient_

    def counted(self: Gradients, *args: Any, **options: Any) -> None:
        passes.append(1)
        honest(self, *args, **options)

    monkeypatch.setattr(Gradients, "add_gradient_", counted)
    hf.Regularizer(hf.EWC(), hf.CountSketch(size=3)).consolidate(case.model(), data, seed=SEED)
    h = reference.Hash(3, SEED, 0, "sketch")
    buckets = [{h.bucket(i) for i in range(first, first + 4)} for first in (0, 4, 8)]
    assert len(passes) == sum(map(len, buckets))


@pytest.mark.parametrize(
    "approximation", ["count_sketch", "count_sketch-copies", "low_rank-groups"]
)
@pytest.mark.parametrize("held", [1, 300, 1000])
def test_a_small_budget_for_held_back_examples_changes_nothing(
    approximation: str, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences of several lengths, so that stores must make room for each other."""
    model = CASES["transformer"].model()
    data = [(torch.randint(5, (3, 2 + k % 4)), torch.randint(5, (3,))) for k in range(8)]
    recipe = hf.Regularizer(hf.EWC(), ALL_APPROXIMATIONS[approximation])
    W = torch.cat([reference.rows(model, batch, hf.EWC()) for batch in data])
    monkeypatch.setattr(regrouping, "HELD_BYTES", held)
    largest = []
    honest = regrouping.Regrouping.add

    def watched(self: regrouping.Regrouping, *args: Any) -> None:
        honest(self, *args)
        largest.append(sum(pool.nbytes for pool in self._pools.values()))

    monkeypatch.setattr(regrouping.Regrouping, "add", watched)
    penalty = recipe.consolidate(model, data, seed=SEED)
    if approximation.startswith("count_sketch"):
        expected = approximate(recipe.approximation, W, model, divisor=24, seed=SEED)
        close(penalty.matrix.dense(), expected)
        buckets = recipe.approximation.size
        one = 8 * (5 + 1 + 1 + 1) * buckets  # a row of the longest kind in every bucket
        assert max(largest) <= max(held, one)
    else:
        exact = W.T @ W / 24
        assert 0 < float(penalty.matrix.trace()) < 5 * float(exact.trace())


def test_rows_of_a_network_in_evaluation_mode_need_no_graph_between_batches() -> None:
    """What is held back is data, not graphs: no tensor of a store takes part in autograd."""
    held: list[Tensor] = []
    recipe = hf.CountSketch(size=3)
    rows = rows_of(batches(CASES["mlp"].columns(9), 4))
    setting = hf.Setting(rows.gradients.space, Draw(SEED), dtype=torch.float64)
    state = recipe.start(setting)
    for batch in rows:
        recipe.update(state, batch)
        stores = state.groups[0]._pools.values()
        held += [column for store in stores for column in store.columns]
    assert held
    assert not any(t.requires_grad for t in held)
    recipe.finish(state)


def test_excluded_parameters_cost_no_memory_of_rows() -> None:
    case = CASES["mlp"]
    model = case.model()
    recipe = hf.Regularizer(hf.EWC(), hf.CountSketch(size=3), include=("head.*",))
    penalty = recipe.consolidate(model, [case.columns(9)])
    assert penalty.matrix.factor.shape == (3, 12)
    assert isinstance(model, nn.Module)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.filterwarnings("ignore::holdfast.gradients.VectorisationWarning")
@pytest.mark.parametrize("vectorised", [True, False])
def test_rows_are_written_where_they_are_asked_for(vectorised: bool) -> None:
    columns = CASES["mlp"].columns(9)
    rows = rows_of(batches(columns, 4))
    rows.gradients._vectorised = vectorised
    found = []
    for batch in rows:
        out = torch.full((len(batch), rows.gradients.space.dim), torch.nan, dtype=torch.float64)
        batch.write_(out)
        found.append(out)
    W = reference.rows(CASES["mlp"].model(), columns, hf.EWC(), seed=SEED)
    close(torch.cat(found), W)
