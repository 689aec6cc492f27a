"""An experiment is a value: JSON and back, a stable name, no contradictions."""

import dataclasses
import hashlib
import json
from typing import Any

import pytest
import torch

import holdfast as hf
import recipes_table
from holdfast.experiment import Experiment
from holdfast.models import MLP
from holdfast.original_diagonal import OriginalDiagonal
from holdfast.streams import Toy
from holdfast.training import Training


def experiment(**changes: Any) -> Experiment:
    base = Experiment(
        recipe="toy",
        preset="paper",
        stream=Toy(),
        model=MLP((2, 128, 64, 2)),
        training=Training(),
        regularizer=hf.Regularizer(
            hf.EWC(),
            hf.CountSketch(size=50, merge="stack"),
            strength=1e3,
            history=hf.MovingAverage(new=0.5, start="first"),
        ),
    )
    return dataclasses.replace(base, **changes)


def test_the_json_is_the_documented_one() -> None:
    assert experiment().to_json() == {
        "recipe": "toy",
        "preset": "paper",
        "stream": {"name": "toy", "length": 5, "train": 2000, "validation": 400, "test": 400},
        "model": {"name": "mlp", "sizes": [2, 128, 64, 2], "bias": True, "init": "default"},
        "training": {
            "epochs": 250,
            "batch_size": 100,
            "lr": 0.001,
            "reset": "task",
            "shuffle": True,
        },
        "regularizer": {
            "importance": {"name": "ewc", "labels": "true"},
            "approximation": {"name": "count_sketch", "size": 50, "copies": 1, "merge": "stack"},
            "strength": 1000.0,
            "history": {"name": "moving_average", "new": 0.5, "start": "first"},
            "anchor": "latest",
            "include": ["*"],
            "exclude": [],
        },
        "mode": "sequential",
        "original_diagonal": None,
        "seed": 0,
        "role": "report",
    }


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"regularizer": None, "mode": "joint"},
        {"regularizer": None, "role": "single"},
        {
            "regularizer": hf.Regularizer(hf.EWC(labels="predicted"), hf.Diagonal()),
            "original_diagonal": OriginalDiagonal("examples"),
        },
        {"regularizer": hf.Regularizer(hf.MAS(), hf.LowRank(rank=3, group=1), anchor="each")},
    ],
)
def test_it_comes_back_from_a_file(changes: dict[str, Any]) -> None:
    original = experiment(**changes)
    copy = Experiment.from_json(json.loads(json.dumps(original.to_json())))
    assert copy == original
    assert copy.id == original.id


def test_the_id_is_the_hash_of_the_canonical_json() -> None:
    value = experiment(seed=7)
    text = json.dumps(value.to_json(), sort_keys=True, separators=(",", ":"))
    assert value.id == hashlib.sha256(text.encode()).hexdigest()[:16]


def test_every_field_changes_the_id() -> None:
    diagonal = hf.Regularizer(hf.EWC(labels="predicted"), hf.Diagonal())
    variants = [
        experiment(),
        experiment(seed=1),
        experiment(preset="fair"),
        experiment(recipe="other"),
        experiment(role="tune"),
        experiment(stream=Toy(length=4)),
        experiment(model=MLP((2, 64, 2))),
        experiment(training=Training(reset="epoch")),
        experiment(regularizer=None),
        experiment(regularizer=None, mode="joint"),
        experiment(regularizer=diagonal),
        experiment(regularizer=diagonal, original_diagonal=OriginalDiagonal("batches")),
        experiment(regularizer=diagonal, original_diagonal=OriginalDiagonal("examples")),
    ]
    assert len({v.id for v in variants}) == len(variants)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "joint"}, "no earlier task to hold on to; set regularizer to null"),
        ({"role": "single"}, "no earlier task to hold on to"),
        ({"original_diagonal": OriginalDiagonal()}, "needs a regularizer with the approximation"),
        (
            {"original_diagonal": OriginalDiagonal(), "regularizer": None},
            "needs a regularizer with the approximation",
        ),
        (
            {
                "original_diagonal": OriginalDiagonal(),
                "regularizer": hf.Regularizer(hf.EWC(labels="true"), hf.Diagonal()),
            },
            r"expected the importance EWC\(labels='predicted'\)",
        ),
        ({"seed": -1}, "seed is 0 or larger, got -1"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        experiment(**changes)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            "mode",
            "parallel",
            "experiment.mode: unknown value 'parallel'; known: 'sequential', 'joint'",
        ),
        ("seed", "0", "experiment.seed: expected int, got '0'"),
        ("sede", 0, r"unknown field of experiment 'sede'; known: .*did you mean 'seed'"),
        ("training.epochs", 0, "epochs is 1 or larger"),
        (
            "training.momentum",
            0.9,
            "unknown field of experiment.training 'momentum'; known: epochs",
        ),
        ("regularizer.importance.name", "ewk", "unknown importance 'ewk'; known: ewc, mas"),
        ("stream.name", "mnist", "unknown stream 'mnist'; known: toy"),
    ],
)
def test_a_wrong_file_names_the_wrong_field(path: str, value: Any, message: str) -> None:
    data = experiment().to_json()
    *parents, last = path.split(".")
    part = data
    for name in parents:
        part = part[name]
    part[last] = value
    with pytest.raises(ValueError, match=message):
        Experiment.from_json(data)


def test_labels_tell_methods_apart() -> None:
    sketch = experiment().regularizer
    assert sketch is not None
    diagonal = hf.Regularizer(hf.EWC(labels="predicted"), hf.Diagonal(), 2e3)
    labels = [
        experiment().label,
        experiment(regularizer=dataclasses.replace(sketch, anchor="each")).label,
        experiment(regularizer=dataclasses.replace(sketch, history=hf.Mean()), seed=3).label,
        experiment(regularizer=None).label,
        experiment(regularizer=None, mode="joint").label,
        experiment(regularizer=None, role="single").label,
        experiment(role="tune", seed=100).label,
        experiment(regularizer=diagonal, original_diagonal=OriginalDiagonal()).label,
    ]
    assert len(set(labels)) == len(labels)
    assert labels[0] == "paper ewc count_sketch 50 λ=1000 seed 0"


@pytest.mark.parametrize(
    "approximation",
    [found for variants in recipes_table.APPROXIMATIONS.values() for found in variants.values()],
    ids=repr,
)
def test_int8_is_refused_before_training_where_the_matrix_would_refuse_it(
    approximation: hf.Approximation,
) -> None:
    held = hf.Regularizer(hf.EWC(), approximation)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    data = [(torch.randn(16, 4), torch.randint(0, 3, (16,)))]
    penalty = held.consolidate(model, data, seed=0, progress=False)
    if approximation.fits_int8:
        assert penalty.to(dtype=torch.int8).nbytes < penalty.nbytes
        assert experiment(regularizer=held, storage="int8").storage == "int8"
        return
    with pytest.raises(ValueError, match="int8"):
        penalty.to(dtype=torch.int8)
    with pytest.raises(ValueError, match=r"cannot be stored as int8.* use bfloat16"):
        experiment(regularizer=held, storage="int8")
    assert experiment(regularizer=held, storage="bfloat16").storage == "bfloat16"
