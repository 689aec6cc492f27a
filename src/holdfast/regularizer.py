r"""The recipe: importance × approximation × history, and the one call that uses it."""

import bisect
import dataclasses
import secrets
import warnings
from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from holdfast import memory
from holdfast.approximation import (
    Approximation,
    Composite,
    CountSketch,
    Diagonal,
    Kronecker,
    KroneckerPlusLowRank,
    LowRank,
    Setting,
)
from holdfast.configuration import positive, to_json
from holdfast.hashing import Draw, checked_seed
from holdfast.history import History, Sum
from holdfast.importance import EWC, Importance, Loss
from holdfast.matrices import Offset, PSDMatrix
from holdfast.matrices.rounding import coarsest
from holdfast.parameters import ParameterSpace, unwrap
from holdfast.penalty import Penalty, TaskRecord, checked_strength
from holdfast.preservation import neutral, preserved
from holdfast.progress import track
from holdfast.rows import Rows
from holdfast.structure import layer_shapes

__all__ = ["ImportanceWarning", "Regularizer"]

_LARGE = 3  # layers that advice on memory names at most


class ImportanceWarning(UserWarning):
    """The importance matrix is zero: the penalty will hold nothing."""


@dataclass(frozen=True)
class Regularizer:
    r"""How to hold on to a task: :math:`\frac12\lambda(\theta-\theta^*)^\top\hat\Omega(\theta-\theta^*)`.

    Args:
        importance: What matters: the rows whose squares sum to Ω.
        approximation: What we can afford: Ω̂. The default held on to as much as anything, in a fraction of
            a number per parameter, where all were compared (``results/frontier``).
        strength: λ.
        history: How the past adds up.
        anchor: "latest" pulls to the newest θ* only, as in the paper; "each" lets every task pull to
            its own, still in constant memory.
        include: Shell patterns; a parameter is held if its name matches one …
        exclude: … and none of these.

    Example:
        >>> from holdfast import EWC, CountSketch
        >>> regularizer = Regularizer(EWC(), CountSketch(size=50), strength=1e3)
    """

    importance: Importance = field(default_factory=EWC)
    approximation: Approximation = field(default_factory=partial(Kronecker, rank=64))
    strength: float = 1.0
    history: History = field(default_factory=Sum)
    anchor: Literal["latest", "each"] = "latest"
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, kind, example in (
            ("importance", Importance, "hf.EWC()"),
            ("approximation", Approximation, "hf.Kronecker(rank=64)"),
            ("history", History, "hf.Sum()"),
        ):
            value = getattr(self, name)
            if not isinstance(value, kind):
                got = "the class" if isinstance(value, type) else "the value"
                raise TypeError(
                    f"{name} must be an instance of hf.{kind.__name__}, got {got} {value!r}; call "
                    f"it with (), as in {name}={example}"
                )
            if not dataclasses.is_dataclass(value):
                raise TypeError(
                    f"{type(value).__name__} must be a dataclass: put @dataclass(frozen=True) above "
                    "the class; its fields are how penalties are compared and stored"
                )
        object.__setattr__(self, "strength", checked_strength(self.strength))
        if self.anchor not in ("latest", "each"):
            raise ValueError(f"anchor must be 'latest' or 'each', got {self.anchor!r}")
        for name in ("include", "exclude"):
            if isinstance(getattr(self, name), str):
                raise TypeError(f"{name} must be a tuple of patterns, got a string")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self.describe()  # what cannot be stored is said here, not after the pass over the data

    def consolidate(
        self,
        model: nn.Module,
        data: Iterable[Any],
        *,
        previous: Penalty | None = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        loss: Loss | None = None,
        seed: int | None = None,
        limit: int | None = None,
        progress: bool = True,
    ) -> Penalty:
        """Look at a learned task once and return the penalty that protects it.

        The model comes back bit-identical; nothing that is passed in is changed.

        Args:
            model: The network at θ*, any module.
            data: Any iterable of batches of the task; read once.
            previous: The penalty of the tasks before; the result holds them too.
            forward: ``forward(model, batch) -> outputs``; by default ``model(batch[0])``, or
                ``model(**batch)`` without the labels.
            loss: ``loss(outputs, batch) -> (B,)``, for EWC; by default cross-entropy.
            seed: For sketches and sampled labels. A constant is safe in a loop: every task draws
                its own hash from (seed, tasks before). None takes entropy and records it.
            limit: Read this many examples only.
            progress: Show a bar when the work is long.
        """
        if limit is not None:
            limit = positive("limit", limit, "or None for all examples")
        seed = secrets.randbits(63) if seed is None else checked_seed(seed)
        if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
            raise TypeError(
                f"data is a {type(data).__name__}, which yields one example at a time; expected batches: "
                "pass torch.utils.data.DataLoader(data, batch_size=100)"
            )
        self._check_previous(previous)
        inner = unwrap(model)
        space = ParameterSpace.of(inner, self.include, self.exclude)
        draw = Draw(seed, task=len(previous.tasks) if previous else 0)
        first = space.parameters(inner)[0]
        devices = sorted({str(p.device) for p in space.parameters(inner)})
        if len(devices) > 1 or first.is_meta:
            raise ValueError(
                f"the held parameters are on {', '.join(devices)}, expected one device with real "
                "memory; move the model there, or hold a part of it with include="
            )
        with preserved(inner, first.device):
            rows = Rows(
                inner,
                track(data, "consolidating", _length(data), progress),
                space,
                self.importance,
                draw,
                forward=forward,
                loss=loss,
                limit=limit,
            )
            dtype, layers = rows.gradients.like["dtype"], layer_shapes(inner, space)
            setting = Setting(space, draw, first.device, dtype, layers)
            hash_ids = self.approximation.hash_ids(setting)
            self._check_hashes(previous, hash_ids)
            self._check_memory(setting)
            state = self.approximation.start(setting)
            for batch in rows:
                self.approximation.update(state, batch)
            matrix = self.approximation.finish(state).scale_(1 / rows.divisor)
        record = TaskRecord(rows.examples, seed, hash_ids)
        return self.extend(previous, model, matrix, record)

    def extend(
        self, previous: Penalty | None, model: nn.Module, matrix: PSDMatrix, record: TaskRecord
    ) -> Penalty:
        """Add a task whose matrix is already there: history and anchors, no data.

        Args:
            previous: The penalty of the tasks before, or None.
            model: The network at the new task's θ*.
            matrix: Ω̂ of the new task, 1/n included.
            record: What to remember of it.
        """
        self._check_previous(previous)
        self._check_hashes(previous, record.hash_ids)
        with neutral(matrix.device), torch.no_grad():
            return self._extended(previous, model, matrix, record)

    def _extended(
        self, previous: Penalty | None, model: nn.Module, matrix: PSDMatrix, record: TaskRecord
    ) -> Penalty:
        space = ParameterSpace.of(model, self.include, self.exclude)
        _report(matrix, space)
        held = [t.detach() for t in space.tensors(model)]
        wide = any(t.dtype == torch.float64 for t in held)
        anchor = space.flatten([t.to(torch.float64 if wide else torch.float32) for t in held])
        w_old, w_new = self.history.weights(len(previous.tasks) if previous else 0)
        new = matrix if w_new == 1 else w_new * matrix
        offset: Offset = ()
        records: tuple[TaskRecord, ...] = (record,)
        if previous is not None:
            old, offset, old_anchor = self._embedded(previous, space, anchor)
            if self.anchor == "each":
                offset = old.moved(offset, anchor - old_anchor)
            if w_old != 1:
                old, offset = w_old * old, old.scaled_offset(offset, w_old)
            new, offset = self.approximation.add(old, offset, new)
            if eps := coarsest(old.tensors.values()):
                # rounding has left something where nothing was
                offset = new.recentred(offset, new, eps)
            records = (*previous.tasks, record)
        return Penalty(space, new, anchor, self.strength, offset, self.describe(), records)

    def describe(self) -> dict[str, Any]:
        """What must agree between the tasks of one penalty, as JSON."""
        described = to_json(self)
        return {k: described[k] for k in ("importance", "approximation", "history", "anchor")}

    def _embedded(
        self, previous: Penalty, space: ParameterSpace, anchor: Tensor
    ) -> tuple[PSDMatrix, Offset, Tensor]:
        """The previous matrix, offset and anchor in a space that may have grown."""
        here = previous._on(anchor.device)
        if here.space == space:
            return here.matrix, here.offset, here.anchor
        index = space.index_of(here.space)
        offset = self.approximation.embed_offset(here.matrix, here.offset, space, index)
        old_anchor = anchor.clone()  # new entries have not moved
        old_anchor[index.to(anchor.device)] = here.anchor.to(anchor.dtype)
        return self.approximation.embed(here.matrix, space, index), offset, old_anchor

    def _check_previous(self, previous: Penalty | None) -> None:
        if previous is None:
            return
        if not isinstance(previous, Penalty):
            raise TypeError(f"previous must be a Penalty or None, got {type(previous).__name__}")
        mine = self.describe()
        differ = [k for k in mine if previous.recipe.get(k) != mine[k]]
        if differ:
            lines = [f"{k}: was {previous.recipe.get(k)}, is {mine[k]}" for k in differ]
            raise ValueError(
                "previous was made by another recipe; its matrix cannot be continued:\n  "
                + "\n  ".join(lines)
            )

    def _check_hashes(self, previous: Penalty | None, hash_ids: tuple[str, ...]) -> None:
        seen = {h for task in previous.tasks for h in task.hash_ids} if previous else set()
        shared = seen.intersection(hash_ids)
        if shared:
            raise ValueError(
                f"hash {shared.pop()} is already in the previous penalty: sketches that share a "
                "hash must not be merged (their sum is biased); use another seed"
            )

    def _check_memory(self, setting: Setting) -> None:
        needed, free = self.approximation.nbytes(setting), memory.available(setting.device)
        if needed > free:
            advice = _without_large_layers(self.approximation, setting, free)
            advice = advice or _what_fits(setting, free)
            memory.require(repr(self.approximation), needed, setting.device, advice)


def _without_large_layers(approximation: Approximation, setting: Setting, free: int) -> str | None:
    """The few layers that are too large for products, and what would fit without them; or None."""
    if not isinstance(approximation, Kronecker | KroneckerPlusLowRank):
        return None
    layers = sorted(setting.layers, key=lambda s: s.groups * max(s.columns, s.outputs) ** 2)[::-1]
    for count in range(1, min(len(layers), _LARGE + 1)):
        large = layers[:count]
        parts: dict[str, Approximation] = {f"{s.name}.*": Diagonal() for s in large}
        parts["*"] = approximation
        if all(s.name for s in large) and Composite(parts).nbytes(setting) <= free:
            named = " and ".join(f"{s.name} ({s.outputs} x {s.columns})" for s in large)
            recipe = ", ".join(f'"{pattern}": {member!r}' for pattern, member in parts.items())
            return (
                f"too large for products: {named}; Composite({{{recipe}}}) or Diagonal() would fit"
            )
    return None


def _what_fits(setting: Setting, free: int) -> str:
    """Approximations that need at most ``free`` bytes, as advice."""
    fits = []
    for form, make in (
        ("LowRank(rank={})", lambda k: LowRank(rank=k)),
        ("CountSketch(size={})", lambda k: CountSketch(size=k)),
    ):
        sizes = range(1, setting.dim + 1)
        largest = bisect.bisect_right(sizes, free, key=lambda k: make(k).nbytes(setting))
        fits += [form.format(largest)] if largest else []
    if Diagonal().nbytes(setting) <= free:
        fits.append("Diagonal()")
    if not fits:
        return "not even Diagonal() fits: hold fewer parameters with include="
    return f"{' or '.join(fits)} would fit"


def _length(data: Iterable[Any]) -> int | None:
    """The number of batches where it is known: a loader over a stream has ``len`` and raises."""
    try:
        return len(data) if isinstance(data, Sized) else None
    except (TypeError, NotImplementedError):
        return None


def _report(matrix: PSDMatrix, space: ParameterSpace) -> None:
    """A matrix that cannot work is said at once."""
    trace = float(matrix.trace())
    if trace != trace or trace in (float("inf"), float("-inf")):
        pieces = zip(space.names, space.split(matrix.diagonal()), strict=True)
        bad = [name for name, piece in pieces if not bool(piece.isfinite().all())]
        raise ValueError(
            f"the importance matrix has NaN or inf entries in: {', '.join(bad) or 'its sums'}; "
            "gradients overflow: scale the loss down or use float64"
        )
    if trace == 0:
        warnings.warn(
            "the importance matrix is zero: every row is zero, so the penalty holds nothing. Does "
            "the loss depend on the held parameters, and is it above zero?",
            ImportanceWarning,
            stacklevel=4,
        )
