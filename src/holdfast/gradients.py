r"""Gradients of per-example scalars with respect to the held parameters, by every road there is.

A signed sum is one ordinary backward pass. Single rows are vectorised over examples where the model
allows it, and otherwise come from one backward pass each: slow, exact, and said so once.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from holdfast import batches
from holdfast.batches import Examples
from holdfast.coupling import check_alone, check_counted
from holdfast.finite import check_parameters, check_rows, check_values
from holdfast.importance import Importance, Loss
from holdfast.parameters import ParameterSpace
from holdfast.signed_sums import SignedSums
from holdfast.squares import Squares
from holdfast.writing import Writing

__all__ = ["Gradients", "VectorisationWarning"]

# 64 MiB: what a block of written-out rows may take; the C library keeps such pieces
ROW_BYTES = 2**26
_UNVECTORISED = (RuntimeError, ValueError, TypeError, AssertionError)  # the last: dynamo's
Forward = Callable[[nn.Module, Any], Any]


class VectorisationWarning(UserWarning):
    """Per-example gradients could not be vectorised; they are computed one by one."""


class Like(TypedDict):
    """Where and in which precision rows are accumulated."""

    device: torch.device
    dtype: torch.dtype


class _Call(nn.Module):
    """The forward function as a module, so that its parameters can be replaced."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model, self.function = model, forward

    def forward(self, batch: Any) -> Any:
        return self.function(self.model, batch)


class Gradients:
    """The network at θ*, ready to be differentiated example by example."""

    def __init__(
        self,
        model: nn.Module,
        space: ParameterSpace,
        importance: Importance,
        forward: Forward,
        loss: Loss | None,
    ) -> None:
        if type(loss).__module__ == nn.CrossEntropyLoss.__module__:
            raise TypeError(
                f"loss is called as loss(outputs, batch), and {type(loss).__name__} takes (outputs, "
                "labels); pass loss=lambda outputs, batch: … that returns one value per example "
                "(reduction='none'), or leave it out for cross-entropy"
            )
        self.space, self.importance = space, importance
        self.rows_per_example = 1
        self._loss, self._call = loss, _Call(model, forward)
        self._parameters = space.parameters(model)
        self._all = list(model.parameters())
        slots = _slots(self._call)
        self._places = [slots[id(p)] for p in self._parameters]
        self.device = self._parameters[0].device
        double = any(p.dtype == torch.float64 for p in self._parameters)
        self.like: Like = {
            "device": self.device,
            "dtype": torch.float64 if double else torch.float32,
        }
        self._buffers = {n: b for b in self._call.buffers() for n in slots[id(b)]}
        self._vectorised, self._proven = True, False
        self.squares = Squares(self, model, self._parameters)
        self.sums = SignedSums(self, model, self._parameters)
        self.writing = Writing(self, model)
        check_parameters(space.names, self._parameters)
        check_counted(model)

    def check(self, batch: Any) -> None:
        """Look at the first batch once: refuse what cannot work, learn the rows per example."""
        if self._call.function is batches.forward:
            batches.refuse_single(batch)
        outputs = self._outputs(batch)
        self.importance.check(outputs, batch, self._loss)
        self.rows_per_example = self.importance.rows_per_example(outputs)
        # on the batch as it came, so that messages show its shapes and not those of a part
        none = torch.zeros(1, device=self.device)
        values = check_values(self._values(outputs, batch, none)).detach()
        if values.shape[1] != self.rows_per_example:
            raise ValueError(
                f"{self.importance!r} returned {values.shape[1]} values per example, and its "
                f"rows_per_example says {self.rows_per_example}; let both say the same"
            )
        if batches.size(batch) is not None:  # otherwise the first backward pass says it
            first = batches.cut(batch, slice(0, 1))
            alone = check_alone(lambda: self.potentials(first, none), values, self._rounding(0.01))
            self._dependent(alone)

    def count(self, batch: Any) -> int:
        """The number of examples in a batch that cannot be cut: the length of its outputs."""
        outputs = self._outputs(batch)
        if not isinstance(outputs, Tensor) or outputs.dim() == 0:
            raise ValueError(
                "the number of examples is unknown: the batch cannot be cut along its first "
                f"dimension and the model returned {type(outputs).__name__}; pass forward= that "
                "returns one tensor with an entry per example"
            )
        return len(outputs)

    def potentials(self, batch: Any, uniforms: Tensor, examples: Tensor | int = 0) -> Tensor:
        """φ of every example, shape (B, R), checked.

        Args:
            batch: What goes through the model.
            uniforms: One uniform number per example.
            examples: Their positions of arrival, or that of the first; for messages.
        """
        return check_values(self._values(self._outputs(batch), batch, uniforms), examples)

    def _outputs(self, batch: Any) -> Any:
        """What the model says; it gets a copy, as it may write to its input or differentiate by it."""
        return self._call(batches.copy(batch))

    def _dependent(self, values: Tensor) -> None:
        if not values.requires_grad:
            raise ValueError(
                "the loss (or potential) does not depend on any held parameter; was it detached, "
                "or are all parameters on its path frozen or excluded?"
            )

    def _values(self, outputs: Any, batch: Any, uniforms: Tensor) -> Tensor:
        if isinstance(outputs, Tensor) and outputs.is_floating_point():
            outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        values = self.importance.potentials(outputs, batch, loss=self._loss, uniforms=uniforms)
        size = batches.size(batch)
        if not isinstance(values, Tensor):
            raise ValueError(f"expected one value per example, got {type(values).__name__}")
        if values.dim() == 0 or (size is not None and values.shape[0] != size):
            raise ValueError(
                f"expected one value per example, shape ({size or 'B'},), got "
                f"{tuple(values.shape)}; a "
                "batch mean is not enough: use reduction='none'"
            )
        allowed = values.dim() == 1 or (values.dim() == 2 and self.importance.several)
        if not allowed:
            raise ValueError(
                f"expected one value per example, shape ({values.shape[0]},), got "
                f"{tuple(values.shape)}; sum over what belongs to one example"
            )
        return values.reshape(values.shape[0], -1)

    def backward(self, scalar: Tensor, retain_graph: bool = False) -> None:
        """Every parameter's gradient of ``scalar``, left in ``.grad``.

        ``backward`` and not ``autograd.grad``: reentrant checkpointing refuses the latter.
        """
        self._dependent(scalar)
        torch.autograd.backward(scalar, retain_graph=retain_graph)

    def add_gradient_(self, out: Tensor, scalar: Tensor, retain_graph: bool = False) -> None:
        """Add the gradient of ``scalar`` to the flat vector ``out``."""
        self.backward(scalar, retain_graph)
        for view, parameter in zip(self.space.split(out), self._parameters, strict=True):
            if parameter.grad is not None:
                view += parameter.grad
        self.forget()

    def forget(self) -> None:
        """Drop the gradients of a backward pass."""
        for parameter in self._all:
            parameter.grad = None

    def values(self, examples: Examples) -> Tensor:
        """φ of every example, the one that is meant, shape (B,), checked."""
        values = self.potentials(examples.batch, examples.uniforms, examples.index)
        return values.gather(1, examples.which.unsqueeze(1)).squeeze(1)

    def rows(
        self,
        examples: Examples,
        chosen: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Iterator[Tensor]:
        """The rows of a cuttable batch as matrices (b, m).

        Args:
            examples: The batch.
            chosen: The columns of these parameters only.
            out: All rows are written there, and the matrices are parts of it.
        """
        chosen = range(len(self._parameters)) if chosen is None else chosen
        width = self.like["dtype"].itemsize * sum(self.space.sizes[i] for i in chosen)
        size = max(1, ROW_BYTES // (3 * width))  # gradients per parameter, their join, one spare
        for first in range(0, len(examples), size):
            chunk = examples.pick(slice(first, first + size))
            room = None if out is None else out[first : first + len(chunk)]
            block = self._vector_rows(chunk, chosen, room) if self._vectorised else None
            if block is None:
                block = self.single_rows(chunk, chosen)
                block = block if room is None else room.copy_(block)
            check_rows(block, chunk.index)
            yield block

    def _vector_rows(
        self, examples: Examples, chosen: Sequence[int], room: Tensor | None
    ) -> Tensor | None:
        potential = self._potential(examples)
        held = {i: self._parameters[i].detach() for i in chosen}
        try:
            # the fused attention kernels have no batching rule; parameters that are not asked for
            # must not bring a graph of their own
            with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
                found, values = vmap(grad_and_value(potential), in_dims=(None, 0, 0, 0))(
                    held, list(examples.leaves), examples.which, examples.uniforms
                )
        except _UNVECTORISED as error:
            # Whatever is wrong with the caller's functions shows again, unvectorised, one by one.
            self.single_rows(examples.pick(slice(0, 1)))
            reason = str(error).strip().splitlines()
            self._give_up(reason[0] if reason else type(error).__name__)
            return None
        check_values(values.unsqueeze(1), examples.index)
        rows = [found[i].reshape(len(examples), -1).to(self.like["dtype"]) for i in held]
        block = torch.cat(rows, 1, out=room)
        if not self._proven and not self._proves(block, examples, chosen):
            self._give_up("the model reaches its parameters by a road that is not seen")
            return None
        return block

    def _potential(self, examples: Examples) -> Callable[..., Tensor]:
        """φ of one example without its batch: of (parameters by position, leaves, which value, uniform)."""

        def potential(
            held: dict[int, Tensor], leaves: Sequence[Tensor], which: Tensor, uniform: Tensor
        ) -> Tensor:
            batch = batches.rebuild(examples.template, [leaf.unsqueeze(0) for leaf in leaves])
            placed = {name: held[i] for i in held for name in self._places[i]}
            # With the buffers: what a module assigns to them is gone when the call returns. Not
            # tied again by torch: it would put a stranger back into a module that is used twice.
            outputs = functional_call(
                self._call, (placed, self._buffers), (batch,), tie_weights=False
            )
            values = self._values(outputs, batch, uniform.unsqueeze(0))
            return values[0].gather(0, which.reshape(1)).squeeze(0)

        return potential

    def apart(self, examples: Examples) -> bool:
        """Whether examples are computed side by side, without a look at what is in them."""
        leaves = [leaf.clone() for leaf in examples.leaves]  # a network may write to its input
        try:
            # with a graph, as everywhere: without one, modules take other roads
            with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of operations that are vectorised slowly
                vmap(self._potential(examples), in_dims=(None, 0, 0, 0))(
                    {}, leaves, examples.which, examples.uniforms
                )
        except _UNVECTORISED:
            return False
        return True

    def _give_up(self, reason: str) -> None:
        """From now on one backward pass per row."""
        self._vectorised = False
        warnings.warn(
            "per-example gradients cannot be vectorised for this model, so there is one backward "
            f"pass per example ({reason})",
            VectorisationWarning,
            stacklevel=2,
        )

    def _proves(self, block: Tensor, examples: Examples, chosen: Sequence[int]) -> bool:
        """Whether the first vectorised rows sum to what one ordinary backward pass gives.

        They do not where a module holds its parameters in a place of its own, in which they cannot be
        replaced: the rows would be zero there, silently. What is small beside the whole gradient is rounding,
        which neither proves nor disproves anything.
        """
        total = torch.zeros(self.space.dim, **self.like)
        self.add_gradient_(total, self.values(examples).sum())
        pieces = torch.split(total, list(self.space.sizes))
        difference = block.sum(0) - torch.cat([pieces[i] for i in chosen])
        size = block.abs().sum(0).amax()
        noise = 64 * torch.finfo(total.dtype).eps * total.abs().amax()
        allowed = self._rounding(1e-3) * size + noise  # far above rounding
        agree = not bool(difference.abs().amax() > allowed)  # NaN is named elsewhere, by example
        self._proven = agree and bool(size > noise)
        return agree

    def _rounding(self, single: float) -> float:
        """The relative difference that is still rounding: ``single``, or a tenth in half precision."""
        return 0.1 if any(p.dtype.itemsize < 4 for p in self._parameters) else single

    def single_rows(self, examples: Examples, chosen: Sequence[int] | None = None) -> Tensor:
        """The rows from one backward pass each."""
        rows = []
        for i in range(len(examples)):
            row = torch.zeros(self.space.dim, **self.like)
            self.add_gradient_(row, self.values(examples.pick(slice(i, i + 1)))[0])
            pieces = row.split(self.space.sizes)
            rows.append(row if chosen is None else torch.cat([pieces[i] for i in chosen]))
        return torch.stack(rows)

    def single_squares(self, examples: Examples) -> Tensor:
        """The sum of the squares of the rows, from one backward pass each."""
        total = torch.zeros(self.space.dim, **self.like)
        pieces = self.space.split(total)
        for i in range(len(examples)):
            value = self.values(examples.pick(slice(i, i + 1)))[0]
            self.backward(value)
            for piece, parameter in zip(pieces, self._parameters, strict=True):
                if parameter.grad is not None:
                    gradient = parameter.grad.to_dense().to(total.dtype)  # of an embedding: sparse
                    piece.addcmul_(gradient, gradient)
            self.forget()
        return total


def _slots(module: nn.Module) -> dict[int, list[str]]:
    """Where every tensor is registered, by its id: tied ones several times, each module once."""
    found: dict[int, list[str]] = {}
    for path, part in module.named_modules():
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                found.setdefault(id(tensor), []).append(f"{path}.{name}" if path else name)
    return found
