"""Every importance × approximation × network against one autograd call per example."""

import copy
import functools

import pytest
import torch
from torch import Tensor, nn

import holdfast as hf
import reference
from models_zoo import CASES, Columns, batches
from recipes_table import (
    ALL_APPROXIMATIONS,
    ALL_IMPORTANCES,
    APPROXIMATIONS,
    IMPORTANCES,
    approximate,
    close,
    too_small_to_sketch,
)

EXAMPLES = 9
SEED = 5


def serves(case: str, importance: str) -> bool:
    """Whether an importance is defined for the outputs of a network."""
    needs_classes = ("ewc-sampled", "ewc-expected", "ewc-predicted", "scp-")
    return not (CASES[case].tokens and importance.startswith(needs_classes))


PAIRS = [(c, i) for c in CASES for i in ALL_IMPORTANCES if serves(c, i)]


@functools.cache
def oracle(case: str, importance: str) -> tuple[nn.Module, Columns, Tensor]:
    model, columns = CASES[case].model(), CASES[case].columns(EXAMPLES)
    W = reference.rows(model, columns, ALL_IMPORTANCES[importance], seed=SEED)
    return model, columns, W


def test_every_registered_recipe_has_a_row() -> None:
    assert IMPORTANCES.keys() == hf.IMPORTANCES.keys()
    assert APPROXIMATIONS.keys() == hf.APPROXIMATIONS.keys()
    for table, registry in ((IMPORTANCES, hf.IMPORTANCES), (APPROXIMATIONS, hf.APPROXIMATIONS)):
        for key, variants in table.items():
            assert all(type(recipe) is registry[key] for recipe in variants.values())


@pytest.mark.parametrize(("case", "importance"), PAIRS)
@pytest.mark.parametrize("approximation", ALL_APPROXIMATIONS)
def test_cell(case: str, importance: str, approximation: str) -> None:
    model, columns, W = oracle(case, importance)
    recipe = hf.Regularizer(ALL_IMPORTANCES[importance], ALL_APPROXIMATIONS[approximation])
    with too_small_to_sketch(recipe.approximation, len(W)):
        penalty = recipe.consolidate(model, batches(columns, 4), seed=SEED)
    divisor = reference.divisor(recipe.importance, EXAMPLES)
    expected = approximate(
        recipe.approximation,
        W,
        model,
        divisor=divisor,
        seed=SEED,
        columns=columns,
        importance=recipe.importance,
    )
    # the factored form drops a little of the trace
    close(penalty.matrix.dense(), expected, 1e-7 if approximation == "full-factored" else 1e-10)
    assert penalty.matrix.dim == W.shape[1]
    assert penalty.tasks == (hf.TaskRecord(EXAMPLES, SEED, penalty.tasks[0].hash_ids),)


@pytest.mark.parametrize(("case", "importance"), [p for p in PAIRS if p[1].startswith("scp")])
def test_slices_agree_with_their_definition(case: str, importance: str) -> None:
    """The streamed rows sum to (1/L) Σ g gᵀ with every g written out."""
    model, columns, _ = oracle(case, importance)
    exact = reference.omega(model, columns, ALL_IMPORTANCES[importance], seed=SEED)
    penalty = hf.Regularizer(ALL_IMPORTANCES[importance], hf.Full()).consolidate(
        model, batches(columns, 4), seed=SEED
    )
    close(penalty.matrix.dense(), exact)


@pytest.mark.parametrize(("case", "importance"), PAIRS)
def test_count_sketch_is_the_hash_matrix_times_the_rows(case: str, importance: str) -> None:
    """Row by row, not only as FᵀF; and the recorded ids are those of the hashes."""
    model, columns, W = oracle(case, importance)
    recipe = hf.Regularizer(ALL_IMPORTANCES[importance], hf.CountSketch(size=2, copies=2))
    with too_small_to_sketch(recipe.approximation, len(W)):
        penalty = recipe.consolidate(model, batches(columns, 4), seed=SEED)
    F, ids = reference.count_sketch(W, 2, seed=SEED, copies=2)
    divisor = reference.divisor(recipe.importance, EXAMPLES)
    assert isinstance(penalty.matrix, hf.FactoredMatrix)
    close(penalty.matrix.factor, F / divisor**0.5)
    assert penalty.tasks[0].hash_ids == ids


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rank", [1, 3])
def test_one_truncation_is_the_dense_eigendecomposition(case: str, rank: int) -> None:
    model, columns, W = oracle(case, "ewc-true")
    penalty = hf.Regularizer(hf.EWC(), hf.LowRank(rank=rank, group=1)).consolidate(
        model, batches(columns, 4), seed=SEED
    )
    close(penalty.matrix.dense(), reference.best_rank(W.T @ W / EXAMPLES, rank))
    assert penalty.matrix.factor.shape == (rank, W.shape[1])


@pytest.mark.parametrize("case", CASES)
def test_low_rank_is_exact_when_every_row_fits(case: str) -> None:
    model, columns, W = oracle(case, "ewc-true")
    for group in ("auto", 1, 4):
        penalty = hf.Regularizer(hf.EWC(), hf.LowRank(rank=EXAMPLES, group=group)).consolidate(
            model, batches(columns, 4), seed=SEED
        )
        close(penalty.matrix.dense(), W.T @ W / EXAMPLES)


@pytest.mark.parametrize("slices", [1, 2, 3, 4, 50])
def test_slices_fewer_and_more_than_outputs(slices: int) -> None:
    """Never more rows than outputs, and exactly (1/L) Σ g gᵀ with unit directions."""
    model, columns = CASES["mlp"].model(), CASES["mlp"].columns(EXAMPLES)
    importance = hf.SCP(slices=slices)
    penalty = hf.Regularizer(importance, hf.LowRank(rank=99)).consolidate(
        model, batches(columns, 4), seed=SEED
    )
    assert len(penalty.matrix.factor) == min(slices, 3)
    close(penalty.matrix.dense(), reference.omega(model, columns, importance, seed=SEED))


def test_slices_converge_to_their_expectation() -> None:
    model, columns = CASES["mlp"].model(), CASES["mlp"].columns(EXAMPLES)
    exact = reference.omega(model, columns, hf.SCP(slices=None))
    many = hf.Regularizer(hf.SCP(slices=200_000), hf.Full()).consolidate(
        model, batches(columns, 4), seed=SEED
    )
    close(many.matrix.dense(), exact, 0.01)


def test_expected_is_the_mean_of_sampled() -> None:
    """E over labels of the sampled Fisher is the exact one: within five standard errors."""
    model, columns = CASES["mlp"].model(), CASES["mlp"].columns(3)
    exact = reference.omega(model, columns, hf.EWC(labels="expected"))
    sampled = hf.Regularizer(hf.EWC(labels="sampled"), hf.Full())
    draws = torch.stack(
        [
            sampled.consolidate(model, [columns], seed=seed).matrix.dense().trace()
            for seed in range(100)
        ]
    )
    error = draws.std() / len(draws) ** 0.5
    assert abs(draws.mean() - exact.trace()) < 5 * error
    assert draws.std() > 0


def test_seeds_draw_other_labels_and_hashes() -> None:
    model, columns = CASES["mlp"].model(), CASES["mlp"].columns(EXAMPLES)
    for importance, approximation in (
        (hf.EWC(labels="sampled"), hf.Full()),
        (hf.EWC(), hf.CountSketch(size=2)),
        (hf.SCP(slices=2), hf.Full()),
    ):
        recipe = hf.Regularizer(importance, approximation)
        first, again, other = (
            recipe.consolidate(model, [columns], seed=seed).matrix.dense() for seed in (1, 1, 2)
        )
        assert torch.equal(first, again)
        assert not torch.allclose(first, other)


def test_without_a_seed_the_entropy_is_recorded() -> None:
    model, columns = CASES["mlp"].model(), CASES["mlp"].columns(EXAMPLES)
    recipe = hf.Regularizer(hf.EWC(), hf.CountSketch(size=2))
    one, two = recipe.consolidate(model, [columns]), recipe.consolidate(model, [columns])
    assert one.tasks[0].seed != two.tasks[0].seed
    replayed = recipe.consolidate(model, [columns], seed=one.tasks[0].seed)
    assert torch.equal(replayed.matrix.factor, one.matrix.factor)


@pytest.mark.parametrize(
    ("dtype", "relative"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1), (torch.float16, 0.01)]
)
@pytest.mark.parametrize("case", ["mlp", "conv", "transformer", "frozen"])
def test_rows_of_other_precisions(case: str, dtype: torch.dtype, relative: float) -> None:
    """The network runs in its own precision; rows are accumulated in float32."""
    model = CASES[case].model().to(dtype)
    x, y = CASES[case].columns(EXAMPLES)
    if x.is_floating_point():
        x = x.to(dtype)
    exact = copy.deepcopy(model).double(), (x.double() if x.is_floating_point() else x, y)
    W = reference.rows(*exact, hf.EWC())
    for approximation in (hf.Full(), hf.Diagonal(), hf.CountSketch(size=2)):
        penalty = hf.Regularizer(hf.EWC(), approximation).consolidate(
            model, batches((x, y), 4), seed=SEED
        )
        assert penalty.matrix.dense().dtype == torch.float32
        expected = approximate(approximation, W, model, divisor=EXAMPLES, seed=SEED)
        close(penalty.matrix.dense(), expected, relative)
