"""Streaming low rank: what each setting promises, on matrices of known spectrum."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import holdfast as hf
import reference
from holdfast import regrouping
from holdfast.approximation import low_rank
from holdfast.approximation.truncation import rotate
from holdfast.hashing import Draw, SketchHash
from holdfast.rows import GivenRows, RowBatch

SPECTRA = {
    "flat": [1.0] * 20,
    "linear": [1 - i / 20 for i in range(20)],
    "geometric": [0.6**i for i in range(20)],
    "step": [1.0] * 4 + [0.05] * 16,
    "rank 3": [2.0, 1.0, 0.5] + [0.0] * 17,
}


def known(values: Sequence[float], n: int = 90, seed: int = 0) -> Tensor:
    """n rows whose Gram matrix has the squares of ``values`` as eigenvalues."""
    generator = torch.Generator().manual_seed(seed)
    m = len(values)
    left = torch.linalg.qr(torch.randn(n, m, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(m, m, generator=generator, dtype=torch.float64)).Q
    return left * torch.tensor(values, dtype=torch.float64) @ right.T


class UncutRows(GivenRows):
    """Rows of a batch that cannot be cut along its first dimension."""

    @property
    def columns(self) -> None:  # type: ignore[override]
        return None


def stream(
    recipe: hf.LowRank,
    W: Tensor,
    batch: int = 16,
    seed: int = 0,
    kind: type[GivenRows] = GivenRows,
) -> hf.FactoredMatrix:
    space = hf.ParameterSpace(("w",), ((W.shape[1],),))
    state = recipe.start(hf.Setting(space, Draw(seed), dtype=W.dtype))
    for index in torch.arange(len(W)).split(batch):
        rows: RowBatch = kind(W[index], index)
        recipe.update(state, rows)
    return recipe.finish(state)


def eigenvalues(matrix: Tensor) -> Tensor:
    """Largest first."""
    return torch.linalg.eigvalsh(matrix).flip(0)


def assert_below(smaller: Tensor, larger: Tensor) -> None:
    """smaller ⪯ larger."""
    assert float(torch.linalg.eigvalsh(larger - smaller)[0]) >= -1e-10


def assert_frequent_directions(omega_hat: Tensor, omega: Tensor, rank: int) -> None:
    """0 ≤ ‖Ax‖² − ‖Bx‖² ≤ ‖A − A_k‖²_F/(t + 1 − k) for every unit x and every k ≤ t.

    One better than the usual t − k: what is subtracted is the first eigenvalue that is dropped, and t
    kept rows lose it together with the dropped one.
    """
    assert_below(omega_hat, omega)
    worst = float(eigenvalues(omega - omega_hat)[0])
    values = eigenvalues(omega).clamp(min=0)
    for k in range(min(rank, len(values)) + 1):
        assert worst <= float(values[k:].sum()) / (rank + 1 - k) + 1e-10, k


@settings(deadline=None, max_examples=25)
@given(
    n=st.integers(1, 45),
    spare=st.integers(0, 40),
    m=st.integers(1, 12),
    group=st.sampled_from(["auto", 1, 2, 7, 64]),
    shrink=st.booleans(),
    batch=st.integers(1, 50),
)
def test_exact_when_all_rows_fit(
    n: int, spare: int, m: int, group: int | str, shrink: bool, batch: int
) -> None:
    W = torch.randn(n, m, dtype=torch.float64)
    found = stream(hf.LowRank(rank=n + spare, group=group, shrink=shrink), W, batch)
    torch.testing.assert_close(found.dense(), W.T @ W)


@pytest.mark.parametrize("group", ["auto", 1, 5])
def test_one_row_too_many_is_truncated(group: int | str) -> None:
    W = known(SPECTRA["linear"], n=41)
    found = stream(hf.LowRank(rank=19, group=group), W)
    assert found.factor.shape == (19, 20)
    assert not torch.allclose(found.dense(), W.T @ W)


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("rank", [1, 3, 8, 40])
@pytest.mark.parametrize("shrink", [False, True])
def test_single_rows_stay_below_the_matrix(spectrum: str, rank: int, shrink: bool) -> None:
    W = known(SPECTRA[spectrum])
    found = stream(hf.LowRank(rank=rank, group=1, shrink=shrink), W)
    assert len(found.factor) <= rank
    assert_below(found.dense(), W.T @ W)


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5, 8, 15])
@pytest.mark.parametrize("order", ["mixed", "sorted"])
def test_frequent_directions_bound(spectrum: str, rank: int, order: str) -> None:
    W = known(SPECTRA[spectrum], n=150)
    if order == "sorted":  # the smallest rows first is hard for a stream
        W = W[W.norm(dim=1).argsort()]
    found = stream(hf.LowRank(rank=rank, group=1, shrink=True), W)
    assert_frequent_directions(found.dense(), W.T @ W, rank)


def adversarial(strength: float, parts: int, strong: int = 4) -> list[Tensor]:
    """A few strong directions, then a weak one again and again: each time too weak to be kept."""
    generator = torch.Generator().manual_seed(3)
    m = strong + 8
    basis = torch.linalg.qr(torch.randn(m, m, generator=generator, dtype=torch.float64)).Q
    return [strength * basis[:strong], *([basis[strong : strong + 1]] * parts)]


def test_frequent_directions_bound_where_truncation_alone_breaks_it() -> None:
    # as many strong rows as are kept while streaming; a full buffer of weak rows is weaker than one
    W = torch.cat(adversarial(8.0, 3000, strong=32))
    shrunk = stream(hf.LowRank(rank=32, group=1, shrink=True), W).dense()
    assert_frequent_directions(shrunk, W.T @ W, 32)
    cut = stream(hf.LowRank(rank=32, group=1), W).dense()
    with pytest.raises(AssertionError):
        assert_frequent_directions(cut, W.T @ W, 32)


class Held(nn.Module):
    """A model with nothing but the parameters."""

    def __init__(self, m: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(m, dtype=torch.float64))


def merged(recipe: hf.LowRank, history: hf.History, tasks: Sequence[Tensor]) -> Tensor:
    regularizer = hf.Regularizer(hf.MAS(), recipe, history=history)
    model, penalty = Held(tasks[0].shape[1]), None
    for k, W in enumerate(tasks):
        matrix = stream(recipe, W, seed=k).scale_(1 / len(W))
        penalty = regularizer.extend(penalty, model, matrix, hf.TaskRecord(len(W), 0))
    assert penalty is not None
    return penalty.matrix.dense()


@pytest.mark.parametrize("history", [hf.Sum(), hf.Mean(), hf.MovingAverage(new=0.3)])
@pytest.mark.parametrize("rank", [2, 5])
def test_frequent_directions_bound_after_merging_tasks(history: hf.History, rank: int) -> None:
    tasks = [known(SPECTRA["geometric"], seed=s) for s in range(3)]
    tasks += [known(SPECTRA["flat"], seed=3), known(SPECTRA["step"], seed=4)]
    found = merged(hf.LowRank(rank=rank, group=1, shrink=True), history, tasks)
    omega = torch.zeros_like(found)
    for k, W in enumerate(tasks):
        old, new = history.weights(k)
        omega = old * omega + new * W.T @ W / len(W)
    assert_frequent_directions(found, omega, rank)


def test_merging_shrinks_too() -> None:
    """A direction that every task repeats must not be lost for ever, as truncation would."""
    parts = [len(W) ** 0.5 * W for W in adversarial(1.2, 30)]  # undo 1/n
    omega = sum((W.T @ W / len(W) for W in parts), torch.zeros(12, 12, dtype=torch.float64))
    shrunk = merged(hf.LowRank(rank=4, group=1, shrink=True), hf.Sum(), parts)
    assert_frequent_directions(shrunk, omega, 4)
    cut = merged(hf.LowRank(rank=4, group=1), hf.Sum(), parts)
    with pytest.raises(AssertionError):
        assert_frequent_directions(cut, omega, 4)


@pytest.mark.parametrize("spectrum", ["geometric", "step", "rank 3"])
def test_truncation_is_close_to_the_best_low_rank(spectrum: str) -> None:
    W = known(SPECTRA[spectrum], n=200)
    omega = W.T @ W
    best = eigenvalues(omega)[4:].square().sum().sqrt()
    found = stream(hf.LowRank(rank=4, group=1), W)
    error = torch.linalg.matrix_norm(omega - found.dense())
    assert float(error) <= 1.5 * float(best) + 1e-9


@pytest.mark.parametrize("rank", [1, 3, 10])
def test_a_small_rank_on_a_flat_spectrum_is_close_to_the_best(rank: int) -> None:
    W = known([1 - i / 100 for i in range(40)], n=900)
    best = eigenvalues(W.T @ W)[rank:].square().sum() / eigenvalues(W.T @ W).square().sum()
    found = stream(hf.LowRank(rank=rank, group=1), W).dense()
    error = (found - W.T @ W).square().sum() / (W.T @ W).square().sum()
    assert error < 1.02 * best


def test_rank_one_is_the_leading_eigenvector() -> None:
    W = known([1.0, *([0.1] * 9)], n=120)
    found = stream(hf.LowRank(rank=1, group=1), W)
    assert found.factor.shape == (1, 10)
    leading = torch.linalg.eigh(W.T @ W).eigenvectors[:, -1]
    direction = found.factor[0] / found.factor.norm()
    assert abs(float(direction @ leading)) > 0.999
    assert float(found.trace()) <= 1 + 1e-12


@pytest.mark.parametrize("kind", [GivenRows, UncutRows])
@pytest.mark.parametrize(
    "recipe",
    [
        hf.LowRank(rank=1),
        hf.LowRank(rank=1, group=1),
        hf.LowRank(rank=4, group=5),
        hf.LowRank(rank=4, group=5, shrink=True),
        hf.LowRank(rank=40, group=3),
        hf.LowRank(rank=9, group=1, shrink=True),
    ],
    ids=str,
)
def test_any_batch_size_gives_the_same(recipe: hf.LowRank, kind: type[GivenRows]) -> None:
    W = known(SPECTRA["linear"], n=230)
    whole = stream(recipe, W, 230)
    for batch in (1, 7, 64):
        found = stream(recipe, W, batch, kind=kind)
        torch.testing.assert_close(found.dense(), whole.dense(), rtol=1e-10, atol=1e-12)


def test_groups_are_sums_of_consecutive_rows_with_the_signs_of_their_index() -> None:
    """Against the definition: first rows alone, then groups; the buffer never fills."""
    W = torch.randn(20, 6, dtype=torch.float64)
    signs = SketchHash.draw(1, Draw(5).generator("groups")).signs(torch.arange(20))
    signed = signs.unsqueeze(1) * W
    rows = torch.cat([W[:2], *(signed[i : i + 4].sum(0, keepdim=True) for i in range(2, 20, 4))])
    expected = rotate(hf.FactoredMatrix(rows), (), 2)[0].dense()
    torch.testing.assert_close(stream(hf.LowRank(rank=2, group=4), W, 3, 5).dense(), expected)


def test_groups_have_the_right_mean() -> None:
    """Rows in few dimensions lose nothing by truncation, so the mean is the matrix itself."""
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(24, 3, generator=generator, dtype=torch.float64)
    for group in (4, 64):
        recipe = hf.LowRank(rank=3, group=group)
        found = torch.stack([stream(recipe, W, 24, seed).dense() for seed in range(150)])
        error = found.std(0) / 150**0.5
        assert bool(((found.mean(0) - W.T @ W).abs() <= 4.5 * error + 1e-12).all()), group


def test_groups_lose_by_truncation_alone() -> None:
    """In many dimensions the mean is below the matrix: the trace never grows on average."""
    W = known(SPECTRA["linear"], n=200)
    recipe = hf.LowRank(rank=5, group=8)
    traces = torch.stack([stream(recipe, W, 64, seed).trace() for seed in range(30)])
    assert float(traces.mean()) <= float(W.square().sum()) + 3 * float(traces.std()) / 30**0.5


def test_few_held_bytes_do_not_depend_on_the_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regrouping, "HELD_BYTES", 3 * 20 * 8)  # room for three rows
    W = known(SPECTRA["linear"], n=100)
    recipe = hf.LowRank(rank=4, group=5)
    one, many = stream(recipe, W, 1).dense(), stream(recipe, W, 37).dense()
    torch.testing.assert_close(one, many)


def test_rotation_keeps_offset_and_matrix_together() -> None:
    """‖Fδ + e‖² is unchanged when nothing is truncated away, and smaller when something is."""
    F = known(SPECTRA["rank 3"], n=25)
    e = F @ torch.randn(20, dtype=torch.float64)  # as a moved reference point makes it
    delta = torch.randn(20, dtype=torch.float64)
    before = (F @ delta + e).square().sum()
    matrix, offset = rotate(hf.FactoredMatrix(F), (e,), 3)
    assert matrix.factor.shape[0] == 3
    torch.testing.assert_close(matrix.value_and_product(delta, offset)[0], before)
    for shrink in (False, True):
        matrix, offset = rotate(hf.FactoredMatrix(F), (e,), 2, shrink)
        assert float(matrix.value_and_product(delta, offset)[0]) < float(before)


@pytest.mark.parametrize("keep", [1, 3, 6])
def test_shrinking_subtracts_the_first_eigenvalue_that_is_dropped(keep: int) -> None:
    F = known([1 - i / 10 for i in range(8)], n=8)
    before = eigenvalues(F.T @ F)
    plain, shrunk = (rotate(hf.FactoredMatrix(F), (), keep, s)[0].dense() for s in (False, True))
    torch.testing.assert_close(eigenvalues(plain)[:keep], before[:keep])
    torch.testing.assert_close(eigenvalues(shrunk)[:keep], before[:keep] - before[keep])


def test_zero_rows_are_harmless() -> None:
    for recipe in (hf.LowRank(rank=2, group=1, shrink=True), hf.LowRank(rank=2)):
        found = stream(recipe, torch.zeros(50, 4, dtype=torch.float64))
        assert float(found.trace()) == 0.0


def test_state_stays_small() -> None:
    """Basis and buffer, never m × m."""
    recipe = hf.LowRank(rank=3, group=1)
    setting = hf.Setting(hf.ParameterSpace(("w",), ((5000,),)), Draw(0))
    state = recipe.start(setting)
    for first in range(0, 100, 20):
        rows = torch.randn(20, 5000)
        recipe.update(state, GivenRows(rows, torch.arange(first, first + 20)))
        held = state.basis.nbytes + state.buffer.nbytes
        assert held <= (32 + 32) * 5000 * 4 <= recipe.nbytes(setting)


@pytest.mark.parametrize("batch", [1, 7, 64, 500])
@pytest.mark.parametrize(("rank", "n"), [(3, 40), (3, 500), (40, 700), (12, 1600)])
def test_groups_grow_at_fixed_rows(
    monkeypatch: pytest.MonkeyPatch, rank: int, n: int, batch: int
) -> None:
    W = known(SPECTRA["linear"], n=n)
    monkeypatch.setattr(low_rank, "_WORK", 0)
    found = stream(hf.LowRank(rank=rank), W, batch).dense()
    expected = reference.streamed_low_rank(W, rank, "auto", work=0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_a_small_network_is_streamed_row_by_row() -> None:
    W = known(SPECTRA["geometric"], n=400)
    auto, single = (stream(hf.LowRank(rank=4, group=group), W) for group in ("auto", 1))
    torch.testing.assert_close(auto.dense(), single.dense())
    assert hf.LowRank(rank=50).alone(1_460_736) == 50  # permuted MNIST: sums from the start
    assert hf.LowRank(rank=50).alone(8_770) > 2000  # the tasks in the plane: every row


def test_rows_of_several_shapes_make_whole_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that cannot be joined, as sequences of different lengths: no row waits for ever."""

    class Shaped(GivenRows):
        def __init__(self, rows: Tensor, index: Tensor, shape: int) -> None:
            super().__init__(rows, index)
            self.shape = shape

        @property
        def signature(self) -> tuple[int]:
            return (self.shape,)

        def like(self, columns: Sequence[Tensor], index: Tensor) -> "Shaped":
            return Shaped(columns[0], index, self.shape)

    monkeypatch.setattr(low_rank, "_WORK", 0)
    W = known(SPECTRA["linear"], n=300)
    recipe = hf.LowRank(rank=3)
    state = recipe.start(
        hf.Setting(hf.ParameterSpace(("w",), ((W.shape[1],),)), Draw(0), dtype=W.dtype)
    )
    for place, index in enumerate(torch.arange(len(W)).split(7)):
        recipe.update(state, Shaped(W[index], index, place % 3))
    found = recipe.finish(state).dense()
    expected = reference.streamed_low_rank(W, 3, "auto", work=0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
