"""How well approximations keep the importance matrix of one network, and what its spectrum looks like."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from holdfast.adam import FlatAdam
from holdfast.analysis import frobenius_error
from holdfast.approximation import (
    Approximation,
    BlockDiagonal,
    CountSketch,
    Diagonal,
    Full,
    LowRank,
)
from holdfast.configuration import to_json
from holdfast.importance import EWC
from holdfast.matrices import FactoredMatrix, PSDMatrix
from holdfast.models import MLP, Model
from holdfast.regularizer import Regularizer
from holdfast.results import atomic
from holdfast.seeds import derive
from holdfast.streams import Split, Stream, Toy, join
from holdfast.training import Training, learn

__all__ = ["FORMAT", "FisherStudy", "Found", "is_done", "path_of"]

FORMAT = 1
TILE = 40  # entries a side that become one pixel: 8,770 entries give 220 pixels
ROOT = 4  # pixels show the fourth root: entries span ten orders of magnitude, a picture shows two or three


_STREAM, _MODEL = Toy(length=4, train=1600), MLP((2, 128, 64, 2))
_TRAINING = Training(epochs=200, reset="epoch")


@dataclasses.dataclass(frozen=True)
class FisherStudy:
    r"""One network trained on several tasks at once, its empirical Fisher, and approximations of it.

    Attributes:
        stream: The tasks, learnt jointly, as in the code behind the paper's figure.
        model: The network.
        training: How it is trained.
        size: Rows of the sketch.
        block: Entries a side of a block.
        ranks: Ranks of the truncated matrices.
        sketches: Draws of the sketch, and of other random approximations.
    """

    stream: Stream = _STREAM
    model: Model = _MODEL
    training: Training = _TRAINING
    size: int = 50
    block: int = 50
    ranks: tuple[int, ...] = (1, 50)
    sketches: int = 5

    def run(self, seed: int, progress: Callable[[float], None] = lambda fraction: None) -> "Found":
        """Train one network and measure; the same seed gives the same numbers."""
        split = join([task.train for task in self.stream.tasks(derive(seed, "data"))])
        model = self._train(seed, split, progress)
        exact = self._matrix(model, split, Full(form="factored"), seed)
        assert isinstance(exact, FactoredMatrix)
        values = torch.linalg.eigvalsh(exact.gram()).flip(0).clamp(min=0)
        errors: list[dict[str, Any]] = []
        sketch: PSDMatrix | None = None
        for approximation in (
            Diagonal(),
            BlockDiagonal(size=self.block),
            CountSketch(size=self.size),
        ):
            draws = self.sketches if isinstance(approximation, CountSketch) else 1
            found = [self._matrix(model, split, approximation, seed, k) for k in range(draws)]
            errors.append(_entry(approximation, [_error(matrix, exact) for matrix in found]))
            sketch = found[0]
            progress(0.9)
        for (
            rank
        ) in self.ranks:  # the best matrix of a rank: what is left are the other eigenvalues
            left = float((values[rank:] ** 2).sum() / (values**2).sum())
            errors.append(_entry(LowRank(rank=rank), [left]))
        streamed = []
        for rank in self.ranks:
            for low in (LowRank(rank=rank), LowRank(rank=rank, group=1)):
                draws = self.sketches if low.group == "auto" else 1
                found = [self._matrix(model, split, low, seed, k) for k in range(draws)]
                streamed.append(_entry(low, [_error(matrix, exact) for matrix in found]))
        assert isinstance(sketch, FactoredMatrix)
        whole = tiles(exact.factor)
        return Found(
            self,
            seed,
            errors=errors,
            streamed=streamed,
            spectrum=values.tolist(),
            stable_rank={
                "trace": float(values.sum() / values[0]),
                "frobenius": float((values**2).sum() / values[0] ** 2),
            },
            pictures={
                "full": _pixels(whole, whole),
                "count_sketch": _pixels(tiles(sketch.factor), whole),
            },
        )

    def _train(self, seed: int, split: Split, progress: Callable[[float], None]) -> nn.Module:
        """A network trained on all tasks at once."""
        model = self.model.build(seed)
        epochs = self.training.epochs
        learn(
            model,
            split,
            self.training,
            FlatAdam(model, self.training.lr),
            generator=torch.Generator().manual_seed(derive(seed, "order")),
            after_epoch=lambda epoch: progress(0.8 * (epoch + 1) / epochs),
        )
        return model

    def _matrix(
        self,
        model: nn.Module,
        split: Split,
        approximation: Approximation,
        seed: int,
        draw: int = 0,
    ) -> PSDMatrix:
        """The importance matrix of the trained network, as an approximation keeps it."""
        regularizer = Regularizer(EWC(), approximation, strength=1.0)
        return regularizer.consolidate(
            model, split.batches(100), seed=derive(seed, "sketch", draw), progress=False
        ).matrix


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    r"""What the study of one network found.

    Attributes:
        study: What was asked.
        seed: The network's seed.
        errors: :math:`\lVert\hat\Omega-\Omega\rVert_F^2 / \lVert\Omega\rVert_F^2` of each approximation, one
            value per draw; low rank is the best matrix of that rank, from the eigenvalues.
        streamed: The same for low rank in one pass.
        spectrum: The eigenvalues that are not zero to rounding, largest first.
        stable_rank: ``trace`` is :math:`\mathrm{tr}\,\Omega/\lambda_1`, ``frobenius`` is
            :math:`\lVert\Omega\rVert_F^2/\lambda_1^2`.
        pictures: Heat maps, see :data:`TILE`.
    """

    study: FisherStudy
    seed: int
    errors: list[dict[str, Any]]
    streamed: list[dict[str, Any]]
    spectrum: list[float]
    stable_rank: dict[str, float]
    pictures: dict[str, NDArray[np.uint8]]

    def to_json(self) -> dict[str, Any]:
        """The content of the JSON file."""
        return {
            "format": FORMAT,
            "seed": self.seed,
            "study": to_json(self.study),
            "errors": self.errors,
            "streamed": self.streamed,
            "spectrum": self.spectrum,
            "stable_rank": self.stable_rank,
            "heat_map": {
                "tile": TILE,
                "pool": "max of |entry|",
                "scale": f"value / maximum of the full matrix, to the power 1/{ROOT}",
            },
        }

    def save(self, folder: Path) -> Path:
        """Write ``fisher/seed<k>.npz`` and then ``.json`` below ``folder``, atomically."""
        path = path_of(folder, self.seed)
        arrays: dict[str, Any] = dict(self.pictures)
        with atomic(path.with_suffix(".npz")) as file:
            np.savez_compressed(file, **arrays)
        with atomic(path) as file:
            file.write(json.dumps(self.to_json(), separators=(",", ":")).encode())
        return path


def path_of(folder: Path, seed: int) -> Path:
    """Where the study of one network is kept."""
    return Path(folder) / "fisher" / f"seed{seed}.json"


def is_done(folder: Path, study: FisherStudy, seed: int) -> bool:
    """Whether the files of this very study are there."""
    path = path_of(folder, seed)
    if not path.exists() or not path.with_suffix(".npz").exists():
        return False
    try:
        data = json.loads(path.read_bytes())
    except ValueError:  # half-written by something else than us
        return False
    return (
        isinstance(data, dict)
        and data.get("format") == FORMAT
        and data.get("study") == to_json(study)
    )


def tiles(factor: Tensor) -> Tensor:
    """The largest absolute entry of FᵀF in every tile, without writing the matrix out."""
    dim = factor.shape[1]
    count = -(-dim // TILE)
    padded = torch.nn.functional.pad(factor, (0, count * TILE - dim))
    rows = []
    for first in range(0, count * TILE, TILE):
        strip = (padded[:, first : first + TILE].T @ padded).abs()
        rows.append(strip.reshape(TILE, count, TILE).amax((0, 2)))
    return torch.stack(rows)


def _pixels(values: Tensor, reference: Tensor) -> NDArray[np.uint8]:
    """Values as 0 to 255, on the scale of the reference."""
    share = (values / reference.max()).clamp(0, 1) ** (1 / ROOT)
    pixels: NDArray[np.uint8] = (share * 255).round().to(torch.uint8).numpy()
    return pixels


def _entry(approximation: Approximation, values: list[float]) -> dict[str, Any]:
    """One line of the error table."""
    return {"approximation": to_json(approximation), "values": values}


def _error(approximate: PSDMatrix, exact: PSDMatrix) -> float:
    """The relative squared Frobenius error as a number."""
    return float(frobenius_error(approximate, exact))
