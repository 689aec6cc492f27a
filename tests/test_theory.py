r"""What the paper proves about CountSketch, measured on the hash functions the library draws.

Constants are printed (``pytest -s``): how far the proofs' big O is from what happens.
"""

import functools
import warnings
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import holdfast as hf
from holdfast.hashing import PRIME, Draw, SketchHash
from holdfast.rows import GivenRows

DRAWS = 2000
Z = 4.5  # standard errors; a fixed seed either passes or does not


def spectrum_matrix(values: Sequence[float], n: int, seed: int) -> Tensor:
    """A W (n × m) with the given singular values and incoherent rows."""
    generator = torch.Generator().manual_seed(seed)
    m = len(values)
    left = torch.linalg.qr(torch.randn(n, m, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(m, m, generator=generator, dtype=torch.float64)).Q
    return left * torch.tensor(values, dtype=torch.float64) @ right.T


def spiky_matrix(n: int, m: int) -> Tensor:
    """Rows whose lengths differ a lot: a few examples carry the trace."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(n, m, generator=generator, dtype=torch.float64)
    return rows * torch.logspace(0, -2, n, dtype=torch.float64).unsqueeze(1)


MATRICES = {
    "flat": spectrum_matrix([1.0] * 16, 150, 0),  # stable rank 16
    "decaying": spectrum_matrix([0.8**i for i in range(16)], 150, 1),  # 2.8
    "dominant": spectrum_matrix([1.0] + [0.13] * 15, 150, 2),  # 1.25, as the paper's network
    "spiky": spiky_matrix(150, 16),
    "one row": spectrum_matrix([1.0], 150, 3),
}


@functools.cache
def coefficients(seeds: range, task: int) -> Tensor:
    """The six coefficients (draws, 6) that CountSketch draws for these seeds, whatever its size."""
    drawn = [SketchHash.draw(1, Draw(s, task).generator("sketch")) for s in seeds]
    return torch.tensor([[*h.bucket_coefficients, *h.sign_coefficients] for h in drawn])


def hashed(size: int, n: int, seeds: range, task: int = 0) -> tuple[Tensor, Tensor]:
    """Buckets and signs (draws, n), all draws at once."""
    index = torch.arange(n)
    a, b, c3, c2, c1, c0 = coefficients(seeds, task).unsqueeze(2).unbind(1)
    line, cubic = (a * index + b) % PRIME, c3.expand(-1, n)
    for c in (c2, c1, c0):
        cubic = (cubic * index + c) % PRIME
    return line % size, 1 - 2 * (cubic & 1)


def sketches(W: Tensor, size: int, seeds: range, task: int = 0) -> Tensor:
    """SW for every seed: (draws, t, m)."""
    buckets, signs = hashed(size, len(W), seeds, task)
    out = W.new_zeros(len(buckets) * size, W.shape[1])
    place = buckets + size * torch.arange(len(buckets)).unsqueeze(1)
    out.index_add_(0, place.flatten(), (signs.unsqueeze(2) * W).flatten(0, 1))
    return out.view(len(buckets), size, W.shape[1])


def approximate(recipe: hf.Approximation, W: Tensor, seed: int, task: int = 0) -> hf.PSDMatrix:
    """What the library makes of the rows W, in two batches."""
    space = hf.ParameterSpace(("w",), ((W.shape[1],),))
    state = recipe.start(hf.Setting(space, Draw(seed, task), dtype=W.dtype))
    for index in torch.arange(len(W)).split(len(W) // 2 + 1):
        recipe.update(state, GivenRows(W[index], index))
    return recipe.finish(state)


def assert_mean(samples: Tensor, expected: Tensor | float, z: float = Z) -> None:
    """The mean over dim 0 is the expected one, to within z standard errors, in every entry."""
    error = samples.std(0) / len(samples) ** 0.5
    difference = (samples.mean(0) - expected).abs()
    worst = (difference / error.clamp(min=1e-12)).max()
    assert bool((difference <= z * error + 1e-12).all()), f"{float(worst):.1f} standard errors"


def mean_square_error(W: Tensor, size: int) -> float:
    r"""(1/t)[(tr Ω)² + ‖Ω‖²_F − 2Σᵢ‖aᵢ‖⁴], for Ω = WᵀW."""
    omega = W.T @ W
    fourth = W.square().sum(1).square().sum()
    return float((omega.trace() ** 2 + omega.square().sum() - 2 * fourth) / size)


def relative_errors(W: Tensor, size: int, draws: int = DRAWS) -> Tensor:
    """‖Ω̃ − Ω‖₂ of every draw, in units of ‖Ω‖₂: the worst θ of that draw."""
    omega = W.T @ W
    SW = sketches(W, size, range(draws))
    deviation = SW.transpose(1, 2) @ SW - omega
    return torch.linalg.eigvalsh(deviation).abs().amax(1) / torch.linalg.matrix_norm(omega, 2)


def test_vectorised_sketches_are_those_of_the_library() -> None:
    W = MATRICES["spiky"]
    for seed, task in [(0, 0), (3, 0), (3, 2)]:
        ours = approximate(hf.CountSketch(size=12), W, seed, task)
        assert isinstance(ours, hf.FactoredMatrix)
        torch.testing.assert_close(ours.factor, sketches(W, 12, range(seed, seed + 1), task)[0])


def test_lemma_three_properties_of_the_sketch() -> None:
    """E(Sy)ᵢ = 0, E(Sy)ᵢ(Sy)ⱼ = 0, E(Sy)ᵢ² = ‖y‖²/t."""
    size, draws = 6, 8000
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(40, 1, generator=generator, dtype=torch.float64).cumsum(0)  # correlated rows
    Sy = sketches(y, size, range(draws)).squeeze(2)
    assert_mean(Sy, 0.0)
    products = Sy.unsqueeze(2) * Sy.unsqueeze(1)
    assert_mean(products, torch.eye(size, dtype=torch.float64) * y.square().sum() / size)


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("size", [1, 10, 50])
def test_mean_square_error_is_exactly_the_formula(name: str, size: int) -> None:
    W = MATRICES[name]
    SW = sketches(W, size, range(DRAWS))
    squared = (SW.transpose(1, 2) @ SW - W.T @ W).square().sum((1, 2))
    assert_mean(squared, mean_square_error(W, size))


def test_library_sketch_is_unbiased_with_the_mean_square_error_of_the_formula() -> None:
    """As above, through the approximation itself, with 1/n and with copies."""
    W = MATRICES["spiky"][:40, :6]
    for recipe, rows in [(hf.CountSketch(size=5), 5), (hf.CountSketch(size=5, copies=3), 15)]:
        dense = torch.stack([approximate(recipe, W, s).scale_(1 / 40).dense() for s in range(300)])
        omega = W.T @ W / 40
        assert_mean(dense, omega)
        squared = (dense - omega).square().sum((1, 2))
        assert_mean(squared, mean_square_error(W / 40**0.5, rows))


@pytest.mark.parametrize("name", MATRICES)
def test_theorem_1_all_directions_at_once(name: str) -> None:
    """The 0.99 quantile of ‖Ω̃−Ω‖₂/‖Ω‖₂ is C·r/√t; Chebyshev promises C ≤ √200 ≈ 14.

    With more buckets than rows the pairwise buckets show their heavy tail: now and then a draw sends
    many rows to few buckets. The promise holds all the same.
    """
    W = MATRICES[name]
    r = float(W.square().sum() / torch.linalg.matrix_norm(W, 2) ** 2)
    constants = {}
    for size in (10, 30, 100, 400):
        quantile = float(relative_errors(W, size).quantile(0.99))
        constants[size] = quantile * size**0.5 / r
        print(f"theorem 1, {name}: r={r:.2f} t={size} q99={quantile:.3f} C={constants[size]:.2f}")
    assert max(constants.values()) <= 200**0.5
    fewer = [c for size, c in constants.items() if size < len(W)]
    assert max(fewer) <= 5
    assert max(fewer) <= 2 * min(fewer)  # the rate is 1/√t, not another one


@pytest.mark.parametrize("name", MATRICES)
def test_theorem_of_the_appendix_trades_k_for_size(name: str) -> None:
    """t = C·k²/(ε²δ) gives error ≤ ε(‖W‖₂² + ‖W‖²_F/k) with probability 1−δ, for every k, δ."""
    W = MATRICES[name]
    norm, trace = float(torch.linalg.matrix_norm(W, 2) ** 2), float(W.square().sum())
    largest = 0.0
    for size in (25, 200):
        errors = relative_errors(W, size) * norm
        for k in (1, 2, 4, 16):
            for delta in (0.01, 0.1, 0.5):
                epsilon = float(errors.quantile(1 - delta)) / (norm + trace / k)
                largest = max(largest, size * epsilon**2 * delta / k**2)
    print(f"appendix theorem, {name}: C={largest:.3f}")
    assert largest <= 0.5  # Chebyshev on the mean-square formula promises 2


def test_bound_by_the_formula_holds_for_every_direction() -> None:
    """Chebyshev: P(‖Ω̃−Ω‖₂ ≥ s) ≤ E‖Ω̃−Ω‖²_F / s², at several s."""
    for name, W in MATRICES.items():
        errors = relative_errors(W, 50) * torch.linalg.matrix_norm(W, 2) ** 2
        for factor in (1.5, 2.0, 3.0, 10.0):
            limit = factor * mean_square_error(W, 50) ** 0.5
            share = float((errors >= limit).double().mean())
            assert share <= 1 / factor**2 + Z * (0.25 / DRAWS) ** 0.5, name


def five_tasks() -> tuple[list[Tensor], Tensor]:
    """W_k θ of five tasks of different sizes and lengths, and their weights."""
    generator = torch.Generator().manual_seed(9)
    lengths, scales = (80, 120, 40, 200, 100), (1.0, 0.2, 3.0, 0.7, 1.5)
    ys = [
        s * torch.randn(n, 1, generator=generator, dtype=torch.float64)
        for n, s in zip(lengths, scales, strict=True)
    ]
    alpha = 0.25  # a moving average with start="first"
    weights = [(1 - alpha) ** 4] + [alpha * (1 - alpha) ** (4 - k) for k in range(1, 5)]
    return ys, torch.tensor(weights, dtype=torch.float64)


def test_theorem_2_fixed_direction_over_five_tasks() -> None:
    """The 0.99 quantile of the relative error is ≤ C/√t, C the same for every t."""
    ys, weights = five_tasks()
    exact = sum(float(w * y.square().sum()) for w, y in zip(weights, ys, strict=True))
    constants = []
    for size in (25, 50, 100, 400):
        merged = torch.zeros(DRAWS, size, dtype=torch.float64)
        for task, (w, y) in enumerate(zip(weights, ys, strict=True)):
            merged += w**0.5 * sketches(y, size, range(DRAWS), task).squeeze(2)
        estimates = merged.square().sum(1)
        assert_mean(estimates, exact)
        quantile = float((estimates / exact - 1).abs().quantile(0.99))
        constants.append(quantile * size**0.5)
        print(f"theorem 2: t={size} q99={quantile:.3f} C={constants[-1]:.2f}")
    assert max(constants) <= 5  # Chebyshev promises √200 ≈ 14
    assert max(constants) <= 2 * min(constants)


def test_merged_rows_have_the_mean_square_error_of_one_sketch_of_all_rows() -> None:
    """√α S₁W₁ + √(1−α) S₂W₂ is a CountSketch of the stacked, scaled rows."""
    generator = torch.Generator().manual_seed(4)
    first, second = (torch.randn(30, 5, generator=generator, dtype=torch.float64) for _ in "12")
    stacked = torch.cat([0.25**0.5 * first, 0.75**0.5 * second])
    SW = 0.25**0.5 * sketches(first, 8, range(4000), 0)
    SW += 0.75**0.5 * sketches(second, 8, range(4000), 1)
    dense = SW.transpose(1, 2) @ SW
    omega = stacked.T @ stacked
    assert_mean(dense, omega)
    assert_mean((dense - omega).square().sum((1, 2)), mean_square_error(stacked, 8))


class Linear(nn.Module):
    """φ(x) = θᵀx: the rows of W are the inputs."""

    def __init__(self, m: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(m, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def value(outputs: Tensor, batch: object) -> Tensor:
    return outputs


def merged(recipe: hf.Regularizer, tasks: Sequence[Tensor], seed: int) -> Tensor:
    """The matrix after all tasks, the same seed given each time, as a loop would."""
    model, penalty = Linear(tasks[0].shape[1]), None
    for X in tasks:
        penalty = recipe.consolidate(model, [(X,)], previous=penalty, seed=seed, progress=False)
    assert penalty is not None
    return penalty.matrix.dense()


@pytest.mark.parametrize("merge", ["rows", "stack"])
def test_merged_sketches_are_unbiased_with_a_constant_seed(merge: str) -> None:
    """Fails if hashes are shared: the tasks' rows are alike, so cross terms would double the mean."""
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    tasks = [base, base + 0.1, 1.5 * base]
    recipe = hf.Regularizer(
        hf.Custom(value), hf.CountSketch(size=3, merge=merge), history=hf.MovingAverage(new=0.4)
    )
    found = torch.stack([merged(recipe, tasks, seed) for seed in range(150)])
    exact = [X.T @ X / 12 for X in tasks]
    omega = exact[0]
    for new in exact[1:]:
        omega = 0.4 * new + 0.6 * omega
    assert_mean(found, omega)
    # with one hash for all tasks the mean would be that of the summed rows
    total = 0.6 * base + (0.4 * 0.6) ** 0.5 * tasks[1] + 0.4**0.5 * tasks[2]
    shared = total.T @ total / 12
    assert float((shared.trace() - omega.trace()).abs() / omega.trace()) > 0.8
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(found, shared)


def test_copies_gain_nothing_in_mean_square_at_equal_memory() -> None:
    """c sketches of t/c rows: (1/c)·B/(t/c) = B/t. Averaging only trims the tail."""
    W = MATRICES["decaying"]
    size = 48
    expected = mean_square_error(W, size)
    omega = W.T @ W
    for copies in (1, 4, 12):
        parts = [
            sketches(W, size // copies, range(c * DRAWS, (c + 1) * DRAWS)) for c in range(copies)
        ]
        dense = sum((P.transpose(1, 2) @ P for P in parts), torch.zeros_like(omega)) / copies
        squared = (dense - omega).square().sum((1, 2))
        assert_mean(squared, expected)
        ratio = float(squared.mean() / expected)
        tail = float(squared.quantile(0.99) / expected)
        print(f"copies={copies} size={size // copies}: mean {ratio:.3f}, q99 {tail:.2f} (of B/t)")


def test_copies_divide_the_mean_square_error_at_equal_size() -> None:
    """Through the library: its copies are independent, and their matrices are averaged."""
    W = MATRICES["decaying"][:50, :4]
    omega = W.T @ W
    for copies in (1, 4):
        recipe = hf.CountSketch(size=4, copies=copies)
        dense = torch.stack([approximate(recipe, W, s).dense() for s in range(300)])
        assert_mean(dense, omega)
        assert_mean((dense - omega).square().sum((1, 2)), mean_square_error(W, 4 * copies))


def test_signs_must_be_fourfold_independent() -> None:
    """Equal rows show it: with pairwise signs the mean-square error is measurably wrong."""
    n, size = 16, 2
    W = torch.ones(n, 1, dtype=torch.float64)  # the index alone decides
    expected = mean_square_error(W, size)
    SW = sketches(W, size, range(DRAWS))
    assert_mean((SW.square().sum((1, 2)) - n).square(), expected)
    a, b, _, _, c1, c0 = coefficients(range(DRAWS), 0).unsqueeze(2).unbind(1)
    index = torch.arange(n)
    buckets = (a * index + b) % PRIME % size
    signs = (1 - 2 * ((c1 * index + c0) % PRIME & 1)).double()
    sums = torch.zeros(DRAWS, size, dtype=torch.float64).scatter_add_(1, buckets, signs)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean((sums.square().sum(1) - n).square(), expected)


def test_a_sketch_as_large_as_the_data_is_allowed_and_advised_against() -> None:
    W = MATRICES["flat"][:20]
    with pytest.warns(UserWarning, match=r"CountSketch\(size=20\) of 20 rows: LowRank\(rank=20\)"):
        approximate(hf.CountSketch(size=20), W, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        approximate(hf.CountSketch(size=19), W, 0)
        exact = approximate(hf.LowRank(rank=20), W, 0)
    torch.testing.assert_close(exact.dense(), W.T @ W)
