"""Recipes as values: they become JSON and come back equal; mistakes list what is known."""

import dataclasses
import functools
import importlib
import json
import pkgutil
from collections.abc import Mapping
from typing import Any, Literal

import pytest
from torch import Tensor

import holdfast
import holdfast as hf
from holdfast import configuration
from holdfast.augmentation import Augmentation
from holdfast.configuration import from_json, key_of, lookup, register, to_json
from holdfast.experiment import Experiment
from holdfast.fisher_study import FisherStudy
from holdfast.jobs import RunExperiment, RunFisherStudy
from holdfast.models import MLP, MultiHeadMLP, WideResNet
from holdfast.streams import STREAMS, Toy
from holdfast.training import Training


def own(outputs: Tensor, batch: object) -> Tensor:
    return outputs.sum(1)


TOY = Toy(length=2, train=10, validation=4, test=6)

# Every registered recipe with every field away from its default; a new member needs a row.
MEMBERS: dict[str, dict[str, Any]] = {
    "importance": {
        "ewc": hf.EWC(labels="sampled"),
        "mas": hf.MAS(outputs="softmax"),
        "scp": hf.SCP(slices=None),
        "custom": hf.Custom(own),
    },
    "approximation": {
        "diagonal": hf.Diagonal(estimate="signs", group=7),
        "block_diagonal": hf.BlockDiagonal(size=7, by="layer"),
        "count_sketch": hf.CountSketch(size=7, copies=3, merge="stack"),
        "low_rank": hf.LowRank(rank=7, group=3, shrink=True, merge="stack"),
        "full": hf.Full(form="factored"),
        "diagonal_plus_low_rank": hf.DiagonalPlusLowRank(
            rank=7, group=3, shrink=True, merge="stack"
        ),
        "composite": hf.Composite({"*.bias": hf.Diagonal(), "*": hf.LowRank(rank=7)}),
        "dense_sketch": hf.DenseSketch(size=7, kind="gaussian", merge="stack"),
        "osnap": hf.OSNAP(size=6, nonzeros=3, merge="stack"),
        "srht": hf.SRHT(size=7, block=8, merge="stack"),
        "nystrom": hf.Nystrom(size=7, seed=3, merge="stack"),
        "kronecker": hf.Kronecker(merge="stack", rank=7),
        "kronecker_plus_low_rank": hf.KroneckerPlusLowRank(
            rank=7, group=3, shrink=True, correction="eigen", merge="stack"
        ),
    },
    "history": {
        "moving_average": hf.MovingAverage(new=0.25, start="zero"),
        "sum": hf.Sum(),
        "mean": hf.Mean(),
    },
    "model": {
        "mlp": MLP((2, 5, 2), bias=False, init="xavier"),
        "multi_head_mlp": MultiHeadMLP((2, 5, 2), heads=3, bias=False, init="xavier"),
        "wide_resnet": WideResNet(depth=10, width=1, dropout=0.25, classes=7, autocast=True),
    },
    "stream": {
        "toy": TOY,
        "permuted_mnist": STREAMS["permuted_mnist"](
            source="generated",
            validation=7,
            train_on_validation=True,
            train_size=50,
            test_size=40,
            length=3,
            permutation="cumulative",
        ),
        "rotated_mnist": STREAMS["rotated_mnist"](
            source="generated",
            validation=7,
            train_on_validation=True,
            train_size=50,
            test_size=40,
            length=3,
            step=12.5,
        ),
        "split_mnist": STREAMS["split_mnist"](
            source="generated",
            validation=7,
            train_on_validation=True,
            train_size=50,
            test_size=40,
            groups=((3, 1), (2, 0)),
            head="multi",
        ),
        "cifar100_shift": STREAMS["cifar100_shift"](
            classes=(("beaver", "aquarium_fish"), ("dolphin", "flatfish")),
            source="generated",
            validation=7,
            train_size=50,
            test_size=40,
            augmentation=Augmentation(translate=1),
        ),
    },
    "job": {
        "experiment": RunExperiment(
            Experiment(
                recipe="r",
                preset="p",
                stream=TOY,
                model=MLP((2, 5, 2)),
                training=Training(epochs=3),
                regularizer=hf.Regularizer(
                    hf.MAS(),
                    hf.LowRank(rank=3, group=1),
                    strength=3,  # an integer where a float belongs
                    history=hf.MovingAverage(new=0.125),
                    anchor="each",
                    include=("a.*", "b"),
                    exclude=("c",),
                ),
                seed=5,
                role="tune",
            ),
            boundaries=True,
        ),
        "fisher": RunFisherStudy(FisherStudy(TOY, MLP((2, 3, 2)), ranks=(1, 2, 3)), seed=4),
    },
}


@functools.cache
def axes() -> dict[str, tuple[type, Mapping[str, type]]]:
    """Every axis of the package by its noun, whatever module declares it."""
    for module in pkgutil.walk_packages(holdfast.__path__, "holdfast."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    declared = configuration._REGISTRIES.items()
    ours = [(axis, *entry) for axis, entry in declared if axis.__module__.startswith("holdfast.")]
    return {noun: (axis, members) for axis, noun, members in ours}


ROWS = [(noun, key) for noun, members in MEMBERS.items() for key in members]


def test_every_member_of_every_axis_has_a_row() -> None:
    declared = {noun: set(members) for noun, (_, members) in axes().items()}
    assert declared == {noun: set(members) for noun, members in MEMBERS.items()}


@pytest.mark.parametrize(("noun", "key"), ROWS)
def test_rows_are_away_from_their_defaults(noun: str, key: str) -> None:
    value = MEMBERS[noun][key]
    if noun == "job":  # parts of them are tested on their own
        return
    either = {"kronecker": {"correction"}}  # which has no rank
    for field in dataclasses.fields(value):
        if field.name in either.get(key, ()):
            continue
        assert getattr(value, field.name) != field.default, f"{field.name} has its default"


@pytest.mark.parametrize(("noun", "key"), [row for row in ROWS if row[1] != "custom"])
def test_recipes_come_back_equal(noun: str, key: str) -> None:
    axis, members = axes()[noun]
    value = MEMBERS[noun][key]
    written = json.loads(json.dumps(to_json(value)))
    assert written["name"] == key == key_of(members, value)
    again = from_json(axis, written)
    assert again == value
    assert type(again) is type(value)
    assert to_json(again) == written
    assert hash(again) == hash(value)


@pytest.mark.parametrize(
    "member", [cls for _, members in axes().values() for cls in members.values()]
)
def test_recipes_are_frozen(member: type) -> None:
    assert dataclasses.is_dataclass(member)
    assert member.__dataclass_params__.frozen  # type: ignore[attr-defined]


def test_defaults_may_be_left_out() -> None:
    assert from_json(hf.Approximation, {"name": "count_sketch"}) == hf.CountSketch()
    minimal = {"importance": {"name": "ewc"}, "approximation": {"name": "diagonal"}}
    assert from_json(hf.Regularizer, minimal) == hf.Regularizer(hf.EWC(), hf.Diagonal())


def test_integers_become_floats_where_floats_belong() -> None:
    read = from_json(hf.History, {"name": "moving_average", "new": 1})
    assert type(read.new) is float


def test_functions_are_written_for_people_and_cannot_be_read() -> None:
    written = to_json(hf.Custom(own))
    assert written == {"name": "custom", "fn": f"{__name__}:own"}
    with pytest.raises(
        ValueError, match=r"fn: a function cannot be read from a file; build it in"
    ):
        from_json(hf.Importance, written)


class Callable_:
    """A function with state."""

    def __call__(self, outputs: Tensor, batch: object) -> Tensor:
        return outputs.sum(1)


@pytest.mark.parametrize(
    ("fn", "shown"),
    [
        (functools.partial(own, batch=None), "own"),
        (Callable_(), "Callable_"),
        (lambda outputs, batch: outputs.sum(1), "<lambda>"),
        (Callable_().__call__, "__call__"),
    ],
)
def test_any_callable_can_be_written(fn: Any, shown: str) -> None:
    """Without addresses of this process: the text is compared between runs."""
    written = to_json(hf.Custom(fn))["fn"]
    assert shown in written
    assert " at 0x" not in written
    hf.Regularizer(hf.Custom(fn), hf.Diagonal()).describe()


@pytest.mark.parametrize(
    ("axis", "name", "message"),
    [
        (
            hf.Approximation,
            "count_sketsch",
            r"unknown approximation 'count_sketsch'; known: diagonal, block_diagonal, "
            r"count_sketch, low_rank, diagonal_plus_low_rank, full, .*; did you mean "
            r"'count_sketch'\?",
        ),
        (hf.Importance, "EWC", r"unknown importance 'EWC'; known: ewc, mas, scp, custom"),
        (hf.History, "average", r"unknown history 'average'; known: moving_average, sum, mean"),
        (hf.History, None, r"unknown history None; known: moving_average"),
        (hf.History, ["sum"], r"unknown history \['sum'\]; known: moving_average"),
    ],
)
def test_unknown_names_list_the_known_ones(axis: type, name: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(axis, {"name": name})


def test_unknown_fields_list_the_known_ones() -> None:
    message = r"field of .* 'sizes'; known: size, copies, merge; did you mean 'size'\?"
    with pytest.raises(ValueError, match=message):
        from_json(hf.Approximation, {"name": "count_sketch", "sizes": 3}, "approximation")
    message = r"unknown field of .* 'strenght'; known: importance, .*did you mean 'strength'\?"
    with pytest.raises(ValueError, match=message):
        from_json(hf.Regularizer, {**to_json(hf.Regularizer(hf.EWC(), hf.Full())), "strenght": 1})


def test_missing_fields_are_named() -> None:
    with pytest.raises(ValueError, match=r"experiment: missing recipe, preset, stream, model"):
        from_json(Experiment, {}, "experiment")


@pytest.mark.parametrize("data", [None, "ewc", 3, [], {}, {"labels": "true"}])
def test_members_need_a_name(data: object) -> None:
    with pytest.raises(
        ValueError, match=r"expected an object with a 'name' \(ewc, mas, scp, cust"
    ):
        from_json(hf.Importance, data)


WRONG: list[tuple[type, dict[str, Any], str]] = [
    (hf.Approximation, {"name": "count_sketch", "size": "50"}, r"\.size: expected int, got '50'"),
    (hf.Approximation, {"name": "count_sketch", "size": 5.0}, r"\.size: expected int, got 5\.0"),
    (hf.Approximation, {"name": "count_sketch", "size": True}, r"\.size: expected int, got True"),
    (hf.Approximation, {"name": "count_sketch", "size": None}, r"\.size: expected int, got None"),
    (hf.Approximation, {"name": "count_sketch", "merge": "sum"}, r"'sum'; known: 'rows', 'stack'"),
    (hf.Approximation, {"name": "count_sketch", "merge": 1}, r"value 1; known: 'rows', 'stack'"),
    (hf.Approximation, {"name": "low_rank", "shrink": 1}, r"\.shrink: expected bool, got 1"),
    (hf.Approximation, {"name": "low_rank", "group": "all"}, r"expected int, .*known: 'auto'"),
    (hf.Approximation, {"name": "low_rank", "group": True}, r"\.group: expected int, got True"),
    (hf.Approximation, {"name": "low_rank", "rank": 0}, r"rank must be a positive integer, got 0"),
    (hf.Importance, {"name": "scp", "slices": "many"}, r"\.slices: expected int, got 'many'"),
    (hf.History, {"name": "moving_average", "new": "half"}, r"\.new: expected float, got 'half'"),
    (hf.History, {"name": "moving_average", "new": True}, r"\.new: expected float, got True"),
]


@pytest.mark.parametrize(("axis", "data", "message"), WRONG)
def test_wrong_types_are_refused(axis: type, data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(axis, data)


def test_the_path_of_a_wrong_field_is_shown() -> None:
    written = to_json(MEMBERS["job"]["experiment"])
    written["experiment"]["regularizer"]["approximation"]["rank"] = "three"
    with pytest.raises(
        ValueError, match=r"experiment\.regularizer\.approximation\.rank: expected"
    ):
        from_json(axes()["job"][0], written, "job")
    written = to_json(hf.Regularizer(hf.EWC(), hf.Full()))
    for value, message in [
        ("*", r"regularizer\.include: expected a list, got '\*'"),
        ([1], r"regularizer\.include\[0\]: expected str, got 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            from_json(hf.Regularizer, {**written, "include": value}, "regularizer")


@dataclasses.dataclass(frozen=True)
class Everything:
    """Every kind of field a recipe may have."""

    pair: tuple[int, str]
    table: dict[str, float]
    nested: tuple[tuple[int, ...], ...]
    choice: Literal[1, "one"]
    either: int | str | None = None
    anything: Any = None


FULL = Everything((1, "a"), {"x": 0.5}, ((1, 2), ()), "one", "text", [1, {"a": None}])


def test_every_kind_of_field_comes_back() -> None:
    assert from_json(Everything, json.loads(json.dumps(to_json(FULL)))) == FULL


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("pair", [1], r"pair: expected 2 values, got 1"),
        ("pair", [1, 2], r"pair\[1\]: expected str, got 2"),
        ("pair", {"a": 1}, r"pair: expected a list, got"),
        ("table", [1], r"table: expected an object, got \[1\]"),
        ("table", {"x": "y"}, r"table\.x: expected float, got 'y'"),
        ("nested", [[1, "2"]], r"nested\[0\]\[1\]: expected int, got '2'"),
        ("choice", True, r"choice: unknown value True; known: 1, 'one'"),
        ("choice", [], r"choice: unknown value \[\]; known: 1, 'one'"),
        ("either", 1.5, r"either: expected int, got 1\.5 or .*either: expected str, got 1\.5"),
    ],
)
def test_every_kind_of_field_refuses_another(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(Everything, {**to_json(FULL), name: value}, "recipe")


def test_values_without_a_json_form_are_refused() -> None:
    with pytest.raises(TypeError, match=r"complex 1j has no JSON form"):
        to_json({"a": [1j]})
    with pytest.raises(TypeError, match=r"no rule to read <class 'complex'>"):
        from_json(complex, 3)


def test_a_member_of_ones_own_goes_by_its_class() -> None:
    @dataclasses.dataclass(frozen=True)
    class Half(hf.Diagonal):
        """Registered nowhere."""

        share: float = 0.5

    written = to_json(Half(0.25))
    assert written["share"] == 0.25
    assert written["name"].startswith(f"{__name__}:")
    assert written["name"].endswith("Half")
    with pytest.raises(ValueError, match=r"unknown approximation .*Half'; known: diagonal"):
        from_json(hf.Approximation, written)
    with pytest.raises(
        ValueError, match="Half is not registered; known: diagonal, block_diagonal"
    ):
        key_of(hf.APPROXIMATIONS, Half())


def test_an_axis_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configuration, "_REGISTRIES", dict(configuration._REGISTRIES))

    class Shape:
        """An axis."""

    @dataclasses.dataclass(frozen=True)
    class Circle(Shape):
        """A member."""

        radius: float = 1.0

    members = register(Shape, "shape", {"circle": Circle})
    assert from_json(Shape, {"name": "circle", "radius": 2}) == Circle(2.0)
    assert lookup("shape", members, "circle") is Circle
    with pytest.raises(
        ValueError, match=r"unknown shape 'circel'; known: circle; did you mean 'ci"
    ):
        lookup("shape", members, "circel")


@pytest.mark.parametrize("noun", ["importance", "approximation", "history"])
def test_recipes_print_as_code(noun: str) -> None:
    for value in MEMBERS[noun].values():
        fields = [f"{f.name}={getattr(value, f.name)!r}" for f in dataclasses.fields(value)]
        assert repr(value) == f"{type(value).__name__}({', '.join(fields)})"


@pytest.mark.parametrize("noun", ["importance", "approximation", "history"])
def test_one_name_everywhere(noun: str) -> None:
    """Class ``CountSketch``, file ``count_sketch.py``, key ``"count_sketch"``."""
    for key, cls in axes()[noun][1].items():
        snake = "".join(f"_{c.lower()}" if c.isupper() else c for c in cls.__name__).lstrip("_")
        assert key in (snake, cls.__name__.lower())
        if noun != "history":  # three short rules share a file
            assert cls.__module__ == f"holdfast.{noun}.{key}"
        assert getattr(hf, cls.__name__) is cls


def test_a_regularizer_needs_no_choice() -> None:
    chosen = hf.Regularizer(hf.EWC(), hf.Kronecker(rank=64), 1.0, hf.Sum(), "latest")
    assert hf.Regularizer() == chosen
