"""The comparison of sketch families runs, and measures what it says."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import holdfast as hf
import reference
from holdfast.models import MLP
from holdfast.streams import Toy
from holdfast.training import Training

FILE = Path(__file__).parents[1] / "benchmarks" / "families.py"


@pytest.fixture(scope="module")
def families() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("families_benchmark", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for their annotations
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def small(families: ModuleType) -> object:
    stream = Toy(length=2, train=60, validation=2, test=2)
    return families.Setup(stream, MLP((2, 5, 2)), Training(epochs=3), Training(epochs=4), 10.0)


def test_the_exact_form_is_that_of_single_gradients(families: ModuleType) -> None:
    problem = families.Problem(small(families), seed=1)
    split = problem.one
    W = reference.rows(problem.model, (split.inputs, split.labels), hf.EWC())
    D = problem.directions(None)
    assert D.shape == (27, 4)
    expected = (W @ D).square().sum(0) / 60
    torch.testing.assert_close(problem.form(D), expected, rtol=1e-4, atol=0)
    for approximation in (hf.Diagonal(), hf.CountSketch(5)):
        matrix = problem.consolidate(approximation).matrix
        forms = torch.stack([d @ matrix.dense().double() @ d for d in D.T])
        torch.testing.assert_close(families.forms(matrix, D), forms, rtol=1e-4, atol=0)


def test_it_writes_a_table_and_what_it_was_made_from(families: ModuleType, tmp_path: Path) -> None:
    lines = families.run("small", small(families), tmp_path, seeds=2, draws=2, budgets=[5])
    body = json.loads((tmp_path / "small.json").read_text())
    assert body["meta"]["seeds"] == 2
    assert [len(seed["free"]) for seed in body["recorded"]] == [4, 4]
    assert len(body["lines"]) == len(lines) == len(families.FAMILIES) + len(families.FIXED)
    for line in body["lines"]:
        assert set(line["errors"]) == {"random", "free", "held", "own"}
        assert len(line["errors"]["free"]["medians"]) == 4
        assert line["nbytes"] <= 27 * 4 * 6
    page = (tmp_path / "small.md").read_text()
    assert all(f"| {family}" in page for family in families.FAMILIES)
