"""Kronecker products of thin factors: a low rank and a diagonal each, for any number of tasks."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import holdfast as hf
import kronecker_oracle as oracle
from holdfast.approximation import gram
from holdfast.configuration import to_json
from holdfast.structure import layer_shapes
from models_zoo import batches, nudge
from recipes_table import close
from test_kronecker import DOUBLE, HISTORIES, NETWORKS, expected, inputs, learned, network, tasks

MERGES = ["average", "nearest"]


@pytest.mark.parametrize("name", ["perceptron", "images"])
@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
@pytest.mark.parametrize("rank", [1, 3])
def test_tasks_by_dense_algebra(name: str, history: hf.History, rank: int) -> None:
    found = learned(name, hf.Kronecker(rank=rank), history, "latest").matrix.dense()
    at = oracle.places(network(name))
    state: dict[tuple[str, int], tuple[oracle.Thin, oracle.Thin]] = {}
    rest = torch.zeros(len(found), dtype=DOUBLE)
    for count, (model, columns) in enumerate(tasks(name)):
        w_old, w_new = history.weights(count)
        new = expected(model, columns, hf.Kronecker())
        rest = w_old * rest + w_new * new.diagonal() if count else w_new * new.diagonal()
        for path, matrices in at.items():
            for group, place in enumerate(matrices):
                A, G = oracle.partial_traces(oracle.take(new, place), *place.shape)
                pair = oracle.thin_parts(A, rank), oracle.thin_parts(w_new * G, rank)
                if count:
                    old_A, old_G = state[path, group]
                    old_G = w_old * old_G[0], w_old * old_G[1]
                    of_A, of_G = oracle.averages(
                        *([f[0] + f[1] for f in fs] for fs in ((old_A, pair[0]), (old_G, pair[1])))
                    )
                    merged = oracle.summed(of_A, old_A, pair[0], rank)
                    pair = merged, oracle.summed(of_G, old_G, pair[1], rank)
                state[path, group] = pair
    truth = rest.diag()
    for (path, group), (A, G) in state.items():
        oracle.put(truth, at[path][group], torch.kron(G[0] + G[1], A[0] + A[1]))
    close(found, truth, 1e-8)


@pytest.mark.parametrize("name", [n for n in NETWORKS if n != "recurrent"])
@pytest.mark.parametrize("rank", [1, 2])
def test_the_diagonal_is_that_of_whole_products(name: str, rank: int) -> None:
    """Whatever the rank, for any number of tasks."""
    thin, whole = (
        learned(name, hf.Kronecker(rank=r), hf.Sum(), "latest").matrix for r in (rank, None)
    )
    close(thin.diagonal(), whole.diagonal(), 1e-8)
    close(thin.trace(), whole.trace(), 1e-9)
    assert float(torch.linalg.eigvalsh(thin.dense()).min()) > -1e-12 * float(thin.trace())


@pytest.mark.parametrize("name", ["perceptron", "images"])
@pytest.mark.parametrize("merge", [*MERGES, "stack"])
@pytest.mark.parametrize("anchor", ["latest", "each"])
def test_exact_at_full_rank(name: str, merge: Any, anchor: str) -> None:
    whole, thin = (
        learned(name, hf.Kronecker(merge=merge, rank=rank), hf.Sum(), anchor)
        for rank in (None, 99)
    )
    close(thin.matrix.dense(), whole.matrix.dense(), 1e-8)
    model = tasks(name)[0][0]  # somewhere else than at the anchor
    close(thin(model).detach(), whole(model).detach(), 1e-5)


def test_nothing_that_products_hold_is_free() -> None:
    model, columns = network("perceptron"), inputs(4)
    columns[0][:, 1] = 0  # a dead input: its weights are free
    whole, thin = (
        hf.Regularizer(hf.EWC(), hf.Kronecker(rank=rank)).consolidate(model, [columns], seed=0)
        for rank in (None, 1)
    )
    values, vectors = torch.linalg.eigh(thin.matrix.dense())
    free = vectors[:, values < 1e-10 * values.max()]
    assert free.shape[1] > 0
    held = free.T @ whole.matrix.dense() @ free
    assert float(held.abs().max()) < 1e-9 * float(whole.matrix.trace())


@pytest.mark.parametrize("merge", MERGES)
def test_a_task_without_importance_changes_nothing(merge: Any) -> None:
    model, columns = network("perceptron"), inputs(4)
    zero = hf.Custom(lambda outputs, batch: 0 * outputs.sum(1))
    approximation = hf.Kronecker(rank=1, merge=merge)
    some = hf.Regularizer(hf.EWC(), approximation).consolidate(model, [columns], seed=0).matrix
    with pytest.warns(hf.ImportanceWarning, match="zero"):
        none = hf.Regularizer(zero, approximation).consolidate(model, [columns], seed=0).matrix
    for one, two in ((some, none), (none, some)):
        close(approximation.add(one, (), two)[0].dense(), some.dense(), 1e-9)


@pytest.mark.parametrize("merge", [*MERGES, "stack"])
@pytest.mark.parametrize("rank", [4, 99])
def test_a_head_that_outgrows_the_rank(merge: Any, rank: int) -> None:
    """Three outputs have a factor of rank three, six one of rank four: their sums have the larger one."""
    columns = inputs(4)
    small, large = (nn.Sequential(nn.Linear(4, count)).double() for count in (3, 6))
    found = []
    for chosen in (rank, None):
        recipe = hf.Regularizer(hf.EWC(), hf.Kronecker(merge=merge, rank=chosen))
        penalty = recipe.consolidate(small, [columns], seed=0)
        found.append(recipe.consolidate(large, [columns], previous=penalty, seed=0).matrix)
    thin, whole = found
    if rank == 99:
        close(thin.dense(), whole.dense(), 1e-8)
    if merge != "nearest":  # whose weights depend on more than the traces
        close(thin.diagonal(), whole.diagonal(), 1e-8)


def summed_in(sizes: list[int], rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """What a thin sum gives of (rows, groups, n) that come in batches."""
    setting = hf.Setting(hf.ParameterSpace.of(nn.Linear(1, 1)), None, dtype=DOUBLE)
    total = gram.ThinGram(setting, rows.shape[1], rows.shape[2], rank)
    for piece in rows.unsqueeze(2).split(sizes):
        total.add(piece)
    return total.thin(rank, torch.ones(rows.shape[1], dtype=DOUBLE))


def test_thin_sums() -> None:
    """More rows than are held: nearly the leading directions, nothing negative left, an exact diagonal."""
    generator = torch.Generator().manual_seed(3)
    scale = torch.arange(1, 41, dtype=DOUBLE) ** -0.5
    rows = torch.randn(900, 2, 40, dtype=DOUBLE, generator=generator) * scale
    exact = torch.einsum("bgi,bgj->gij", rows, rows)
    root, rest = (part[0] for part in summed_in([900], rows, 3))
    low = root @ root.mT
    torch.testing.assert_close(
        low.diagonal(dim1=1, dim2=2) + rest, exact.diagonal(dim1=1, dim2=2), rtol=1e-12, atol=0
    )
    assert float(torch.linalg.eigvalsh(exact - low).min()) > -1e-9
    best = torch.linalg.eigvalsh(exact)[:, -3:].sum(1)
    assert bool((low.diagonal(dim1=1, dim2=2).sum(1) > 0.98 * best).all())
    for sizes in ([1] * 900, [7, 300, 262, 331]):
        for one, two in zip(summed_in(sizes, rows, 3), (root, rest), strict=True):
            torch.testing.assert_close(one[0], two, rtol=1e-8, atol=1e-9)


def test_wide_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read in memory that grows with their sides; few examples lose nothing by it."""
    model = nn.Sequential(nn.Linear(30, 25), nn.Tanh(), nn.Linear(25, 20)).double()
    columns = torch.randn(90, 30, dtype=DOUBLE), torch.randint(20, (90,))
    space = hf.ParameterSpace.of(model)
    setting = hf.Setting(space, None, layers=layer_shapes(model, space))
    for merge in (*MERGES, "stack"):
        recipe = hf.Regularizer(hf.EWC(), hf.Kronecker(rank=2, merge=merge))
        found = []
        for limit in (1024, 0):
            monkeypatch.setattr(gram, "_WIDE", limit)
            assert gram._is_wide(20, 2) == (limit == 0)
            first = recipe.consolidate(model, batches(columns, 7), seed=0)
            found.append(recipe.consolidate(model, [columns], previous=first, seed=0))
        close(found[1].matrix.dense(), found[0].matrix.dense(), 1e-8)
    wide = nn.Linear(50_000, 8)
    space = hf.ParameterSpace.of(wide)
    setting = hf.Setting(space, None, layers=layer_shapes(wide, space))
    monkeypatch.setattr(gram, "_WIDE", 1024)
    assert hf.Kronecker(rank=8).nbytes(setting) < hf.Kronecker().nbytes(setting) / 10


def test_a_wide_layer_that_is_never_called() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(4, 3), nn.Linear(1100, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    columns = torch.randn(9, 4), torch.randint(3, (9,))
    recipe = hf.Regularizer(hf.EWC(), hf.Kronecker(rank=2))
    penalty = recipe.consolidate(Idle(), [columns], seed=0)
    assert float(penalty.matrix.trace()) > 0
    assert not bool(penalty.matrix.diagonal()[15:].any())


def test_a_wide_layer_whose_gradient_overflows() -> None:
    huge = hf.Custom(lambda outputs, batch: outputs.sum(1) * 1e20)
    recipe = hf.Regularizer(huge, hf.Kronecker(rank=2))
    with pytest.raises(ValueError, match="NaN or inf entries in: weight"):
        recipe.consolidate(nn.Linear(3, 1100), [(torch.randn(300, 3),)], seed=0)


def test_numbers_kept() -> None:
    """About rank · (n + k) per layer of n × k, and no more where the layer is smaller than the rank."""
    model = nn.Sequential(nn.Linear(50, 40), nn.ReLU(), nn.Linear(40, 3)).double()
    columns = torch.randn(20, 50, dtype=DOUBLE), torch.randint(3, (20,))
    recipe = hf.Regularizer(hf.EWC(), hf.Kronecker(rank=8))
    penalty = recipe.consolidate(model, [columns], seed=0)
    sides = {51: 8, 40: 8, 41: 8, 3: 3}
    kept = sum(side * (rank + 1) for side, rank in sides.items())
    assert sum(t.numel() for t in penalty.matrix.tensors.values()) == kept
    again = recipe.consolidate(model, [columns], previous=penalty, seed=0)
    assert again.matrix.nbytes == penalty.matrix.nbytes


def test_products_in_half_precision(tmp_path: Any) -> None:
    """Large enough for the processor's own bfloat16, saved and read again."""
    model = nn.Sequential(nn.Linear(300, 400, bias=False), nn.ReLU(), nn.Linear(400, 3))
    columns = torch.randn(30, 300), torch.randint(3, (30,))
    recipe = hf.Regularizer(hf.EWC(), hf.Kronecker(rank=16))
    penalty = recipe.consolidate(model, [columns], seed=0)
    penalty.to(dtype=torch.bfloat16).save(tmp_path / "half.safetensors")
    half = hf.Penalty.load(tmp_path / "half.safetensors")
    assert half.matrix.nbytes * 2 == penalty.matrix.nbytes
    v = torch.randn(penalty.matrix.dim)
    truth = penalty.matrix @ v
    assert float((half.matrix @ v - truth).norm() / truth.norm()) < 2e-2
    assert (
        float((penalty.matrix.to(dtype=DOUBLE) @ v.double() - truth).norm() / truth.norm()) < 1e-5
    )


@pytest.mark.parametrize("merge", MERGES)
def test_tasks_of_different_precision(merge: Any) -> None:
    """A penalty that was stored in half precision is continued in that of the model."""
    model, columns = network("perceptron"), inputs(4)
    recipe = hf.Regularizer(hf.EWC(), hf.Kronecker(rank=2, merge=merge))
    first = recipe.consolidate(model, [columns], seed=0)
    truth = recipe.consolidate(model, [columns], previous=first, seed=0).matrix
    half = first.to(dtype=torch.bfloat16)
    found = recipe.consolidate(model, [columns], previous=half, seed=0).matrix
    assert {t.dtype for t in found.tensors.values()} == {DOUBLE}
    assert float((found.dense() - truth.dense()).norm() / truth.dense().norm()) < 2e-2


@pytest.mark.parametrize("options", [{"rank": 2}, {"correction": "eigen"}], ids=str)
def test_what_overflows_is_refused_by_name(options: Any) -> None:
    huge = hf.Custom(lambda outputs, batch: outputs.sum(1) * 1e20)
    recipe = hf.Regularizer(huge, hf.Kronecker(**options))
    with pytest.raises(ValueError, match="NaN or inf entries in: weight, bias"):
        recipe.consolidate(nn.Linear(5, 3), [(torch.randn(12, 5),)], seed=0)


@pytest.mark.parametrize("rank", [1, 4, 19, 99])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=str)
def test_inputs_of_very_different_scales(rank: int, dtype: torch.dtype) -> None:
    """A raw timestamp among numbers of size one: the diagonal of the others is not lost in its rounding."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 20, generator=generator, dtype=dtype)
    x[:, 7] = (1 + 0.1 * x[:, 7]) * 1e9
    x[:, 3] = 0  # dead
    columns = x, torch.randint(3, (200,), generator=generator)
    model = nn.Linear(20, 3).to(dtype)
    with torch.no_grad():
        model.weight[:, 7] /= 1e9
    thin, whole = (
        hf.Regularizer(hf.EWC(), hf.Kronecker(rank=r)).consolidate(model, [columns], seed=0).matrix
        for r in (rank, None)
    )
    torch.testing.assert_close(thin.diagonal(), whole.diagonal(), rtol=1e-5, atol=0)


def test_entries_that_matter_very_little_are_not_free() -> None:
    model = nn.Linear(5, 6)
    with torch.no_grad():
        model.bias[2:] -= 30
    columns = torch.randn(40, 5), torch.randint(2, (40,))
    thin, whole = (
        hf.Regularizer(hf.EWC(), hf.Kronecker(rank=r)).consolidate(model, [columns], seed=0).matrix
        for r in (4, None)
    )
    torch.testing.assert_close(thin.diagonal(), whole.diagonal(), rtol=1e-4, atol=0)


def test_the_estimate_of_memory_counts_every_group() -> None:
    one, many = nn.Conv1d(40, 8, 1), nn.Conv1d(320, 64, 1, groups=8)
    needs = []
    for model in (one, many):
        space = hf.ParameterSpace.of(model)
        setting = hf.Setting(space, None, layers=layer_shapes(model, space))
        needs.append(hf.Kronecker(rank=4).nbytes(setting))
    assert needs[1] > 7 * needs[0]


def test_the_error_of_a_rank_needs_no_dense_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    model, columns = network("perceptron"), inputs(4)
    thin, whole = (
        hf.Regularizer(hf.EWC(), hf.Kronecker(rank=r)).consolidate(model, [columns], seed=0).matrix
        for r in (2, None)
    )
    truth = float((thin.dense() - whole.dense()).norm() ** 2 / whole.dense().norm() ** 2)
    monkeypatch.setattr(hf.KroneckerMatrix, "dense", None)
    assert hf.frobenius_error(thin, whole) == pytest.approx(truth, rel=1e-6)


@pytest.mark.parametrize("rank", [0, -1, 2.0, True, "many"])
def test_wrong_ranks(rank: Any) -> None:
    with pytest.raises(ValueError, match="rank must be a positive integer"):
        hf.Kronecker(rank=rank)


def test_a_correction_has_no_rank() -> None:
    with pytest.raises(ValueError, match="cannot be combined with rank"):
        hf.Kronecker(correction="eigen", rank=8)


def test_whole_products_are_named_as_before() -> None:
    """The names of runs and files follow from the JSON: an option that came later changes none."""
    assert "rank" not in to_json(hf.Kronecker())
    assert to_json(hf.Kronecker(rank=8))["rank"] == 8
    assert dataclasses.replace(hf.Kronecker(rank=8), rank=None) == hf.Kronecker()


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("rank", [None, 3, 100])
def test_half_precision_between_tasks_moves_no_anchor(merge: str, rank: int | None) -> None:
    """Every task pulls to its own weights: directions that only rounding left must not count as held."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    approximation = hf.Kronecker(rank=rank, merge=merge)
    history = hf.MovingAverage(new=0.25)
    recipe = hf.Regularizer(hf.EWC(), approximation, 10.0, history, anchor="each")
    whole = half = None
    for _ in range(5):
        x = torch.randn(40, 2) @ torch.randn(2, 8) + 1
        data = [(x, torch.randint(0, 3, (40,)))]
        whole = recipe.consolidate(model, data, previous=whole, seed=0)
        half = recipe.consolidate(model, data, previous=half, seed=0).to(dtype=torch.bfloat16)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.3 * torch.randn_like(parameter)
        expected = float(whole(model).detach())
        assert float(half(model).detach()) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize(
    "recipe", [{"rank": 8}, {"rank": 4}, {}, {"correction": "eigen"}], ids=str
)
def test_the_centre_of_several_anchors_holds_all_tasks(merge: Any, recipe: dict[str, Any]) -> None:
    """Where a merged penalty is least, the exact sum of its tasks is less than at any anchor."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 30), nn.ReLU(), nn.Linear(30, 10)).double()
    mixing = torch.randn(20, 60).double()
    approximation = hf.Kronecker(merge=merge, **recipe)
    apart = hf.Kronecker(merge="stack", **recipe)
    penalties: list[Any] = [None, None]
    anchors = []
    for _ in range(3):
        x = (torch.randn(200, 20).double() @ mixing / 5)[:, torch.randperm(60)]
        data = [(x, torch.randint(0, 10, (200,)))]
        penalties = [
            hf.Regularizer(hf.EWC(), a, 100.0, anchor="each").consolidate(
                model, data, previous=p, seed=0
            )
            for a, p in zip((approximation, apart), penalties, strict=True)
        ]
        anchors.append(copy.deepcopy(model))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.02 * torch.randn_like(parameter)
    merged, exact = penalties
    model = copy.deepcopy(anchors[-1])
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=300, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = merged(model)
        value.backward()
        return value

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        assert 0 <= float(merged(model)) < float(merged(anchors[-1]))
        assert float(exact(model)) < 0.7 * min(float(exact(anchor)) for anchor in anchors)


def test_several_anchors_write_no_side_of_a_wide_layer_out() -> None:
    """Their centre is found by products: nothing in it has a side times a side of a layer."""
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            found = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in tree_flatten(found)[0] if isinstance(t, torch.Tensor))
            return found

    model = nn.Linear(20, 1200)
    recipe = hf.Regularizer(hf.EWC(), hf.Kronecker(rank=2), anchor="each")
    penalties = [
        recipe.consolidate(
            model, [(torch.randn(4, 20), torch.zeros(4, dtype=torch.int64))], seed=k
        )
        for k in range(2)
    ]
    with Watch():
        added = recipe.extend(
            penalties[0], nudge(model, seed=1), penalties[1].matrix, hf.TaskRecord(4, 2)
        )
    assert len(added.offset) == 2
    assert max(sizes) <= 3 * model.weight.numel()
