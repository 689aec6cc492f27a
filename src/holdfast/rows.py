r"""W, the tall matrix of rows, read in one pass and never stored: the narrow waist.

Importances fill it, approximations read it; neither knows the other. :class:`Rows` yields
:class:`RowBatch` values in order of arrival. A batch of rows is lazy: it can be written out
(:meth:`RowBatch.blocks`), summed with signs for the price of one backward pass
(:meth:`RowBatch.add_signed_sum_`), or cut and regrouped before anything is computed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from holdfast import batches, memory
from holdfast.batches import Examples
from holdfast.gradients import Gradients
from holdfast.hashing import Draw
from holdfast.importance import SCP, Importance, Loss
from holdfast.parameters import ParameterSpace
from holdfast.structure import LayerReader, LayerShape

__all__ = ["GivenRows", "RowBatch", "Rows"]


class RowBatch(ABC):
    """Some consecutive or regrouped rows of W."""

    index: Tensor
    """The row indices: positions of arrival, an int64 vector on the CPU."""

    def __len__(self) -> int:
        return len(self.index)

    @abstractmethod
    def blocks(self) -> Iterator[Tensor]:
        """The rows themselves, in order, as matrices (b, m) small enough for memory."""

    def write_(self, out: Tensor) -> None:
        """Write all rows to a matrix (b, m)."""
        first = 0
        for block in self.blocks():
            out[first : first + len(block)] = block
            first += len(block)

    def written(self, room: Tensor) -> Iterator[Tensor]:
        """The rows, in order, as parts of the matrix ``room``, which is filled again and again."""
        held = 0
        for block in self.blocks():
            while len(block):
                some, block = block[: len(room) - held], block[len(room) - held :]
                room[held : held + len(some)] = some
                held += len(some)
                if held == len(room):
                    yield room
                    held = 0
        if held:
            yield room[:held]

    def blocks_of(
        self, chosen: Sequence[int], ranges: Sequence[tuple[int, int]]
    ) -> Iterator[Tensor]:
        """The rows of some parameters only.

        Args:
            chosen: Positions of the parameters.
            ranges: Where their entries are in a whole row, half-open, in the same order.
        """
        for block in self.blocks():
            yield torch.cat([block[:, start:end] for start, end in ranges], 1)

    @abstractmethod
    def add_signed_sum_(self, out: Tensor, signs: Tensor) -> None:
        r"""Add :math:`\sum_i \sigma_i w_i` to the vector ``out``, in one backward pass."""

    def add_squared_sum_(self, out: Tensor) -> None:
        r"""Add :math:`\sum_i w_i \circ w_i` to the vector ``out``."""
        for block in self.blocks():
            out += block.square().sum(0)

    def read_layers(
        self, layers: Sequence[LayerShape], reader: LayerReader, squares: Tensor
    ) -> None:
        """Tell ``reader`` what the rows say about ``layers``, and add the squares of all the rest.

        Args:
            layers: The parameters that act as matrices.
            reader: Takes pairs of inputs and gradients where a layer can be read, rows elsewhere.
            squares: A flat vector for everything else; its entries of ``layers`` mean nothing.
        """
        for block in self.blocks():
            for k, layer in enumerate(layers):
                reader.rows(k, layer.cut(block))
            squares += block.square().sum(0)

    @property
    def columns(self) -> list[Tensor] | None:
        """What the rows are made from, each with one entry per row; None if it cannot be cut."""
        return None

    @property
    def signature(self) -> tuple[Any, ...]:
        """Batches with the same signature have columns that can be joined."""
        return ()

    def like(self, columns: Sequence[Tensor], index: Tensor) -> "RowBatch":
        """The same kind of batch from other columns."""
        raise TypeError(f"{type(self).__name__} cannot be regrouped")


class GivenRows(RowBatch):
    """Rows that are already there."""

    def __init__(self, rows: Tensor, index: Tensor) -> None:
        self.rows, self.index = rows, index

    def blocks(self) -> Iterator[Tensor]:
        yield self.rows

    def add_signed_sum_(self, out: Tensor, signs: Tensor) -> None:
        out += signs.to(self.rows) @ self.rows

    @property
    def columns(self) -> list[Tensor]:
        return [self.rows]

    def like(self, columns: Sequence[Tensor], index: Tensor) -> "GivenRows":
        return GivenRows(columns[0], index)


class ExampleRows(RowBatch):
    """Rows of a batch that can be cut along its first dimension; nothing is computed before use.

    Columns: the tensors of the batch, then which of its rows each example contributes, then its
    uniform number.
    """

    def __init__(
        self, gradients: Gradients, template: Any, columns: Sequence[Tensor], index: Tensor
    ) -> None:
        self._gradients, self._template, self._columns = gradients, template, list(columns)
        self.index = index

    @property
    def _examples(self) -> Examples:
        """With the position of the example that each row belongs to."""
        examples = self.index // self._gradients.rows_per_example
        return Examples(self._template, self._columns, examples)

    def blocks(self) -> Iterator[Tensor]:
        return self._gradients.rows(self._examples)

    def write_(self, out: Tensor) -> None:
        self._gradients.writing.write_(out, self._examples)

    def written(self, room: Tensor) -> Iterator[Tensor]:
        for first in range(0, len(self), len(room)):
            some = self._examples.pick(slice(first, first + len(room)))
            out = room[: len(some)]
            self._gradients.writing.write_(out, some)
            yield out

    def blocks_of(
        self, chosen: Sequence[int], ranges: Sequence[tuple[int, int]]
    ) -> Iterator[Tensor]:
        return self._gradients.rows(self._examples, chosen)

    def add_signed_sum_(self, out: Tensor, signs: Tensor) -> None:
        self._gradients.sums.add_(out, lambda: self._signed(signs))

    def _signed(self, signs: Tensor) -> Tensor:
        values = self._gradients.values(self._examples)
        return values @ signs.to(values)

    def add_squared_sum_(self, out: Tensor) -> None:
        self._gradients.squares.add_(out, self._examples)

    def read_layers(
        self, layers: Sequence[LayerShape], reader: LayerReader, squares: Tensor
    ) -> None:
        self._gradients.squares.add_(squares, self._examples, layers, reader)

    @property
    def columns(self) -> list[Tensor]:
        return self._columns

    @property
    def signature(self) -> tuple[Any, ...]:
        return batches.signature(self._template)

    def like(self, columns: Sequence[Tensor], index: Tensor) -> "ExampleRows":
        return ExampleRows(self._gradients, self._template, columns, index)


class WholeRows(RowBatch):
    """Rows of a batch that cannot be cut: one graph, one backward pass for every request."""

    def __init__(self, gradients: Gradients, values: Tensor, index: Tensor) -> None:
        self._gradients, self._values, self.index = gradients, values.reshape(-1), index

    def blocks(self) -> Iterator[Tensor]:
        out = torch.zeros(1, self._gradients.space.dim, **self._gradients.like)
        for value in self._values:
            self._gradients.add_gradient_(out[0], value, retain_graph=True)
            yield out
            out = torch.zeros_like(out)

    def add_signed_sum_(self, out: Tensor, signs: Tensor) -> None:
        scalar = self._values @ signs.to(self._values)
        self._gradients.add_gradient_(out, scalar, retain_graph=True)


class Rows:
    """The rows of one task, to be iterated once.

    Args:
        model: The network at θ*, unwrapped and in evaluation mode.
        data: Any iterable of batches.
        space: The held parameters.
        importance: What a row is.
        draw: The source of randomness of this task.
        forward: ``forward(model, batch) -> outputs``.
        loss: ``loss(outputs, batch) -> (B,)``, or None.
        limit: The number of examples to read, or None for all.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Iterable[Any],
        space: ParameterSpace,
        importance: Importance,
        draw: Draw,
        *,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        loss: Loss | None = None,
        limit: int | None = None,
    ) -> None:
        self.gradients = Gradients(model, space, importance, forward or batches.forward, loss)
        self.examples = 0
        self._data, self._draw, self._limit = data, draw, limit

    @property
    def divisor(self) -> int:
        """What the sum over rows is divided by: n, or one where a row is not an example."""
        return 1 if isinstance(self.gradients.importance, SCP) else self.examples

    def __iter__(self) -> Iterator[RowBatch]:
        importance = self.gradients.importance
        if isinstance(importance, SCP):
            yield self._slices(importance)
        else:
            yield from self._example_rows()
        if not self.examples:
            raise ValueError(
                "the data is empty: expected at least one batch with one example, got none; an "
                "iterator that was read before is empty too: pass a list or a DataLoader"
            )

    def _batches(self) -> Iterator[tuple[Any, int | None]]:
        """The batches on the model's device, cut to the limit, with their sizes."""
        left = self._limit
        for raw in self._data:
            batch = batches.move(raw, self.gradients.device)
            size = batches.size(batch)
            if size == 0:
                continue
            if left is not None and size is not None and size > left:
                batch, size = batches.cut(batch, slice(0, left)), left
            if not self.examples:
                self.gradients.check(batch)
            yield batch, size
            if self._limit is not None:
                left = self._limit - self.examples
                if left <= 0:  # before another batch is asked for: the source may be endless
                    return

    def _example_rows(self) -> Iterator[RowBatch]:
        per_example = 0
        generator = self._draw.generator("labels")
        for batch, size in self._batches():
            values = None
            if size is None:  # only the potentials can tell how many examples there are
                sampled = self.gradients.importance.uniforms
                uniforms = self._uniforms(generator, self.gradients.count(batch) if sampled else 0)
                values = self.gradients.potentials(batch, uniforms, self.examples)
                size = len(values)
                size = min(size, self._limit - self.examples) if self._limit else size
            else:
                uniforms = self._uniforms(generator, size)
            per_example = per_example or self.gradients.rows_per_example
            first = self.examples * per_example
            index = torch.arange(first, first + size * per_example)
            self.examples += size
            if values is not None:
                yield WholeRows(self.gradients, values[:size], index)
                continue
            leaves = batches.tensors(batch)
            which = torch.arange(per_example).repeat(size)
            if per_example > 1:
                leaves = [leaf.repeat_interleave(per_example, 0) for leaf in leaves]
                uniforms = uniforms.repeat_interleave(per_example)
            device = self.gradients.device
            columns = [*leaves, which.to(device), uniforms.to(device)]
            yield ExampleRows(self.gradients, batch, columns, index)

    def _uniforms(self, generator: Any, size: int) -> Tensor:
        if not self.gradients.importance.uniforms:
            return torch.zeros(size)
        return torch.from_numpy(generator.random(size))

    def _slices(self, importance: SCP) -> GivenRows:
        """The min(L, K) rows of sliced Cramér preservation, from one pass of mean outputs."""
        total, directions = torch.empty(0), torch.empty(0)
        for batch, _ in self._batches():
            # (B, K): the logits
            values = self.gradients.potentials(batch, torch.zeros(0), self.examples)
            if not self.examples:
                generator = self._draw.generator("slices")
                directions = importance.directions(values.shape[1], generator).to(values)
                shape = (len(directions), self.gradients.space.dim)
                like = self.gradients.like
                needed = shape[0] * shape[1] * torch.empty(0, **like).element_size()
                advice = "use fewer slices, or hold fewer parameters with include="
                memory.require(repr(importance), needed, self.gradients.device, advice)
                total = torch.zeros(shape, **like)
            take = len(values)
            if self._limit:
                take = min(take, self._limit - self.examples)
            self.examples += take
            projected = values[:take].sum(0) @ directions.T
            for row, scalar in zip(total, projected, strict=True):
                self.gradients.add_gradient_(row, scalar, retain_graph=True)
        return GivenRows(total / max(self.examples, 1), torch.arange(len(total)))
