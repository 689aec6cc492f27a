"""The families of sketches: what each promises, against dense algebra and over many draws."""

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import holdfast as hf
import reference
from holdfast.hashing import Draw
from holdfast.rows import GivenRows
from models_zoo import CASES, batches, flat, nudge
from recipes_table import approximate, close, sketched

SEED = 8
Z = 5.0  # standard errors a mean may be off
DRAWS = 400

# What each family is at a budget of t rows, t a multiple of 4.
LINEAR: dict[str, Callable[[int], hf.Approximation]] = {
    "count_sketch": lambda t: hf.CountSketch(size=t),
    "rademacher": lambda t: hf.DenseSketch(size=t),
    "gaussian": lambda t: hf.DenseSketch(size=t, kind="gaussian"),
    "osnap": lambda t: hf.OSNAP(size=t, nonzeros=2),
    "srht": lambda t: hf.SRHT(size=t),
    "srht-blocks": lambda t: hf.SRHT(size=t, block=8),
}
every_linear = pytest.mark.parametrize("family", LINEAR)


@functools.cache
def given(n: int = 30, m: int = 5, seed: int = 0) -> Tensor:
    """Rows with a decaying spectrum, a few of them much larger than the others."""
    generator = torch.Generator().manual_seed(seed)
    W = torch.randn(n, m, generator=generator, dtype=torch.float64)
    W *= 0.6 ** torch.arange(m)
    W[::7] *= 4
    return W


def take(
    recipe: hf.Approximation, W: Tensor, seed: int = SEED, task: int = 0, batch: int = 64
) -> hf.FactoredMatrix:
    """What the library makes of the rows W."""
    space = hf.ParameterSpace(("w",), ((W.shape[1],),))
    state = recipe.start(hf.Setting(space, Draw(seed, task), dtype=W.dtype))
    for index in torch.arange(len(W)).split(batch):
        recipe.update(state, GivenRows(W[index], index))
    found = recipe.finish(state)
    assert isinstance(found, hf.FactoredMatrix)
    return found


def assert_mean(samples: Tensor, expected: Tensor | float) -> None:
    """The mean over dim 0 is the expected one, to within Z standard errors, in every entry."""
    error = samples.std(0) / len(samples) ** 0.5
    difference = (samples.mean(0) - expected).abs()
    worst = float((difference / error.clamp(min=1e-12)).max())
    assert bool((difference <= Z * error + 1e-12).all()), f"{worst:.1f} standard errors"


def pairs(W: Tensor) -> Tensor:
    """‖wᵢ‖²‖wⱼ‖² + ⟨wᵢ, wⱼ⟩² of every pair of rows: what a collision of the two costs."""
    K = W @ W.T
    return torch.outer(K.diagonal(), K.diagonal()) + K.square()


def mean_square_error(family: str, W: Tensor, t: int) -> float:
    """E‖Ω̃ − Ω‖²_F, exactly."""
    cost = pairs(W)
    if family == "gaussian":  # the squares of the entries vary too
        return float(cost.sum() / t)
    cost.fill_diagonal_(0)
    if family.startswith("srht"):
        block = 8 if family == "srht-blocks" else 1024
        number = torch.arange(len(W)) // block
        together = number.unsqueeze(1) == number
        cost = torch.where(together, (block - t) / (block - 1) * cost, cost)
    return float(cost.sum() / t)


# ---- linear sketches ----


@every_linear
def test_the_factor_is_the_matrix_times_the_rows(family: str) -> None:
    """Row by row, not only as FᵀF; 3,000 rows cross the chunks in which numbers are drawn."""
    recipe, W = LINEAR[family](8), given(3000, 4)
    close(take(recipe, W, task=2, batch=700).factor, sketched(recipe, W, seed=SEED, task=2))


@every_linear
def test_batches_do_not_matter(family: str) -> None:
    recipe, W = LINEAR[family](4), given(1100, 3)
    whole = take(recipe, W, batch=1100).factor
    for batch in (1, 7, 64, 1024, 1025):
        close(take(recipe, W, batch=batch).factor, whole)


@every_linear
def test_rows_in_any_order_keep_their_numbers(family: str) -> None:
    """The numbers belong to row indices: a batch may hold any of them."""
    recipe, W = LINEAR[family](4), given(2100, 3)
    whole = take(recipe, W).factor
    setting = hf.Setting(hf.ParameterSpace(("w",), ((3,),)), Draw(SEED), dtype=torch.float64)
    state = recipe.start(setting)
    order = torch.randperm(2100, generator=torch.Generator().manual_seed(0))
    for index in order.split(100):
        recipe.update(state, GivenRows(W[index], index))
    found = recipe.finish(state)
    assert isinstance(found, hf.FactoredMatrix)
    close(found.factor, whole)


@every_linear
def test_unbiased_with_the_mean_square_error_of_the_formula(family: str) -> None:
    recipe, W = LINEAR[family](4), given()
    omega = W.T @ W
    dense = torch.stack([take(recipe, W, seed).dense() for seed in range(DRAWS)])
    assert_mean(dense, omega)
    assert_mean((dense - omega).square().sum((1, 2)), mean_square_error(family, W, 4))


@every_linear
@pytest.mark.parametrize("merge", ["rows", "stack"])
def test_merged_tasks_are_unbiased_for_a_constant_seed(family: str, merge: str) -> None:
    """Tasks with the same rows, so that shared randomness would double the mean."""
    recipe = copy.copy(LINEAR[family](4))
    object.__setattr__(recipe, "merge", merge)
    W = given(12, 3)
    found = []
    for seed in range(DRAWS):
        both, offset = recipe.add(take(recipe, W, seed, 0), (), take(recipe, W, seed, 1))
        assert offset == ()
        found.append(both.dense())
    assert_mean(torch.stack(found), 2 * W.T @ W)
    F = [sketched(recipe, W, seed=DRAWS - 1, task=k) for k in range(2)]
    close(both.factor, F[0] + F[1] if merge == "rows" else torch.cat(F))


@every_linear
def test_every_seed_and_task_has_its_own_name(family: str) -> None:
    recipe = LINEAR[family](4)
    space = hf.ParameterSpace(("w",), ((3,),))
    settings = [hf.Setting(space, Draw(*key)) for key in ((0, 0), (0, 1), (1, 0), (0, 0, 1))]
    names = [recipe.hash_ids(setting) for setting in settings]
    assert len({name for found in names for name in found}) == sum(map(len, names))
    assert recipe.hash_ids(settings[0]) == names[0]


@every_linear
def test_as_many_rows_as_it_sketches_is_allowed_and_advised_against(family: str) -> None:
    recipe = LINEAR[family](4)
    message = rf"{type(recipe).__name__}\(size=4\) of 4 rows: LowRank\(rank=4\)"
    with pytest.warns(UserWarning, match=message):
        take(recipe, given(4))
    take(recipe, given(5))


def test_osnap_is_copies_of_a_count_sketch() -> None:
    W = given()
    one, two = take(hf.OSNAP(size=12, nonzeros=3), W), take(hf.CountSketch(4, copies=3), W)
    assert torch.equal(one.factor, two.factor)
    S = sketched(hf.OSNAP(size=12, nonzeros=3), torch.eye(30, dtype=torch.float64))
    assert (S != 0).sum(0).tolist() == [3] * 30
    close(S.square().sum(0), torch.ones(30))


def test_a_whole_hadamard_block_is_exact() -> None:
    """t = B: an orthogonal matrix, for as many rows as the block has and for fewer."""
    for n in (3, 16):
        W = given(n)
        state = hf.SRHT(size=16, block=16)
        with pytest.warns(UserWarning, match="LowRank"):
            close(take(state, W).dense(), W.T @ W)
    W = given(17)
    assert float((take(hf.SRHT(size=16, block=16), W).dense() - W.T @ W).abs().max()) > 1e-3


def test_more_entries_per_column_have_a_lighter_tail() -> None:
    """The mean-square error is the same for s = 1 and for signs everywhere; the worst draws are not."""
    W = given(200, 4)
    omega = W.T @ W

    def quantile(recipe: hf.Approximation) -> float:
        draws = torch.stack([take(recipe, W, seed, batch=200).dense() for seed in range(300)])
        errors = torch.linalg.matrix_norm(draws - omega, 2) / torch.linalg.matrix_norm(omega, 2)
        return float(errors.quantile(0.99))

    one, all_ = quantile(hf.CountSketch(size=64)), quantile(hf.DenseSketch(size=64))
    assert all_ < one


# ---- into Frequent Directions ----


def test_groups_with_shrinking_are_a_count_sketch_into_frequent_directions() -> None:
    """The groups are the buckets of a sketch with one entry ±1 per column, streamed and shrunk."""
    n, rank, group = 400, 6, 5
    W = given(n, 60)
    h = reference.Hash(1, SEED, 0, "groups")
    buckets = rank + -(-(n - rank) // group)
    S = torch.zeros(buckets, n, dtype=torch.float64)
    for i in range(n):
        S[i if i < rank else rank + (i - rank) // group, i] = 1 if i < rank else h.sign(i)
    assert (S != 0).sum(0).tolist() == [1] * n
    directions = hf.LowRank(rank=rank, group=1, shrink=True)
    found = take(hf.LowRank(rank=rank, group=group, shrink=True), W)
    close(found.dense(), take(directions, S @ W).dense(), 1e-8)
    assert float((found.dense() - take(directions, W).dense()).abs().max()) > 1e-3


# ---- Nyström ----


def largest(matrix: Tensor) -> float:
    return float(torch.linalg.eigvalsh(matrix)[-1])


@pytest.mark.parametrize("size", [1, 2, 5, 9, 40])
def test_nystrom_is_its_formula(size: int) -> None:
    W = given(50, 9)
    omega = W.T @ W
    G = torch.from_numpy(
        reference.generator(3, 0, "test_matrix").standard_normal((9, min(size, 9)))
    )
    Y = omega @ G
    expected = Y @ torch.linalg.solve(G.T @ Y, Y.T)
    found = take(hf.Nystrom(size=size, seed=3), W)
    close(found.dense(), expected)
    close(reference.nystrom(omega, size, 3), expected)
    close(found.dense() @ G, Y)  # it keeps its product with G: this is why merging is exact
    assert len(found.factor) == min(size, 9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 3, 8, 20, 60])
@pytest.mark.parametrize("decay", [0.99, 0.7, 0.3])
def test_nystrom_is_never_above(dtype: torch.dtype, size: int, decay: float) -> None:
    """Also where the spectrum falls far below the rounding of float32."""
    generator = torch.Generator().manual_seed(1)
    W = torch.randn(300, 60, generator=generator, dtype=torch.float64)
    W = (W @ torch.linalg.qr(torch.randn(60, 60, generator=generator, dtype=torch.float64)).Q) * (
        decay ** (0.5 * torch.arange(60))
    )
    omega = W.T @ W
    rounding = 10 * torch.finfo(dtype).eps * largest(omega)
    for batch in (1, 300):
        found = take(hf.Nystrom(size=size), W.to(dtype), batch=batch)
        assert largest(found.dense().double() - omega) <= rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nystrom_is_exact_from_the_rank_on(dtype: torch.dtype) -> None:
    """Six rows, forty entries: six columns of G are enough, and no more than six rows are kept."""
    W = torch.randn(6, 40, generator=torch.Generator().manual_seed(2), dtype=dtype)
    omega = W.T.double() @ W.double()
    for size in (6, 7, 20, 40, 100):
        found = take(hf.Nystrom(size=size), W, batch=4)
        close(found.dense(), omega, 1e4 * torch.finfo(dtype).eps)
        assert len(found.factor) == 6
    assert largest(omega - take(hf.Nystrom(size=5), W).dense().double()) > 0.01 * largest(omega)


def test_the_mean_trace_error_of_nystrom_keeps_its_bound() -> None:
    """E tr(Ω − Ω̂) ≤ (1 + k/(l−k−1)) Σ_{j>k} λ_j for every k, over G."""
    W, size = given(100, 20), 8
    omega = W.T @ W
    values = torch.linalg.eigvalsh(omega).flip(0)
    errors = [float(omega.trace() - take(hf.Nystrom(size, seed), W).trace()) for seed in range(60)]
    mean = sum(errors) / len(errors)
    bounds = [(1 + k / (size - k - 1)) * float(values[k:].sum()) for k in range(size - 1)]
    assert float(values[size:].sum()) < mean < min(bounds)


def test_nystrom_does_not_read_the_seed_of_the_task() -> None:
    W = given(30, 9)
    one = take(hf.Nystrom(size=4), W, seed=1, task=0).factor
    assert torch.equal(take(hf.Nystrom(size=4), W, seed=2, task=5).factor, one)
    assert not torch.allclose(take(hf.Nystrom(size=4, seed=1), W).factor, one)
    setting = hf.Setting(hf.ParameterSpace(("w",), ((9,),)), Draw(0))
    assert hf.Nystrom(size=4).hash_ids(setting) == ()


@pytest.mark.parametrize(
    ("history", "weights"),
    [
        (hf.Sum(), [1.0] * 5),
        (hf.Mean(), [0.2] * 5),
        (hf.MovingAverage(new=0.3), [0.7**4, *(0.3 * 0.7 ** (4 - k) for k in range(1, 5))]),
        (hf.MovingAverage(new=1.0), [0.0, 0.0, 0.0, 0.0, 1.0]),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [2, 5, 27, 200])
def test_nystrom_of_five_tasks_is_that_of_their_sum(
    history: hf.History, weights: list[float], size: int
) -> None:
    """No error is added by merging, whatever the weights: through `consolidate`, a loop."""
    case, recipe = CASES["mlp"], hf.Regularizer(hf.EWC(), hf.Nystrom(size=size), history=history)
    model, penalty, omega = case.model(), None, torch.zeros(())
    for k, weight in enumerate(weights):
        model = nudge(copy.deepcopy(model), seed=k)
        columns = case.columns(6, seed=k)
        penalty = recipe.consolidate(model, batches(columns, 4), previous=penalty, seed=SEED)
        omega = omega + weight * reference.omega(model, columns, hf.EWC())
    assert penalty is not None
    close(penalty.matrix.dense(), reference.nystrom(omega, size), 1e-9)
    assert len(penalty.matrix.factor) <= size
    if size >= 27:
        close(penalty.matrix.dense(), omega, 1e-9)


@pytest.mark.parametrize("size", [2, 5])
def test_nystrom_merges_in_any_order(size: int) -> None:
    recipe = hf.Nystrom(size=size)
    a, b, c = (take(recipe, given(20, 9, seed)) for seed in range(3))
    left = recipe.add(recipe.add(a, (), b)[0], (), c)[0]
    right = recipe.add(a, (), recipe.add(c, (), b)[0])[0]
    close(left.dense(), right.dense(), 1e-9)
    total = sum((given(20, 9, seed).T @ given(20, 9, seed) for seed in range(3)), torch.zeros(()))
    close(left.dense(), reference.nystrom(total, size), 1e-9)


def test_nystrom_reports_what_overflows_and_what_is_zero() -> None:
    """Y squares the rows: float32 ends there before it ends for the rows."""
    assert not bool(take(hf.Nystrom(size=2), torch.full((3, 4), 1e30)).trace().isfinite())
    model = nn.Linear(4, 1, bias=False)
    recipe = hf.Regularizer(hf.Custom(lambda outputs, batch: outputs[:, 0]), hf.Nystrom(size=2))
    with pytest.raises(ValueError, match="NaN or inf entries in: weight"):
        recipe.consolidate(model, [(torch.full((3, 4), 1e30),)], progress=False)
    with pytest.warns(hf.ImportanceWarning, match="zero"):
        penalty = recipe.consolidate(model, [(torch.zeros(3, 4),)], progress=False)
    assert float(penalty(model).detach()) == 0


def test_stacked_nystrom_is_the_sum_of_the_matrices() -> None:
    recipe = hf.Nystrom(size=2, merge="stack")
    a, b = (take(recipe, given(20, 9, seed)) for seed in range(2))
    both = recipe.add(a, (), b)[0]
    close(both.dense(), a.dense() + b.dense())
    assert both.factor.shape == (4, 9)


# ---- several anchors ----


def linear(seed: int) -> nn.Module:
    return nudge(nn.Linear(5, 1, bias=False).double(), seed=seed, scale=1.0)


@every_linear
def test_each_anchor_is_unbiased(family: str) -> None:
    """Two tasks that pull to two places, as one penalty of constant size."""
    W, models, probe = [given(10, 5, k) for k in range(2)], [linear(0), linear(1)], linear(2)
    recipe = hf.Regularizer(hf.EWC(), LINEAR[family](4), anchor="each")
    found = []
    for seed in range(DRAWS):
        penalty = None
        for k, model in enumerate(models):
            matrix = 0.1 * take(recipe.approximation, W[k], seed, k)
            record = hf.TaskRecord(10, seed, (f"{seed}:{k}",))
            penalty = recipe.extend(penalty, model, matrix, record)
        assert penalty is not None
        assert penalty.matrix.factor.shape == (4, 5)
        found.append(penalty(probe).detach())
    exact = torch.zeros(())
    for k, model in enumerate(models):
        exact = exact + reference.quadratic(0.1 * W[k].T @ W[k], flat(probe), flat(model), 1.0)
    assert_mean(torch.stack(found), exact)


@pytest.mark.parametrize("size", [20, 3])
def test_each_anchor_of_nystrom(size: int) -> None:
    """Exact while the rows of all tasks fit; otherwise offset and factor are projected alike."""
    W, models, probe = [given(6, 12, k) for k in range(2)], [], torch.zeros(())
    recipe = hf.Regularizer(hf.EWC(), hf.Nystrom(size=size), anchor="each")
    for k in range(3):
        models.append(nudge(nn.Linear(12, 1, bias=False).double(), seed=k, scale=1.0))
    probe, penalty = models.pop(), None
    for k, model in enumerate(models):
        penalty = recipe.extend(
            penalty, model, take(recipe.approximation, W[k]), hf.TaskRecord(6, 0)
        )
    assert penalty is not None
    forms = [approximate(recipe.approximation, rows, probe, divisor=1) for rows in W]
    terms = zip(forms, models, strict=True)
    separate = sum(reference.quadratic(A, flat(probe), flat(at), 1.0) for A, at in terms)
    if size == 20:
        close(penalty(probe).detach(), torch.as_tensor(separate), 1e-9)
    else:
        assert 0 < float(penalty(probe).detach()) < float(separate)
    close(penalty.matrix.dense(), reference.nystrom(sum(w.T @ w for w in W), size), 1e-9)
