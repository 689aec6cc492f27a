"""Rows seen through a window: some of their columns, or with their squares added up on the way."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from holdfast.rows import RowBatch
from holdfast.structure import LayerReader, LayerShape

__all__ = ["PartialRows", "SquaredRows"]


class PartialRows(RowBatch):
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
        self._rows, self.index = rows, rows.index
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

    @property
    def columns(self) -> list[Tensor] | None:
        return self._rows.columns

    @property
    def signature(self) -> tuple[Any, ...]:
        return self._rows.signature

    def like(self, columns: Sequence[Tensor], index: Tensor) -> "PartialRows":
        rows = self._rows.like(columns, index)
        return PartialRows(rows, self._chosen, self._ranges, self._room)


class SquaredRows(RowBatch):
    """Rows whose squares are added to a vector when they are read: each row is read once."""

    def __init__(self, rows: RowBatch, squares: Tensor) -> None:
        self._rows, self._squares, self.index = rows, squares, rows.index

    def blocks(self) -> Iterator[Tensor]:
        for block in self._rows.blocks():
            self._squares += block.square().sum(0)
            yield block

    def add_signed_sum_(self, out: Tensor, signs: Tensor) -> None:
        self._rows.add_signed_sum_(out, signs)
        self._rows.add_squared_sum_(self._squares)

    @property
    def columns(self) -> list[Tensor] | None:
        return self._rows.columns

    @property
    def signature(self) -> tuple[Any, ...]:
        return self._rows.signature

    def like(self, columns: Sequence[Tensor], index: Tensor) -> "SquaredRows":
        return SquaredRows(self._rows.like(columns, index), self._squares)
