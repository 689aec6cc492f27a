"""The comparison of sketch families runs, and measures what it says."""

import collections
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import holdfast as hf
import reference
from holdfast.models import MLP
from holdfast.streams import Toy
from holdfast.training import Training

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def families() -> Iterator[ModuleType]:
    yield from loaded("families")


@pytest.fixture(scope="module")
def merging() -> Iterator[ModuleType]:
    yield from loaded("merging")


def loaded(name: str) -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", FOLDER / f"{name}.py")
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
    setup, options = small(families), {"seeds": 2, "draws": 2, "budgets": [5]}
    families.run("small", setup, tmp_path, **options, only="i")
    families.run("small", setup, tmp_path, **options)
    body = json.loads((tmp_path / "small.json").read_text())
    assert body["meta"]["seeds"] == 2
    assert len(body["meta"]["commands"]) == 1  # the second run has measured everything anew
    assert [len(seed["free"]) for seed in body["recorded"]] == [4, 4]
    assert len(body["lines"]) == len(families.FAMILIES) + len(families.FIXED)
    for line in body["lines"]:
        assert set(line["errors"]) == {"random", "free", "held", "own"}
        assert len(line["errors"]["free"]["medians"]) == 4
    page = (tmp_path / "small.md").read_text()
    assert all(f"| {family}" in page for family in (*families.FAMILIES, *families.FIXED))
    families.run("small", setup, tmp_path, **options, only="diagonal")
    again = json.loads((tmp_path / "small.json").read_text())
    assert len(again["meta"]["commands"]) == 2

    def without_time(lines: list[dict[str, Any]]) -> list[str]:
        return sorted(json.dumps({**line, "seconds": 0}) for line in lines)

    assert without_time(again["lines"]) == without_time(body["lines"])


def test_merging_is_measured_against_the_exact_sum(merging: ModuleType, tmp_path: Path) -> None:
    stream = Toy(length=3, train=60, validation=2, test=2)
    setup = merging.Setup(stream, MLP((2, 5, 2)), Training(epochs=3))
    matrices = merging.matrices(setup, seed=0)
    exact = matrices[merging.EXACT].dense()
    parts = [merging.single(matrices[merging.EXACT], task).dense() for task in range(3)]
    torch.testing.assert_close(sum(parts), exact)
    found = collections.defaultdict(lambda: collections.defaultdict(list))
    merging.measure(setup, 0, found)
    assert found.keys() == {*merging.WAYS, merging.USUAL}
    for name, matrix in matrices.items():
        dense = matrix.dense()
        error = float((dense - exact).square().sum() / exact.square().sum())
        kept = min(float((part * dense).sum() / part.square().sum()) for part in parts)
        assert found[name]["error"] == [pytest.approx(error, rel=1e-2, abs=1e-6)]
        assert found[name]["kept"] == [pytest.approx(kept, rel=1e-2)]
    merging.write(tmp_path, 1, {"permuted": found})
    assert all(f"| {name} |" in (tmp_path / "merging.md").read_text() for name in matrices)
