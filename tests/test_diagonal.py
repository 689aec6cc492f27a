"""The two ways to a diagonal: exact squares, and squares of random-sign sums."""

import pytest
import torch
from torch import Tensor

import holdfast as hf
from holdfast.configuration import from_json, to_json
from holdfast.hashing import Draw
from holdfast.rows import GivenRows


def diagonal(recipe: hf.Diagonal, rows: Tensor, seed: int = 0, batch: int = 7) -> Tensor:
    space = hf.ParameterSpace(("w",), ((rows.shape[1],),))
    state = recipe.start(hf.Setting(space, Draw(seed), dtype=rows.dtype))
    index = torch.arange(len(rows))
    for part, at in zip(rows.split(batch), index.split(batch), strict=True):
        recipe.update(state, GivenRows(part, at))
    return recipe.finish(state).diagonal()


def test_signs_are_right_in_the_mean() -> None:
    rows = torch.randn(30, 4, dtype=torch.float64) + 1
    exact = rows.square().sum(0)
    recipe = hf.Diagonal(estimate="signs", group=10)
    draws = torch.stack([diagonal(recipe, rows, seed) for seed in range(4000)])
    # per group, Var(Σσw)² = 2[(Σw²)² − Σw⁴], for independent signs
    variance = sum(
        2 * (part.square().sum(0).square() - part.pow(4).sum(0)) for part in rows.split(10)
    )
    spread = (variance / len(draws)).sqrt()
    assert bool(((draws.mean(0) - exact).abs() < 5 * spread).all())
    torch.testing.assert_close(draws.var(0), variance, rtol=0.15, atol=0)


def test_groups_of_one_are_exact() -> None:
    rows = torch.randn(30, 4, dtype=torch.float64)
    found = diagonal(hf.Diagonal(estimate="signs", group=1), rows)
    torch.testing.assert_close(found, diagonal(hf.Diagonal(), rows))
    torch.testing.assert_close(found, rows.square().sum(0))


@pytest.mark.parametrize("batch", [1, 4, 9, 30])
def test_batches_do_not_matter(batch: int) -> None:
    rows = torch.randn(30, 4, dtype=torch.float64)
    recipe = hf.Diagonal(estimate="signs", group=8)
    torch.testing.assert_close(diagonal(recipe, rows, batch=batch), diagonal(recipe, rows))


def test_a_network_by_signs() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    model.double()
    x, y = torch.randn(40, 4, dtype=torch.float64), torch.randint(3, (40,))
    data = list(zip(x.split(10), y.split(10), strict=True))

    def found(recipe: hf.Diagonal, seed: int) -> Tensor:
        regularizer = hf.Regularizer(hf.EWC(), recipe)
        penalty = regularizer.consolidate(model, data, seed=seed, progress=False)
        return penalty.matrix.diagonal()

    exact = found(hf.Diagonal(), 0)
    torch.testing.assert_close(found(hf.Diagonal(estimate="signs", group=1), 3), exact)
    mean = torch.stack([found(hf.Diagonal(estimate="signs", group=4), s) for s in range(60)]).mean(
        0
    )
    error = (mean - exact).square().sum() / exact.square().sum()
    assert float(error) < 0.05


def test_every_task_draws_its_own_signs() -> None:
    model = torch.nn.Linear(3, 2)
    data = [(torch.randn(6, 3), torch.randint(2, (6,)))]
    regularizer = hf.Regularizer(hf.EWC(), hf.Diagonal(estimate="signs", group=3))
    first = regularizer.consolidate(model, data, seed=0, progress=False)
    second = regularizer.consolidate(model, data, previous=first, seed=0, progress=False)
    ids = [task.hash_ids for task in second.tasks]
    assert len({*ids}) == 2
    assert all(len(i) == 1 for i in ids)


def test_older_files_still_say_the_same() -> None:
    assert to_json(hf.Diagonal()) == {"name": "diagonal"}
    signs = hf.Diagonal(estimate="signs", group=9)
    assert to_json(signs) == {"name": "diagonal", "estimate": "signs", "group": 9}
    assert from_json(hf.Approximation, to_json(signs)) == signs
    assert from_json(hf.Approximation, {"name": "diagonal"}) == hf.Diagonal()


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="estimate must be"):
        hf.Diagonal(estimate="guess")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="group must be a positive integer"):
        hf.Diagonal(estimate="signs", group=0)
