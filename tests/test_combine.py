"""Matrices and approximations that are made of others."""

import copy
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import holdfast as hf
import kronecker_oracle
import reference
from holdfast import memory
from holdfast import penalty as penalty_module
from holdfast.analysis import inner, largest_eigenvalue
from holdfast.configuration import from_json, to_json
from holdfast.gradients import Gradients
from holdfast.hashing import Draw
from holdfast.rows import GivenRows
from holdfast.views import PartialRows, SquaredRows
from models_zoo import CASES, Network, batches, flat, nudge
from recipes_table import ALL_APPROXIMATIONS, approximate, close

SEED = 5
COUNT = 35  # more rows than a LowRank keeps while streaming
DOUBLE = torch.float64


def consolidated(
    approximation: hf.Approximation, case: str = "mlp", count: int = COUNT
) -> tuple[hf.Penalty, Tensor, nn.Module]:
    """A penalty of one task, the rows it was made from, and the network."""
    model, columns = CASES[case].model(), CASES[case].columns(count)
    recipe = hf.Regularizer(hf.EWC(), approximation)
    W = reference.rows(model, columns, hf.EWC())
    return recipe.consolidate(model, batches(columns, 8), seed=SEED), W, model


# ---- matrices ----


def factored(dim: int, rows: int = 2, seed: int = 0) -> hf.FactoredMatrix:
    generator = torch.Generator().manual_seed(seed)
    return hf.FactoredMatrix(torch.randn(rows, dim, generator=generator, dtype=DOUBLE))


def test_summands_have_one_size() -> None:
    with pytest.raises(ValueError, match=r"one size, got \[3, 4\]"):
        hf.SumMatrix([factored(3), factored(4)])


@pytest.mark.parametrize(
    ("places", "dim", "message"),
    [
        ([[(0, 2)], [(1, 3)]], 4, "overlap"),
        ([[(0, 2)], [(2, 3)]], 4, "as long as their part"),
        ([[(0, 1), (3, 4)], [(1, 3)]], 3, "do not lie in a vector of length 3"),
    ],
)
def test_parts_have_ranges_of_their_own(places: Any, dim: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf.PartsMatrix([factored(2), factored(2)], places, dim)


def test_entries_of_no_part_are_free_and_remembered() -> None:
    matrix = hf.PartsMatrix([factored(2), factored(1)], [[(4, 5), (1, 2)], [(2, 3)]], 7)
    again = hf.PartsMatrix.from_tensors(dict(matrix.tensors))
    assert again.dim == 7
    assert again.places == (((4, 5), (1, 2)), ((2, 3),))
    assert torch.equal(again.dense(), matrix.dense())
    held = [4, 1, 2]
    block = torch.block_diag(factored(2).dense(), factored(1).dense())
    expected = torch.zeros(7, 7, dtype=DOUBLE)
    expected[torch.tensor(held)[:, None], torch.tensor(held)] = block
    torch.testing.assert_close(matrix.dense(), expected)
    torch.testing.assert_close(matrix.diagonal(), expected.diagonal())


def test_matrices_in_matrices_in_matrices(tmp_path: Path) -> None:
    """Any depth: products, storage, and an offset for every leaf."""
    diagonal = hf.DiagonalMatrix(torch.rand(3, dtype=DOUBLE))
    blocks = hf.BlockDiagonalMatrix([torch.eye(2, dtype=DOUBLE).unsqueeze(0)])
    low = hf.PartsMatrix([factored(2), blocks], [[(0, 2)], [(2, 4)]], 4)
    matrix = hf.SumMatrix(
        [
            hf.PartsMatrix([diagonal, low], [[(0, 3)], [(3, 7)]], 7),
            hf.PartsMatrix([hf.SumMatrix([factored(7), factored(7, 1, 3)])], [[(0, 7)]], 7),
        ]
    )
    assert matrix.offset_length == 2 + 1 + 2 + 1 + 1
    v, d = torch.randn(7, dtype=DOUBLE), torch.randn(7, dtype=DOUBLE)
    torch.testing.assert_close(matrix @ v, matrix.dense() @ v)
    offset = matrix.moved((), d)
    assert len(offset) == matrix.offset_length
    value, product = matrix.value_and_product(v, offset)
    torch.testing.assert_close(value, (v + d) @ matrix.dense() @ (v + d))
    torch.testing.assert_close(product, matrix.dense() @ (v + d))
    space = hf.ParameterSpace(("weight",), ((1, 7),))
    penalty = hf.Penalty(space, matrix, torch.zeros(7, dtype=DOUBLE), 1.0, offset)
    penalty.save(tmp_path / "nested")
    again = hf.Penalty.load(tmp_path / "nested")
    assert [t.shape for t in again.offset] == [t.shape for t in offset]
    model = nn.Linear(7, 1, bias=False).double()
    assert torch.equal(again(model), penalty(model))


def test_inner_products_with_sums() -> None:
    diagonal = hf.DiagonalMatrix(torch.rand(6, dtype=DOUBLE))
    total = hf.SumMatrix([diagonal, factored(6)])
    parts = hf.PartsMatrix([factored(4), factored(2, seed=1)], [[(0, 1), (3, 6)], [(1, 3)]], 6)
    for a, b in itertools.product([diagonal, factored(6, seed=2), total, parts], repeat=2):
        expected = float((a.dense() * b.dense()).sum())
        assert inner(a, b) == pytest.approx(expected)


def big_sum(scale: float) -> hf.SumMatrix:
    """More entries than are ever written out; F has one direction that stands out, or none."""
    F = torch.randn(3, 3000, dtype=DOUBLE) / 50
    F[0] *= scale
    return hf.SumMatrix([hf.DiagonalMatrix(torch.rand(3000, dtype=DOUBLE)), hf.FactoredMatrix(F)])


@pytest.mark.parametrize("scale", [0.0, 1.0, 20.0])
def test_the_largest_eigenvalue_of_what_is_not_written_out(scale: float) -> None:
    """By iteration, also where it hardly stands out from the others."""
    total = big_sum(scale)
    values = torch.linalg.eigvalsh(total.dense())
    assert largest_eigenvalue(total) == pytest.approx(float(values[-1]), rel=1e-3)
    parts = hf.PartsMatrix([total, factored(4)], [[(0, 2), (6, 3004)], [(2, 6)]], 3005)
    alone = float(torch.linalg.eigvalsh(factored(4).dense())[-1])
    expected = max(float(values[-1]), alone)
    assert largest_eigenvalue(parts) == pytest.approx(expected, rel=1e-3)
    trace = float(total.trace()) + float(factored(4).trace())
    assert hf.stable_rank(parts) == pytest.approx(trace / expected, rel=1e-3)
    squares = float(values.square().sum() + factored(4).dense().square().sum())
    found = hf.stable_rank(parts, "frobenius")
    assert found == pytest.approx(squares / expected**2, rel=2e-3)


def test_the_largest_eigenvalue_of_a_zero_matrix() -> None:
    assert largest_eigenvalue(0.0 * big_sum(1.0)) == 0
    with pytest.raises(ValueError, match="the matrix is zero"):
        hf.stable_rank(0.0 * big_sum(1.0))


def test_the_spectrum_of_parts_and_of_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = hf.PartsMatrix([factored(3), factored(2, 1, 1)], [[(0, 1), (3, 5)], [(1, 3)]], 6)
    expected = torch.linalg.eigvalsh(parts.dense()).flip(0).clamp(min=0)
    torch.testing.assert_close(hf.spectrum(parts), expected)
    monkeypatch.setattr(memory, "available", lambda device: 10**6)
    with pytest.raises(MemoryError, match=r"all of SumMatrix.* needs 72 MB.*largest_eigenvalue"):
        hf.spectrum(big_sum(1.0))
    assert hf.stable_rank(big_sum(1.0)) > 0


@pytest.mark.parametrize("anchor", ["latest", "each"])
@pytest.mark.parametrize("name", ["diagonal_plus_low_rank-groups", "composite-groups"])
def test_a_model_whose_parameters_are_not_copied(
    name: str, anchor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large models are read and written in pieces: the same numbers."""
    case = CASES["conv"]
    recipe = hf.Regularizer(hf.EWC(), ALL_APPROXIMATIONS[name], 3.0, anchor=anchor)
    model, penalty = case.model(), None
    for k in range(2):
        nudge(model, seed=k)
        data = batches(case.columns(9, seed=k), 4)
        penalty = recipe.consolidate(model, data, previous=penalty, seed=SEED)
    assert penalty is not None
    nudge(model, seed=3)
    results = []
    for small in (2**16, 0):
        monkeypatch.setattr(penalty_module, "_SMALL", small)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        value = penalty.add_grad_(model)
        results.append((value, torch.cat([p.grad.flatten() for p in model.parameters()])))
    torch.testing.assert_close(results[0], results[1])
    assert float(results[0][0]) > 0


# ---- rows through a window ----


def test_some_columns_of_rows() -> None:
    W, index = torch.randn(5, 6), torch.arange(5)
    chosen = [0, 1, 4]
    view = PartialRows(GivenRows(W, index), [0, 2], [(0, 2), (4, 5)], torch.ones(6))
    assert torch.equal(torch.cat(list(view.blocks())), W[:, chosen])
    signs = torch.tensor([1, -1, 1, 0, 1])
    for add, expected in (
        (lambda out: view.add_signed_sum_(out, signs), signs.float() @ W),
        (view.add_squared_sum_, W.square().sum(0)),
    ):
        for _ in range(2):  # what was left in the room does not matter
            out = torch.ones(3)
            add(out)
            torch.testing.assert_close(out, 1 + expected[chosen])
    part = view.like([W[:2]], index[:2])
    assert torch.equal(torch.cat(list(part.blocks())), W[:2, chosen])


def test_squares_are_added_when_rows_are_read() -> None:
    W, index = torch.randn(5, 3), torch.arange(5)
    squares = torch.zeros(3)
    rows = SquaredRows(GivenRows(W, index), squares)
    assert torch.equal(torch.cat(list(rows.like([W[:2]], index[:2]).blocks())), W[:2])
    torch.testing.assert_close(squares, W[:2].square().sum(0))
    out = torch.zeros(3)
    rows.like([W[2:]], index[2:]).add_signed_sum_(out, torch.tensor([1, -1, 1]))
    torch.testing.assert_close(out, W[2] - W[3] + W[4])
    torch.testing.assert_close(squares, W.square().sum(0))


# ---- diagonal plus low rank ----


@pytest.mark.parametrize("rank", [1, 3, 40])
@pytest.mark.parametrize("shrink", [False, True])
def test_the_diagonal_is_exact_and_no_direction_is_free(rank: int, shrink: bool) -> None:
    """For single rows; and it is never worse than the low rank alone."""
    low, W, _ = consolidated(hf.LowRank(rank, group=1, shrink=shrink), "conv")
    both, _, _ = consolidated(hf.DiagonalPlusLowRank(rank, group=1, shrink=shrink), "conv")
    exact = W.T @ W / COUNT
    close(both.matrix.diagonal(), exact.diagonal())
    close(both.matrix.parts[1].dense(), low.matrix.dense())
    errors = [(p.matrix.dense() - exact).norm() for p in (both, low)]
    assert errors[0] <= errors[1] + 1e-12
    free = torch.linalg.eigvalsh(low.matrix.dense())[0]
    held = torch.linalg.eigvalsh(both.matrix.dense())[0]
    assert float(free.abs()) < 1e-12
    if rank < COUNT:
        assert float(held) > 1e-9


def test_groups_are_clamped() -> None:
    """Sums of rows may have larger squares than the rows: the diagonal is the larger of both."""
    recipe = hf.DiagonalPlusLowRank(rank=2, group=5)
    penalty, W, model = consolidated(recipe)
    low = approximate(recipe.low_rank, W, model, divisor=COUNT, seed=SEED)
    exact = (W.T @ W / COUNT).diagonal()
    assert bool((low.diagonal() > exact).any())
    assert float(penalty.matrix.parts[0].diagonal().min()) == 0
    close(penalty.matrix.diagonal(), torch.maximum(exact, low.diagonal()))


def two_tasks(
    approximation: hf.Approximation, anchor: str, history: hf.History
) -> tuple[list[hf.Penalty], list[Tensor], list[Tensor]]:
    """The penalties after one and two tasks, and the rows (with 1/√n) and parameters of each."""
    case, recipe = CASES["mlp"], hf.Regularizer(hf.EWC(), approximation, 1.0, history, anchor)
    model, found, W, at = case.model(), [], [], []
    for k in range(2):
        nudge(model, seed=k)
        columns = case.columns(12, seed=k)
        previous = found[-1] if found else None
        found.append(recipe.consolidate(model, [columns], previous=previous, seed=SEED))
        W.append(reference.rows(model, columns, hf.EWC()) / 12**0.5)
        at.append(flat(model))
    return found, W, at


@pytest.mark.parametrize("shrink", [False, True])
@pytest.mark.parametrize("anchor", ["latest", "each"])
def test_what_merging_drops_becomes_diagonal(shrink: bool, anchor: str) -> None:
    """By dense algebra, the pull of dropped rows included."""
    rank, old_weight, new_weight = 2, 0.7, 0.3
    recipe = hf.DiagonalPlusLowRank(rank, group=1, shrink=shrink)
    found, W, at = two_tasks(recipe, anchor, hf.MovingAverage(new=new_weight))
    exact = old_weight * W[0].T @ W[0] + new_weight * W[1].T @ W[1]
    close(found[1].matrix.diagonal(), exact.diagonal())
    low = [reference.best_rank(w.T @ w, rank, shrink) for w in W]
    stacked = old_weight * low[0] + new_weight * low[1]
    close(found[1].matrix.parts[1].dense(), reference.best_rank(stacked, rank, shrink))
    if anchor == "latest":
        return
    d, delta = at[1] - at[0], flat(probe := nudge(CASES["mlp"].model(), seed=9)) - at[1]
    terms = [own + (w.T @ w - own).diagonal().diag() for own, w in zip(low, W, strict=True)]
    old, total = old_weight * terms[0], old_weight * terms[0] + new_weight * terms[1]
    merged = found[1].matrix.dense()
    b, k = kronecker_oracle.recentred(total, merged, old @ d, d @ old @ d)
    close(found[1](probe).detach(), 0.5 * (delta @ merged @ delta + 2 * b @ delta + k), 1e-6)


@pytest.mark.parametrize(
    "approximation",
    [
        hf.DiagonalPlusLowRank(2, group=1),
        hf.DiagonalPlusLowRank(8, group=1),
        hf.KroneckerPlusLowRank(2, group=1),
        hf.KroneckerPlusLowRank(8, group=1),
    ],
)
def test_the_minimum_of_merged_tasks_is_worth_having(approximation: hf.Approximation) -> None:
    """Where the merged penalty leads, the penalties of all tasks are low together."""
    case, model = CASES["mlp"], CASES["mlp"].model()
    recipe = hf.Regularizer(hf.EWC(), approximation, 1.0, anchor="each")
    found, alone, anchors = None, [], []
    for task in range(5):
        nudge(model, seed=task)
        data = [case.columns(12, seed=task)]
        alone.append(recipe.consolidate(model, data, seed=SEED).matrix.dense())
        found = recipe.consolidate(model, data, previous=found, seed=SEED)
        anchors.append(flat(model))
    assert found is not None

    def together(at: torch.Tensor) -> float:
        each = zip(anchors, alone, strict=True)
        return float(sum((at - anchor) @ matrix @ (at - anchor) for anchor, matrix in each))

    pulls = sum(matrix @ anchor for matrix, anchor in zip(alone, anchors, strict=True))
    best = torch.linalg.pinv(sum(alone), hermitian=True) @ pulls
    zero = torch.zeros_like(anchors[-1])
    b = found.matrix.value_and_product(zero, found.offset)[1]
    merged = anchors[-1] - torch.linalg.pinv(found.matrix.dense(), hermitian=True) @ b
    start, least = together(anchors[-1]), together(best)
    assert together(merged) - least < 0.2 * (start - least)


def test_dropped_rows_never_make_the_penalty_negative() -> None:
    found, _, at = two_tasks(hf.DiagonalPlusLowRank(1, group=1), "each", hf.Sum())
    matrix, offset = found[1].matrix, found[1].offset
    # the minimum over δ: δ = -Ω⁻¹b for the whole quadratic function
    b = matrix.value_and_product(torch.zeros_like(at[0]), offset)[1]
    lowest = -torch.linalg.solve(matrix.dense(), b)
    value, slope = matrix.value_and_product(lowest, offset)
    assert float(slope.abs().max()) < 1e-9
    assert float(value) > 0
    # … and what pulls is not further away than where the old task was
    assert float(lowest.norm()) < 1.5 * float((at[1] - at[0]).norm())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be a positive integer, got 0"),
        ({"group": "all"}, "group must be a positive integer or 'auto', got 'all'"),
        ({"merge": "sum"}, "merge must be 'rows' or 'stack', got 'sum'"),
    ],
)
def test_settings_of_diagonal_plus_low_rank(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf.DiagonalPlusLowRank(**options)


# ---- composite ----


@pytest.mark.parametrize("name", [n for n in ALL_APPROXIMATIONS if not n.startswith("composite")])
def test_a_composite_of_one_is_that_one(name: str) -> None:
    """With the same hash, to the bit."""
    alone, _, _ = consolidated(ALL_APPROXIMATIONS[name])
    found, _, _ = consolidated(hf.Composite({"*": ALL_APPROXIMATIONS[name]}))
    assert torch.equal(found.matrix.dense(), alone.matrix.dense())
    assert found.tasks == alone.tasks


GROUPS = {
    "names": {"body.*": hf.LowRank(rank=3, group=4), "head.*": hf.CountSketch(size=4)},
    "layers": {"Linear": hf.CountSketch(size=3), "*": hf.CountSketch(size=4)},
    "classes": {"Conv2d": hf.Full(), "Linear": hf.LowRank(rank=4, group=1), "*": hf.Diagonal()},
    "pattern": {"Conv?d": hf.Full(), "*.bias": hf.Diagonal(), "*": hf.BlockDiagonal(size=5)},
    "first": {"*.bias": hf.LowRank(rank=2, group=3), "Linear": hf.Full(), "*": hf.Diagonal()},
    "products": {"Linear": hf.Kronecker(), "*": hf.LowRank(rank=3, group=1)},
    "no bias": {"*.bias": hf.Diagonal(), "*": hf.Kronecker()},
    "corrected": {
        "conv.*": hf.Kronecker(correction="eigen"),
        "*": hf.KroneckerPlusLowRank(rank=2, group=1),
    },
    "nested": {
        "Linear": hf.Composite({"*.bias": hf.Full(), "*": hf.CountSketch(size=2)}),
        "*": hf.DiagonalPlusLowRank(rank=2, group=3),
    },
}
CELLS = [
    ("names", "mlp"),
    ("layers", "mlp"),
    ("layers", "conv"),
    ("layers", "transformer"),
    ("classes", "conv"),
    ("pattern", "conv"),
    ("first", "conv"),
    ("first", "transformer"),
    ("products", "conv"),
    ("products", "transformer"),
    ("no bias", "conv"),
    ("no bias", "transformer"),
    ("corrected", "conv"),
]


@pytest.mark.parametrize(("groups", "case"), CELLS)
def test_groups_of_parameters(groups: str, case: str) -> None:
    """Each member on its own columns, with randomness of its own; nothing between groups."""
    recipe = hf.Composite(GROUPS[groups])
    penalty, W, model = consolidated(recipe, case)
    source = {"columns": CASES[case].columns(COUNT), "importance": hf.EWC()}
    expected = approximate(recipe, W, model, divisor=COUNT, seed=SEED, **source)
    close(penalty.matrix.dense(), expected)
    columns = reference.columns_by_pattern(model, list(GROUPS[groups]))
    sizes = [len(at) for at in columns if len(at)]
    assert [part.dim for part in penalty.matrix.parts] == sizes


@pytest.mark.parametrize("anchor", ["latest", "each"])
def test_products_of_a_part_merge_as_they_do_alone(anchor: str) -> None:
    """Two tasks: every part is what its approximation makes of these parameters, the pull included."""
    parts = {"conv.*": hf.Kronecker(correction="eigen"), "head.*": hf.Kronecker(merge="nearest")}
    case, recipes = CASES["conv"], {}
    recipes["*"] = hf.Regularizer(
        hf.EWC(), hf.Composite({**parts, "*": hf.Diagonal()}), anchor=anchor
    )
    for pattern, member in {**parts, "norm.*": hf.Diagonal()}.items():
        recipes[pattern] = hf.Regularizer(hf.EWC(), member, anchor=anchor, include=(pattern,))
    model, found = case.model(), dict.fromkeys(recipes)
    for k in range(2):
        nudge(model, seed=k)
        data = [case.columns(9, seed=k)]
        for pattern, recipe in recipes.items():
            found[pattern] = recipe.consolidate(model, data, previous=found[pattern], seed=SEED)
    whole = found.pop("*")
    probe = nudge(copy.deepcopy(model), seed=5)
    assert whole is not None
    alone = [float(penalty(probe).detach()) for penalty in found.values() if penalty is not None]
    assert float(whole(probe).detach()) == pytest.approx(sum(alone), rel=1e-9)
    for part, penalty in zip(whole.matrix.parts, found.values(), strict=True):
        assert penalty is not None
        close(part.dense(), penalty.matrix.dense())


def test_a_composite_in_a_composite() -> None:
    penalty, W, model = consolidated(hf.Composite(GROUPS["nested"]), "conv")
    linear, rest = reference.columns_by_pattern(model, ["Linear", "*"])
    expected = torch.zeros(W.shape[1], W.shape[1], dtype=DOUBLE)
    other = approximate(
        hf.DiagonalPlusLowRank(rank=2, group=3),
        W[:, rest],
        model,
        divisor=COUNT,
        seed=reference.part_seed(SEED, 0, 1),
    )
    expected[rest[:, None], rest] = other
    weight, bias = linear[:-3], linear[-3:]
    expected[bias[:, None], bias] = W[:, bias].T @ W[:, bias] / COUNT
    seed = reference.part_seed(SEED, 0, 1)
    F, _ = reference.count_sketch(W[:, weight], 2, seed=seed)
    expected[weight[:, None], weight] = F.T @ F / COUNT
    close(penalty.matrix.dense(), expected)


def test_terms_within_a_group_cross_layers() -> None:
    penalty, W, _ = consolidated(hf.Composite({"*.weight": hf.Full(), "*": hf.Diagonal()}))
    exact, dense = W.T @ W / COUNT, penalty.matrix.dense()
    close(dense[:12, 15:24], exact[:12, 15:24])  # body.weight and head.weight
    assert float(exact[:12, 15:24].abs().min()) > 0
    assert float(dense[:12, 12:15].abs().max()) == 0  # body.weight and body.bias


def test_sketches_of_different_groups_are_independent() -> None:
    recipe = hf.Composite(
        {"body.*": hf.CountSketch(size=3), "*": hf.CountSketch(size=3, copies=2)}
    )
    penalty, _, _ = consolidated(recipe)
    ids = penalty.tasks[0].hash_ids
    first = reference.Hash(3, SEED, 0, "sketch").id
    own = reference.part_seed(SEED, 0, 1)
    others = [reference.Hash(3, own, 0, "sketch", copy_).id for copy_ in range(2)]
    assert ids == (first, *others)
    assert len(set(ids)) == 3
    case = CASES["mlp"]
    regularizer = hf.Regularizer(hf.EWC(), recipe)
    again = regularizer.consolidate(case.model(), [case.columns(9)], previous=penalty, seed=SEED)
    assert len({h for task in again.tasks for h in task.hash_ids}) == 6


def test_rows_of_a_group_do_not_write_out_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few parameters of a large network cost what a few parameters cost."""
    widths = set()
    honest = Gradients.rows

    def watched(self: Gradients, *args: Any, **options: Any) -> Iterator[Tensor]:
        for block in honest(self, *args, **options):
            widths.add(block.shape[1])
            yield block

    monkeypatch.setattr(Gradients, "rows", watched)
    consolidated(hf.Composite({"head.*": hf.Full(), "*": hf.CountSketch(size=3)}))
    assert widths == {12}


def test_the_draw_of_a_part() -> None:
    assert Draw(3, 1).part(0) == Draw(3, 1)
    seeds = {Draw(seed, task).part(k).seed for seed in (3, 4) for task in (0, 1) for k in (1, 2)}
    assert len(seeds) == 8


def test_memory_is_the_sum_of_the_parts() -> None:
    space = hf.ParameterSpace.of(Network())
    setting = hf.Setting(space, Draw(0))
    recipe = hf.Composite({"body.*": hf.CountSketch(size=3), "*": hf.Full()})
    assert recipe.nbytes(setting) == 4 * (3 * 15 + 12 * 12 + 27)
    assert hf.Composite({"*": hf.CountSketch(size=3)}).nbytes(setting) == 4 * 3 * 27
    low = hf.LowRank(rank=40).nbytes(setting)
    assert hf.DiagonalPlusLowRank(rank=40).nbytes(setting) == low + 4 * 27


def test_what_no_pattern_matches_is_named() -> None:
    recipe = hf.Composite({"*.weight": hf.Diagonal()})
    with pytest.raises(ValueError, match=r"matches body\.bias, head\.bias; add '\*'.*exclude="):
        consolidated(recipe)
    case = CASES["mlp"]
    held = hf.Regularizer(hf.EWC(), recipe, exclude=("*.bias",))
    penalty = held.consolidate(case.model(), [case.columns(8)])
    assert penalty.space.names == ("body.weight", "head.weight")


@pytest.mark.parametrize(
    ("patterns", "unused"),
    [
        (["haed.*", "*"], "haed"),
        (["Conv2d", "*"], "Conv2d"),
        (["*", "head.*"], "head"),
        (["Linear", "*.bias"], "bias"),
    ],
)
def test_a_pattern_without_parameters_is_refused(patterns: list[str], unused: str) -> None:
    recipe = hf.Composite({pattern: hf.Diagonal() for pattern in patterns})
    message = rf"{unused}.* has no parameter to hold.*earlier pattern.*head\.bias.*classes Linear"
    with pytest.raises(ValueError, match=message):
        consolidated(recipe)


def test_nothing_may_be_left_for_the_rest() -> None:
    penalty, W, _ = consolidated(hf.Composite({"Linear": hf.Full(), "*": hf.Diagonal()}))
    close(penalty.matrix.dense(), W.T @ W / COUNT)


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ({}, ValueError, "parts is empty; expected e.g."),
        ({"*": hf.Diagonal}, TypeError, r"the part '\*' must be an instance of hf\.Approximation"),
        ({"*": "diagonal"}, TypeError, "got 'diagonal'"),
        ({1: hf.Diagonal()}, TypeError, "a pattern must be a string, got 1"),
        ({nn.Linear: hf.Diagonal()}, TypeError, "did you mean 'Linear'"),
        ((("*", hf.Diagonal()), ("*", hf.Full())), ValueError, r"'\*' is there twice"),
        ("*", TypeError, r"expected a mapping .* got '\*'"),
        ((hf.Diagonal(),), TypeError, r"expected a mapping .* got \(Diagonal\(\),\)"),
    ],
)
def test_bad_parts(parts: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        hf.Composite(parts)


def test_a_composite_is_a_value() -> None:
    """Mapping or pairs, Python or JSON: the order counts."""
    recipe = hf.Composite({"*.bias": hf.Diagonal(), "*": hf.LowRank(rank=7)})
    assert recipe == hf.Composite((("*.bias", hf.Diagonal()), ("*", hf.LowRank(rank=7))))
    assert recipe != hf.Composite({"*": hf.LowRank(rank=7), "*.bias": hf.Diagonal()})
    written = json.loads(json.dumps(to_json(recipe)))
    assert from_json(hf.Approximation, written) == recipe
    by_hand = {
        "name": "composite",
        "parts": {"*.bias": {"name": "diagonal"}, "*": {"name": "low_rank", "rank": 7}},
    }
    assert from_json(hf.Approximation, by_hand) == recipe
    assert eval(repr(recipe), vars(hf)) == recipe


class Grown(nn.Module):
    """Layers may come later; their names come after the others'."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.head = nn.Linear(3, 5 if norm else 3)
        self.norm = nn.LayerNorm(3) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x).tanh()))


@pytest.mark.parametrize("anchor", ["latest", "each"])
def test_a_group_that_gets_its_first_parameters_later(anchor: str) -> None:
    """The layer of a new class, and new outputs: every part grows in its own space."""
    approximation = hf.Composite({"Linear": hf.LowRank(rank=99), "*": hf.Diagonal()})
    recipe = hf.Regularizer(hf.EWC(), approximation, 2.0, anchor=anchor)
    columns, later = CASES["mlp"].columns(8), CASES["mlp"].columns(8, seed=1)
    old, new = nudge(Grown(False).double()), Grown(True).double()
    with torch.no_grad():
        new.body.load_state_dict(old.body.state_dict())
        new.head.weight[:3], new.head.bias[:3] = old.head.weight, old.head.bias
    nudge(new, seed=2)
    first = recipe.consolidate(old, [columns])
    assert len(first.matrix.parts) == 1
    both = recipe.consolidate(new, [later], previous=first)
    assert len(both.matrix.parts) == 2
    places = torch.cat([torch.arange(24), torch.arange(30, 33)])  # of the old entries
    wide = torch.zeros(41, 41, dtype=DOUBLE)
    W = reference.rows(old, columns, hf.EWC())
    wide[places[:, None], places] = W.T @ W / 8
    W = reference.rows(new, later, hf.EWC())
    alone = approximate(approximation, W, new, divisor=8)
    close(both.matrix.dense(), wide + alone)
    here = flat(new)
    start = here.clone()
    if anchor == "each":
        start[places] = flat(old)
    probe = nudge(copy.deepcopy(new), seed=3)
    value = reference.quadratic(wide, flat(probe), start, 2.0)
    value = value + reference.quadratic(alone, flat(probe), here, 2.0)
    close(both(probe).detach(), value)


def test_a_layer_that_changes_its_class_is_refused() -> None:
    class Own(nn.Module):
        """Another class for the same parameters."""

        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(outputs, inputs))
            self.bias = nn.Parameter(torch.randn(outputs))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.T + self.bias

    recipe = hf.Regularizer(hf.EWC(), hf.Composite({"Linear": hf.Full(), "*": hf.Diagonal()}))
    case = CASES["mlp"]
    model = case.model()
    first = recipe.consolidate(model, [case.columns(8)])
    for outputs in (3, 5):
        model.head = Own(3, outputs).double()
        with pytest.raises(
            ValueError, match=r"'Linear'.* of Composite held before belong to anoth"
        ):
            recipe.consolidate(model, [case.columns(8)], previous=first)


def test_a_class_is_what_it_is_derived_from() -> None:
    """Attention's output projection is a linear layer, by whatever name; and so is one's own."""

    class Mine(nn.Linear):
        """A class of one's own."""

    space = hf.ParameterSpace.of(nn.ModuleList([nn.MultiheadAttention(4, 2), Mine(2, 2)]))
    recipe = hf.Composite({"Linear": hf.Full(), "*": hf.Diagonal()})
    linear, others = ([space.names[i] for i in held] for held in recipe.positions(space))
    assert linear == ["0.out_proj.weight", "0.out_proj.bias", "1.weight", "1.bias"]
    assert others == ["0.in_proj_weight", "0.in_proj_bias"]
    own = hf.Composite({"Mine": hf.Full(), "Linear": hf.Full(), "*": hf.Diagonal()})
    assert [len(held) for held in own.positions(space)] == [2, 2, 2]
    for base in ("Module", "object"):
        with pytest.raises(ValueError, match=f"'{base}' of Composite has no parameter to hold"):
            hf.Composite({base: hf.Full(), "*": hf.Diagonal()}).positions(space)


def test_a_class_elsewhere_of_the_same_name_changes_nothing() -> None:
    own, other = type("Shared", (nn.Linear,), {}), type("Shared", (nn.Embedding,), {})
    recipe = hf.Composite({"Linear": hf.Full(), "*": hf.Diagonal()})
    for kind, held in (
        (own, {"0.weight", "0.bias", "1.weight", "1.bias"}),
        (other, {"1.weight", "1.bias"}),
    ):
        space = hf.ParameterSpace.of(nn.ModuleList([kind(2, 2), nn.Linear(2, 2)]))
        assert {space.names[i] for i in recipe.positions(space)[0]} == held


def test_the_classes_of_layers_are_seen_through_wrappers() -> None:
    model = Network()
    expected = (("Linear",),) * 4
    partly = Network()
    partly.head = torch.compile(partly.head, backend="eager")
    for wrapped in (
        model,
        nn.DataParallel(model),
        torch.compile(model, backend="eager"),
        partly,
    ):
        space = hf.ParameterSpace.of(wrapped)
        assert space.kinds == expected
        assert space == hf.ParameterSpace(space.names, space.shapes)  # not a part of what it is
