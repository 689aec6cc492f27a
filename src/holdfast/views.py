"""Rows seen through a window: some of their columns, or with their squares or lengths added up on the way."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from holdfast.rows import RowBatch
from holdfast.structure import LayerReader, LayerShape

__all__ = ["PartialRows", "SquaredRows", "TracedRows"]


class _View(RowBatch):
    """Rows made from what other rows are made from: regrouped as those are, and seen alike again."""

    def __init__(self, rows: RowBatch) -> None:
        self._rows, self.index = rows, rows.index

    @abstractmethod
    def _seen(self, rows: RowBatch) -> RowBatch:
        """Other rows through the same window."""

    @property
    def columns(self) -> list[Tensor] | None:
        return self._rows.columns

    @property
    def signature(self) -> tuple[Any, ...]:
        return self._rows.signature

    def like(self, columns: Sequence[Tensor], index: Tensor) -> RowBatch:
        return self._seen(self._rows.like(columns, index))


class PartialRows(_View):
    """Some columns of other rows.

    Args:
        rows: The whole rows.
        chosen: The positions of the parameters whose columns these are.
        ranges: The columns, as half-open ranges.
        room: A vector of the length of a whole row, to be overwritten.
    """

    def __init__(
        self,
        rows: RowBatch,
        chosen: Sequence[int],
        ranges: Sequence[tuple[int, int]],
        room: Tensor,
    ) -> None:
        super().__init__(rows)
        self._chosen, self._ranges, self._room = chosen, ranges, room

    def _cut(self, whole: Tensor) -> Tensor:
        return torch.cat([whole[start:end] for start, end in self._ranges])

    def blocks(self) -> Iterator[Tensor]:
        return self._rows.blocks_of(self._chosen, self._ranges)

    def add_signed_sum_(self, out: Tensor, signs: Tensor) -> None:
        self._rows.add_signed_sum_(self._room.zero_(), signs)
        out += self._cut(self._room)

    def add_squared_sum_(self, out: Tensor) -> None:
        self._rows.add_squared_sum_(self._room.zero_())
        out += self._cut(self._room)

    def read_layers(
        self, layers: Sequence[LayerShape], reader: LayerReader, squares: Tensor
    ) -> None:
        whole = [
            replace(
                s,
                weight=self._place(s.weight),
                bias=None if s.bias is None else self._place(s.bias),
            )
            for s in layers
        ]
        self._rows.read_layers(whole, reader, self._room.zero_())
        squares += self._cut(self._room)

    def _place(self, column: int) -> int:
        """Where one of these columns is in a whole row."""
        for start, end in self._ranges:
            if column < end - start:
                return start + column
            column -= end - start
        raise IndexError("no such column")

    def _seen(self, rows: RowBatch) -> RowBatch:
        return PartialRows(rows, self._chosen, self._ranges, self._room)


class TracedRows(_View):
    """Rows whose squared length in every layer is added up when the layers are read.

    Args:
        rows: The rows.
        traces: One number per layer, to be added to.
    """

    def __init__(self, rows: RowBatch, traces: Tensor) -> None:
        super().__init__(rows)
        self._traces = traces

    def blocks(self) -> Iterator[Tensor]:
        return self._rows.blocks()

    def add_signed_sum_(self, out: Tensor, signs: Tensor) -> None:
        self._rows.add_signed_sum_(out, signs)

    def read_layers(
        self, layers: Sequence[LayerShape], reader: LayerReader, squares: Tensor
    ) -> None:
        self._rows.read_layers(layers, _Measured(reader, self._traces), squares)

    def _seen(self, rows: RowBatch) -> RowBatch:
        return TracedRows(rows, self._traces)


class _Measured:
    """A reader of layers that measures what it hands on."""

    def __init__(self, reader: LayerReader, traces: Tensor) -> None:
        self._reader, self._traces = reader, traces

    def pairs(self, layer: int, inputs: Tensor, gradients: Tensor) -> None:
        self._traces[layer] += _squared_lengths(inputs, gradients)
        self._reader.pairs(layer, inputs, gradients)

    def rows(self, layer: int, rows: Tensor) -> None:
        self._traces[layer] += rows.square().sum()
        self._reader.rows(layer, rows)


def _squared_lengths(inputs: Tensor, gradients: Tensor) -> Tensor:
    r""":math:`\sum\lVert\sum_t g_t a_t^\top\rVert^2`, from the smaller of two ways to multiply."""
    positions = inputs.shape[2]
    if positions == 1:
        return (inputs.square().sum(3) * gradients.square().sum(3)).sum()
    if positions**2 <= inputs.shape[3] * gradients.shape[3]:
        return ((inputs @ inputs.mT) * (gradients @ gradients.mT)).sum()
    return (gradients.mT @ inputs).square().sum()


class SquaredRows(_View):
    """Rows whose squares are added to a vector when they are read: each row is read once."""

    def __init__(self, rows: RowBatch, squares: Tensor) -> None:
        super().__init__(rows)
        self._squares = squares

    def blocks(self) -> Iterator[Tensor]:
        for block in self._rows.blocks():
            self._squares += block.square().sum(0)
            yield block

    def add_signed_sum_(self, out: Tensor, signs: Tensor) -> None:
        self._rows.add_signed_sum_(out, signs)
        self._rows.add_squared_sum_(self._squares)

    def _seen(self, rows: RowBatch) -> RowBatch:
        return SquaredRows(rows, self._squares)
