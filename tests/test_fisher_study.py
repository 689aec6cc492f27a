"""The study of one importance matrix, against the matrix written out."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast import fisher_study
from holdfast.fisher_study import TILE, FisherStudy, Found
from holdfast.models import MLP
from holdfast.seeds import derive
from holdfast.streams import Toy, join
from holdfast.training import Training

STUDY = FisherStudy(
    stream=Toy(length=2, train=30),
    model=MLP((2, 12, 8, 2)),
    training=Training(epochs=3, batch_size=20, lr=0.01),
    size=6,
    block=10,
    ranks=(1, 4),
    sketches=3,
)


@pytest.fixture(scope="module")
def found() -> Found:
    return STUDY.run(0)


def errors(found: Found, name: str) -> list[list[float]]:
    return [e["values"] for e in found.errors if e["approximation"]["name"] == name]


def test_errors_and_ranks_are_those_of_the_dense_matrix(found: Found) -> None:
    split = join([task.train for task in STUDY.stream.tasks(derive(0, "data"))])
    model = STUDY._train(0, split, lambda fraction: None)
    regularizer = hf.Regularizer(hf.EWC(), hf.Full(form="dense"))
    full = regularizer.consolidate(model, split.batches(7), seed=0).matrix.dense().double()
    norm = full.square().sum()
    diagonal = torch.diag(full.diagonal())
    mask = torch.block_diag(*[torch.ones(10, 10)] * (len(full) // 10 + 1))[
        : len(full), : len(full)
    ]
    values = torch.linalg.eigvalsh(full).flip(0)
    expected = {
        "diagonal": float((full - diagonal).square().sum() / norm),
        "block_diagonal": float((full * (1 - mask)).square().sum() / norm),
    }
    for name, value in expected.items():
        assert errors(found, name) == [[pytest.approx(value, rel=1e-4)]]
    low = [[float(values[rank:].square().sum() / norm)] for rank in (1, 4)]
    assert errors(found, "low_rank") == [[pytest.approx(v, rel=1e-3, abs=1e-9)] for [v] in low]
    assert found.stable_rank["trace"] == pytest.approx(float(full.trace() / values[0]), rel=1e-4)
    assert found.stable_rank["frobenius"] == pytest.approx(float(norm / values[0] ** 2), rel=1e-4)
    top = min(10, len(found.spectrum))
    assert found.spectrum[:top] == pytest.approx(values[:top].tolist(), rel=1e-3)


def test_sketches_are_independent_draws(found: Found) -> None:
    (values,) = errors(found, "count_sketch")
    assert len(set(values)) == 3
    streamed = {
        (e["approximation"]["rank"], e["approximation"]["group"]): len(e["values"])
        for e in found.streamed
    }
    assert streamed == {(1, "auto"): 3, (1, 1): 1, (4, "auto"): 3, (4, 1): 1}


def test_the_best_matrix_of_a_rank_is_not_beaten(found: Found) -> None:
    for entry in found.streamed:
        best = errors(found, "low_rank")[STUDY.ranks.index(entry["approximation"]["rank"])][0]
        assert min(entry["values"]) >= best * 0.999 - 1e-9


def test_tiles_hold_the_largest_entry() -> None:
    factor = torch.randn(3, 2 * TILE + 5)
    dense = (factor.T @ factor).abs()
    pooled = fisher_study.tiles(factor)
    assert pooled.shape == (3, 3)
    for i in range(3):
        for j in range(3):
            tile = dense[i * TILE : (i + 1) * TILE, j * TILE : (j + 1) * TILE]
            assert pooled[i, j] == pytest.approx(float(tile.max()), rel=1e-5)


def test_files_say_how_they_were_made_and_are_found_again(found: Found, tmp_path: Path) -> None:
    assert not fisher_study.is_done(tmp_path, STUDY, 0)
    path = found.save(tmp_path)
    assert fisher_study.is_done(tmp_path, STUDY, 0)
    assert not fisher_study.is_done(tmp_path, STUDY, 1)
    assert not fisher_study.is_done(tmp_path, FisherStudy(), 0)  # another study
    data = json.loads(path.read_text())
    assert data["study"]["stream"]["length"] == 2
    assert data["heat_map"]["tile"] == TILE
    with np.load(path.with_suffix(".npz")) as pictures:
        assert set(pictures.files) == {"full", "count_sketch"}
        assert pictures["full"].dtype == np.uint8
        assert pictures["full"].max() == 255
    path.write_text(path.read_text()[:50])
    assert not fisher_study.is_done(tmp_path, STUDY, 0)


def test_the_study_is_a_function_of_its_seed(found: Found) -> None:
    again = STUDY.run(0)
    assert again.to_json() == found.to_json()
    assert STUDY.run(1).spectrum != found.spectrum
