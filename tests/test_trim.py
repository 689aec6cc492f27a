"""Fewer rows of a factor: exact where they were not needed, bounded where they were."""

import pytest
import torch
from torch import nn

import holdfast as hf
from models_zoo import CASES, batches, nudge


def two_tasks(
    approximation: hf.Approximation,
    anchor: str = "latest",
    trim: float | None = None,
    seed: int = 0,
) -> tuple[hf.Penalty, nn.Module]:
    """A penalty of two tasks; with ``trim`` the first is trimmed before the second is added."""
    recipe = hf.Regularizer(hf.EWC(), approximation, 2.0, anchor=anchor)  # type: ignore[arg-type]
    model, penalty = CASES["mlp"].model(), None
    for k in range(2):
        nudge(model, seed=k)
        data = batches(CASES["mlp"].columns(12, seed=k), 4)
        penalty = recipe.consolidate(model, data, previous=penalty, seed=seed, progress=False)
        if trim is not None and k == 0:
            penalty = penalty.trim(trim)
    assert penalty is not None
    return penalty, nudge(model, seed=9)


@pytest.mark.parametrize("anchor", ["latest", "each"])
def test_rows_that_say_nothing_new_go_without_a_trace(anchor: str) -> None:
    penalty, model = two_tasks(hf.LowRank(rank=30, merge="stack"), anchor)
    doubled = hf.FactoredMatrix(torch.cat([penalty.matrix.factor] * 2))  # type: ignore[attr-defined]
    offset = tuple(torch.cat([e, e]) for e in penalty.offset)
    twice = hf.Penalty(penalty.space, doubled, penalty.anchor, 1.0, offset)
    trimmed = twice.trim(1e-12)
    rank = int((hf.spectrum(penalty.matrix) > 1e-12).sum())
    assert len(trimmed.matrix.factor) <= rank + (anchor == "each")  # type: ignore[attr-defined]
    assert len(trimmed.matrix.factor) < len(doubled.factor) / 2 + 2  # type: ignore[attr-defined]
    torch.testing.assert_close(trimmed(model), twice(model), rtol=1e-9, atol=0)
    torch.testing.assert_close(twice(model), penalty(model), rtol=1e-9, atol=0)


@pytest.mark.parametrize("energy", [0.0, 0.01, 0.3])
def test_what_is_lost_is_at_most_the_stated_share(energy: float) -> None:
    penalty, _ = two_tasks(hf.CountSketch(size=6))
    trimmed = penalty.trim(energy)
    lost = penalty.matrix.dense() - trimmed.matrix.dense()
    assert float(lost.trace()) <= (energy + 1e-12) * float(penalty.matrix.trace())
    assert float(torch.linalg.eigvalsh(lost).min()) > -1e-12 * float(penalty.matrix.trace())
    if energy == 0.3:
        assert len(trimmed.matrix.factor) < 6  # type: ignore[attr-defined]
        assert trimmed.nbytes < penalty.nbytes
        assert 0 < hf.frobenius_error(trimmed.matrix, penalty.matrix) < 0.3


def test_a_trimmed_sketch_can_be_continued_and_stays_unbiased() -> None:
    approximation = hf.CountSketch(size=4)
    exact, _ = two_tasks(hf.Full(form="dense"))
    first, _ = two_tasks(hf.LowRank(rank=12, merge="stack"))  # for the directions of interest
    v = first.matrix.factor[0].double()  # type: ignore[attr-defined]
    v = v / v.norm()
    found = torch.stack(
        [
            two_tasks(approximation, trim=0.2, seed=s)[0].matrix.quadratic(v).double()
            for s in range(300)
        ]
    )
    shorter = torch.tensor(
        [float(two_tasks(approximation, seed=s)[0].matrix.quadratic(v)) for s in range(300)]
    )
    target = float(exact.matrix.quadratic(v))
    error = float(shorter.std()) / 300**0.5
    assert abs(float(shorter.mean()) - target) < 4 * error
    # trimming drops at most a fifth of the first task's trace, and only downwards
    assert float(found.mean()) < target + 4 * float(found.std()) / 300**0.5
    assert float(found.mean()) > 0.6 * target


@pytest.mark.parametrize("anchor", ["latest", "each"])
@pytest.mark.parametrize("approximation", [hf.CountSketch(size=4), hf.LowRank(rank=4)])
def test_continuing_works_with_every_merge(approximation: hf.Approximation, anchor: str) -> None:
    penalty, model = two_tasks(approximation, anchor, trim=0.2)
    value = penalty(model)
    value.backward()  # type: ignore[no-untyped-call]
    assert float(value.detach()) > 0


def test_what_cannot_be_trimmed_says_so() -> None:
    penalty, _ = two_tasks(hf.Diagonal())
    with pytest.raises(TypeError, match="no rows to leave out"):
        penalty.trim(0.1)
    sketch, _ = two_tasks(hf.CountSketch(size=4))
    for energy in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="energy must lie"):
            sketch.trim(energy)


def test_the_whole_matrix_in_few_rows_is_the_whole_matrix() -> None:
    """In single precision, over two tasks: what is dropped is less than what rounding changes."""
    model = nn.Sequential(
        nn.Linear(2, 60), nn.ReLU(), nn.Linear(60, 40), nn.ReLU(), nn.Linear(40, 2)
    )
    found: dict[str, hf.Penalty] = {}
    for form in ("dense", "factored"):
        recipe = hf.Regularizer(hf.MAS(), hf.Full(form=form))  # type: ignore[arg-type]
        penalty = None
        for k in range(2):
            x = torch.randn(1500, 2, generator=torch.Generator().manual_seed(k))
            penalty = recipe.consolidate(
                model, torch.split(x, 500), previous=penalty, seed=0, progress=False
            )
        assert penalty is not None
        found[form] = penalty
    dense, factored = found["dense"].matrix, found["factored"].matrix
    assert len(factored.factor) < dense.dim / 3  # type: ignore[attr-defined]
    assert factored.nbytes < dense.nbytes / 3
    norm = float(hf.spectrum(factored)[0])
    for seed in range(5):
        v = torch.randn(dense.dim, generator=torch.Generator().manual_seed(seed))
        v /= v.norm()
        torch.testing.assert_close(factored @ v, dense @ v, rtol=0, atol=2e-6 * norm)
        torch.testing.assert_close(
            factored.quadratic(v), dense.quadratic(v), rtol=0, atol=1e-6 * norm
        )
