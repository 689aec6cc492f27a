"""Typed changes from the command line."""

from typing import Any

import pytest

import holdfast as hf
from holdfast.experiment import Experiment
from holdfast.recipes import RECIPES
from holdfast.settings import change_all


def example() -> Experiment:
    return RECIPES["toy"].example("paper")


@pytest.mark.parametrize(
    ("setting", "path", "value"),
    [
        ("seed=7", "seed", 7),
        ("training.epochs=10", "training.epochs", 10),
        ("training.lr=1e-4", "training.lr", 1e-4),
        ("training.lr=1", "training.lr", 1.0),
        ("training.shuffle=false", "training.shuffle", False),
        ("regularizer.strength=1e3", "regularizer.strength", 1000.0),
        ("regularizer.anchor=each", "regularizer.anchor", "each"),
        ("regularizer.approximation.size=9", "regularizer.approximation.size", 9),
        ("regularizer.importance.labels=true", "regularizer.importance.labels", "true"),
        ("regularizer.approximation=diagonal", "regularizer.approximation", hf.Diagonal()),
        ("regularizer.importance=mas", "regularizer.importance", hf.MAS()),
        ("regularizer.history=sum", "regularizer.history", hf.Sum()),
        (
            'regularizer.approximation={"name":"low_rank","rank":3,"group":"auto"}',
            "regularizer.approximation",
            hf.LowRank(rank=3),
        ),
        ("model.sizes=[2,8,2]", "model.sizes", (2, 8, 2)),
        (" seed = 3 ", "seed", 3),
    ],
)
def test_a_field_takes_a_value_of_its_type(setting: str, path: str, value: Any) -> None:
    found: Any = change_all(example(), [setting])
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


def test_null_takes_a_part_away_and_later_settings_see_earlier_ones() -> None:
    assert change_all(example(), ["regularizer=null"]).regularizer is None
    changed = change_all(
        example(), ["regularizer.approximation=low_rank", "regularizer.approximation.rank=2"]
    )
    assert changed.regularizer is not None
    assert changed.regularizer.approximation == hf.LowRank(rank=2)
    original = example()
    change_all(original, ["seed=9"])
    assert original == example()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("sed=1", r"unknown field of experiment 'sed'; known: recipe.*did you mean 'seed'"),
        ("training.epoch=1", r"unknown field of training 'epoch'; known: epochs, batch_size"),
        (
            "regularizer.approximation.sise=1",
            r"unknown field of regularizer.approximation 'sise'; ",
        ),
        ("regularizer.approximation=sketch", r"unknown approximation 'sketch'; known: diagonal"),
        ("regularizer.importance.labels=all", r"unknown value 'all'; known: 'true', 'sampled'"),
        ("training.reset=yes", r"unknown value 'yes'; known: 'never', 'task', 'epoch'"),
        ("training.epochs=ten", r"training.epochs: expected int, got 'ten'"),
        ("training.epochs=2.5", r"training.epochs: expected int"),
        ("training.shuffle=maybe", r"expected bool"),
        ("training.epochs=0", r"epochs is 1 or larger, got 0"),
        ("seed.x=1", r"seed is 0 and has no field 'x'"),
        ("training.epochs", r"expected field=value, e.g. regularizer.strength=1e3"),
        ("=3", r"expected field=value"),
    ],
)
def test_wrong_settings_say_what_is_known(setting: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        change_all(example(), [setting])


def test_settings_below_an_absent_part() -> None:
    bare = change_all(example(), ["regularizer=null"])
    with pytest.raises(ValueError, match="regularizer is None and has no field 'strength'"):
        change_all(bare, ["regularizer.strength=2"])
    assert change_all(bare, ["regularizer.strength=2"], skip_absent=True) == bare
    with pytest.raises(ValueError, match="unknown field"):
        change_all(bare, ["regularised.strength=2"], skip_absent=True)
