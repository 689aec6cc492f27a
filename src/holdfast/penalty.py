r"""The penalty: a value that a training loop adds to its loss."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from holdfast.autocast import full_precision
from holdfast.configuration import plain
from holdfast.matrices import FactoredMatrix, Offset, PSDMatrix
from holdfast.matrices.base import compute_dtype
from holdfast.matrices.rounding import STORED, check_range, coarsest
from holdfast.parameters import ParameterSpace

if TYPE_CHECKING:
    from holdfast.diagnosis import Diagnosis

__all__ = ["Penalty", "TaskRecord", "checked_strength"]

_SMALL = 2**16  # entries below which one flat copy is cheaper than an operation per parameter


@dataclass(frozen=True)
class TaskRecord:
    """What is remembered of a consolidated task, beside its share of the matrix."""

    examples: int
    seed: int
    hash_ids: tuple[str, ...] = ()


class _Value(torch.autograd.Function):
    """½λ·q(δ), whose gradient λ(Ωδ + b) comes from the same reads."""

    @staticmethod
    def forward(ctx: Any, penalty: "Penalty", *tensors: Tensor) -> Tensor:
        with full_precision(penalty.anchor.device):
            value, state = penalty._evaluate(tensors)
        ctx.save_for_backward(state)
        # Parameters are only named here, for a second derivative; saved, hooks would copy them.
        ctx.penalty, ctx.tensors = penalty, tensors
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (state,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradient is differentiated again
            return None, *_Gradient.apply(ctx.penalty, grad, state, *ctx.tensors)  # type: ignore[no-untyped-call]
        return None, *ctx.penalty._scaled_product(state, grad, ctx.tensors)


class _Gradient(torch.autograd.Function):
    """g·λ(Ωδ + b), as a function of g and θ: linear in both."""

    @staticmethod
    def forward(
        ctx: Any, penalty: "Penalty", grad: Tensor, state: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(grad, state)
        ctx.penalty, ctx.tensors = penalty, tensors
        return tuple(penalty._scaled_product(state, grad, tensors))

    @staticmethod
    @once_differentiable  # type: ignore[misc, untyped-decorator]  # untyped in torch
    def backward(ctx: Any, *vectors: Tensor) -> tuple[Tensor | None, ...]:
        grad, state = ctx.saved_tensors
        penalty = ctx.penalty
        with full_precision(state.device):
            dtype = compute_dtype(penalty.anchor, *vectors)
            v = penalty.space.flatten([vector.to(dtype) for vector in vectors])
            slope = penalty.strength * (v @ penalty.matrix.product(state).to(dtype))
            curvature = penalty.space.split(penalty.strength * grad * (penalty.matrix @ v))
        pieces = (p.to(t.dtype) for p, t in zip(curvature, ctx.tensors, strict=True))
        return None, slope.to(grad.dtype), None, *pieces


@dataclass(frozen=True, eq=False)
class Penalty:
    r""":math:`\frac12\lambda\,(\theta-\theta^*)^\top\hat\Omega\,(\theta-\theta^*)`, immutable.

    Made by :meth:`Regularizer.consolidate`. With ``anchor="each"`` every task pulls to its own θ*;
    the extra terms are in :attr:`offset`.

    Attributes:
        space: The held parameters.
        matrix: Ω̂, with 1/n and the weights of the history, without λ and ½.
        anchor: θ* of the latest task, flat.
        strength: λ.
        offset: What several anchors add to the quadratic form; empty for one.
        recipe: The regularizer that made it, as JSON, without the strength.
        tasks: One record per consolidated task.
    """

    space: ParameterSpace
    matrix: PSDMatrix
    anchor: Tensor
    strength: float
    offset: Offset = ()
    recipe: Mapping[str, Any] = field(default_factory=dict)
    tasks: tuple[TaskRecord, ...] = ()
    _moved: dict[torch.device, "Penalty"] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "strength", checked_strength(self.strength))

    def __call__(self, model: nn.Module) -> Tensor:
        """The penalty at the model's parameters: a scalar to add to the loss, differentiable."""
        tensors = self.space.tensors(model)
        here = self._on(tensors[0].device)
        return _Value.apply(here, *tensors)  # type: ignore[no-untyped-call, no-any-return]

    def add_grad_(self, model: nn.Module) -> Tensor:
        """Add the penalty's gradient to ``.grad`` without a graph; returns the penalty, detached.

        Call it once per optimiser step: after ``backward`` (and after unscaling, with a gradient
        scaler), before clipping. A ``.grad`` that is None is created.
        """
        tensors = self.space.tensors(model)
        here = self._on(tensors[0].device)
        gradients = [t.grad if t.requires_grad and t.is_leaf else None for t in tensors]
        # frozen, not yet created, sparse, or a part of a parameter that has grown
        if any(g is None or g.layout is not torch.strided for g in gradients):
            gradients = _gradients(self.space.parameters(model), tensors)
        with full_precision(self.anchor.device):
            value, state = here._evaluate(tensors)
            here._add_product_(gradients, state)
        return value

    def _evaluate(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """½λ·q(δ) and the state of its gradient, in float32 (float64 for float64 models)."""
        flat = side_by_side(tensors, self.anchor.dtype)
        if flat is not None:
            deltas = [flat - self.anchor]
        elif self.space.dim < _SMALL:
            dtype = compute_dtype(self.anchor, *tensors)
            pieces = [t.detach().to(dtype) for t in tensors]
            deltas = [self.space.flatten(pieces) - self.anchor]
        else:
            anchors = self.space.split(self.anchor)
            pairs = zip(tensors, anchors, strict=True)
            deltas = [(t.detach() - anchor).reshape(-1) for t, anchor in pairs]
        value, state = self.matrix.evaluate(deltas, self.offset)
        return value * (0.5 * self.strength), state

    def _add_product_(self, gradients: Sequence[Tensor | None], state: Tensor) -> None:
        """Add λ(Ωδ + b) to the gradients, in place where they are plain memory."""
        present = [g for g in gradients if g is not None]
        if len(present) == len(gradients):
            flat = side_by_side(present, self.anchor.dtype)
            if flat is not None:
                self.matrix.add_product_([flat], state, self.strength)
                return
            if self.space.dim >= _SMALL and all(g.is_contiguous() for g in present):
                views = [g.view(-1) for g in present]
                self.matrix.add_product_(views, state, self.strength)
                return
        # scaled before it is rounded: alone, neither λ nor Ωδ need be a half-precision number
        pieces = self.space.split(self.strength * self.matrix.product(state))
        chosen = [p.to(g.dtype) for p, g in zip(pieces, gradients, strict=True) if g is not None]
        if present:
            torch._foreach_add_(present, chosen)

    def _scaled_product(
        self, state: Tensor, grad: Tensor, tensors: Sequence[Tensor]
    ) -> list[Tensor]:
        """g·λ(Ωδ + b), in the shapes and precisions of the parameters."""
        scaled = state * (grad.to(state.dtype) * self.strength)
        with full_precision(state.device):
            pieces = self.space.split(self.matrix.product(scaled))
        return [p.to(t.dtype) for p, t in zip(pieces, tensors, strict=True)]

    def _on(self, device: torch.device) -> "Penalty":
        """This penalty on the model's device; the copy is kept."""
        if self.anchor.device == device:
            return self
        if device not in self._moved:
            self._moved[device] = self.to(device=device)
        return self._moved[device]

    @property
    def nbytes(self) -> int:
        """Bytes held: matrix, anchor and offset."""
        return self.matrix.nbytes + self.anchor.nbytes + sum(o.nbytes for o in self.offset)

    def with_strength(self, strength: float) -> Self:
        """The same penalty with another λ."""
        return dataclasses.replace(self, strength=strength)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """The same penalty, stored elsewhere, or its matrix in another precision.

        ``torch.bfloat16`` halves and ``torch.int8`` (with a scale per row, for factored matrices)
        quarters the memory; anchor and offset keep their precision, arithmetic is in float32. Several
        anchors keep their common centre.
        """
        matrix, offset = self.matrix, self.offset
        if dtype is not None:
            if dtype not in STORED:
                known = ", ".join(map(str, STORED))
                raise ValueError(f"a matrix is stored as one of {known}, got {dtype!r}")
            with torch.no_grad(), full_precision(self.anchor.device):
                matrix = self.matrix.to(dtype=dtype)
                if dtype.is_floating_point:  # int8 has a scale per row
                    check_range(self.matrix.diagonal(), matrix.diagonal(), dtype)
                eps = coarsest(matrix.tensors.values())
                if eps and eps != coarsest(self.matrix.tensors.values()):
                    offset = self.matrix.recentred(offset, matrix, eps)
        return dataclasses.replace(
            self,
            matrix=matrix.to(device=device),
            anchor=self.anchor.to(device=device),
            offset=tuple(o.to(device=device) for o in offset),
        )

    def trim(self, energy: float) -> Self:
        """The same penalty with fewer rows, for a factored matrix (CountSketch, LowRank, Full).

        The factor is rotated to the eigenvectors of Ω̂, and those whose eigenvalues sum to at most
        ``energy`` of its trace are left out; ``frobenius_error(trimmed.matrix, matrix)`` says what
        that changed. Factors that were stacked or have few directions become shorter, and steps
        faster; a sketch of a matrix with many directions does not.

        Args:
            energy: A share of the trace, from 0 (only what is zero) to below 1.
        """
        if not 0 <= energy < 1:
            raise ValueError(f"energy must lie in [0, 1), got {energy!r}")
        if not isinstance(self.matrix, FactoredMatrix):
            raise TypeError(
                f"{self.matrix!r} has no rows to leave out; only factored matrices (CountSketch, "
                "LowRank, Full in its factored form) can be trimmed"
            )
        with full_precision(self.anchor.device):
            matrix, offset = self.matrix.trimmed(energy, self.offset)
        stored = self.matrix.rows.dtype
        return dataclasses.replace(self, matrix=matrix.to(dtype=stored), offset=offset)

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, atomically."""
        from holdfast import storage

        storage.save(self, path)

    @classmethod
    def load(cls, path: str | Path, *, mapped: bool = False) -> "Penalty":
        """Read a file that :meth:`save` wrote; ``mapped`` leaves its numbers there, see :meth:`offload`."""
        from holdfast import storage

        return storage.load(path, mapped=mapped)

    def offload(self, path: str | Path) -> "Penalty":
        """The same penalty with its numbers in a file instead of in memory.

        It is written to ``path``, mapped, and read by the system as steps need it: as fast as before while
        there is room for it, and where there is none, as fast as the disk. The file must stay as it is
        while the penalty is in use. For models on the CPU; on another device the numbers are copied there.
        """
        self.save(path)
        return self.load(path, mapped=True)

    def diagnose(self, model: nn.Module, data: Any, **options: Any) -> "Diagnosis":
        """How good the approximation is and how strong the penalty; see :func:`diagnose`."""
        from holdfast import diagnosis

        return diagnosis.diagnose(self, model, data, **options)

    def __repr__(self) -> str:
        return (
            f"Penalty({self.matrix!r}, tasks={len(self.tasks)}, strength={self.strength:g}, "
            f"anchors={'several' if self.offset else 'one'})"
        )


def _gradients(
    parameters: Sequence[nn.Parameter], tensors: Sequence[Tensor]
) -> list[Tensor | None]:
    """Where gradients go: made where there is none, cut to the held rows, None for frozen ones."""
    found: list[Tensor | None] = []
    for parameter, tensor in zip(parameters, tensors, strict=True):
        if not parameter.requires_grad:
            found.append(None)
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.layout is not torch.strided:  # the sum with a dense gradient is dense
            parameter.grad = parameter.grad.to_dense()
        grown = tensor is not parameter
        found.append(parameter.grad[: tensor.shape[0]] if grown else parameter.grad)
    return found


def side_by_side(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """The tensors as one flat view, where they follow each other in one storage; None elsewhere.

    So they do after :class:`FlatAdam`, and in other optimisers that flatten a model.
    """
    if torch.compiler.is_compiling():
        return None
    first = tensors[0].detach()
    here, size = first.data_ptr(), 0
    for tensor in tensors:
        at = here + size * tensor.element_size()
        if tensor.data_ptr() != at or tensor.dtype != dtype or not tensor.is_contiguous():
            return None
        size += tensor.numel()
    room = first.untyped_storage().nbytes() // first.element_size() - first.storage_offset()
    return first.as_strided((size,), (1,)) if size <= room else None


def checked_strength(strength: Any) -> float:
    """A strength as a plain number; NumPy's are as good."""
    found = plain(strength)
    ok = isinstance(found, int | float) and not isinstance(found, bool)
    if not ok or not 0 <= float(found) < float("inf"):
        raise ValueError(f"strength must be a finite number ≥ 0, got {strength!r}")
    return cast(float, found)
