"""An experiment as a value: everything that decides its numbers, and the name that follows from it."""

import dataclasses
import hashlib
import json
from typing import Any, Literal

from holdfast.approximation import Diagonal
from holdfast.configuration import from_json, to_json
from holdfast.models import Model
from holdfast.original_diagonal import OriginalDiagonal
from holdfast.regularizer import Regularizer
from holdfast.streams import Stream
from holdfast.training import Training

__all__ = ["Experiment"]

Mode = Literal["sequential", "joint"]
Role = Literal["report", "tune", "single"]
Storage = Literal["float32", "bfloat16", "int8"]

# Fields that came later are written only where they say something: the ids of older results stay.
LATER = {"limit": None, "storage": "float32"}


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One run: a network learns a stream, and is tested on every task after every task.

    Attributes:
        recipe: The recipe it belongs to.
        preset: The preset it belongs to, e.g. ``"paper"``.
        stream: Where the tasks come from.
        model: The network.
        training: How each task is learnt.
        regularizer: What holds on to earlier tasks; ``None`` lets the network forget.
        mode: ``"sequential"`` sees one task at a time; ``"joint"`` trains on the union of all tasks so far,
            as long as on a single task in epochs: the accuracy without the need to remember.
        original_diagonal: Replaces the diagonal by the original code's, see :class:`OriginalDiagonal`.
        limit: Consolidation looks at this many examples of a task; ``None`` at all of them.
        storage: Precision in which the penalty keeps its matrix.
        seed: Decides data, initial weights, order of the batches and hashes, each through its own seed.
        role: ``"report"`` is reported; ``"tune"`` only chooses a strength; ``"single"`` trains a fresh
            network on every task alone, the reference of intransigence.
    """

    recipe: str
    preset: str
    stream: Stream
    model: Model
    training: Training
    regularizer: Regularizer | None = None
    mode: Mode = "sequential"
    original_diagonal: OriginalDiagonal | None = None
    seed: int = 0
    role: Role = "report"
    limit: int | None = None
    storage: Storage = "float32"

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed is 0 or larger, got {self.seed}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit is 1 or larger, got {self.limit}")
        if self.storage not in ("float32", "bfloat16", "int8"):
            raise ValueError(f"unknown storage {self.storage!r}; known: float32, bfloat16, int8")
        held = self.regularizer
        if self.storage == "int8" and held is not None and not held.approximation.fits_int8:
            raise ValueError(
                f"{held.approximation!r} cannot be stored as int8, which needs a factor with a scale "
                "per row (CountSketch, LowRank); use bfloat16"
            )
        if self.regularizer is not None and (self.mode == "joint" or self.role == "single"):
            raise ValueError(
                f"mode {self.mode!r} with role {self.role!r} has no earlier task to hold on to; "
                "set regularizer to null"
            )
        if self.original_diagonal is not None:
            if self.regularizer is None or not isinstance(
                self.regularizer.approximation, Diagonal
            ):
                raise ValueError(
                    "original_diagonal replaces a diagonal: it needs a regularizer with the "
                    "approximation 'diagonal'"
                )
            self.original_diagonal.check(self.regularizer)
            if self.limit is not None:
                raise ValueError("original_diagonal reads all examples: limit must be null")

    def to_json(self) -> dict[str, Any]:
        """The experiment as plain JSON values."""
        data: dict[str, Any] = to_json(self)
        for name, default in LATER.items():
            if data[name] == default:
                del data[name]
        return data

    @classmethod
    def from_json(cls, data: Any) -> "Experiment":
        """The experiment that :meth:`to_json` wrote, or an error that names the wrong field."""
        experiment: Experiment = from_json(cls, data, "experiment")
        return experiment

    @property
    def id(self) -> str:
        """16 hexadecimal digits of the SHA-256 of the canonical JSON: the name of the result file."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def work(self) -> "Experiment":
        """The experiment without the names of its study: what decides every number of its result."""
        return dataclasses.replace(self, recipe="", preset="")

    @property
    def label(self) -> str:
        """A short description for people, e.g. ``paper ewc count_sketch seed 3``."""
        words = [self.preset]
        if self.role == "single":
            words.append("each task alone")
        elif self.mode == "joint":
            words.append("joint training")
        elif self.regularizer is None:
            words.append("no regularizer")
        else:
            words += self._method()
        if self.role == "tune":
            words.append("tuning")
        return " ".join([*words, f"seed {self.seed}"])

    def _unusual(self) -> list[str]:
        """Choices of the importance that are not the usual ones: its labels or outputs."""
        assert self.regularizer is not None
        importance: Any = self.regularizer.importance
        return [
            str(value)
            for field in dataclasses.fields(importance)
            if isinstance(value := getattr(importance, field.name), str) and value != field.default
        ]

    def _method(self) -> list[str]:
        """The words of the label that tell regularizers apart."""
        data = self.to_json()["regularizer"]
        importance, approximation = data["importance"], data["approximation"]
        words = [importance["name"], *self._unusual(), approximation["name"]]
        words += [
            f"{approximation[k]}" for k in ("size", "rank") if approximation.get(k) is not None
        ]
        if self.original_diagonal is not None:
            words.append(f"(original, per {self.original_diagonal.normalise})")
        if data["history"]["name"] != "moving_average":
            words.append(data["history"]["name"])
        if data["anchor"] != "latest":
            words.append(f"anchor {data['anchor']}")
        words += [f"from {self.limit} examples"] if self.limit is not None else []
        words += [self.storage] if self.storage != "float32" else []
        return [*words, f"λ={data['strength']:g}"]
