r"""Full batches of one bucket: rows are held back until as many as a batch belong together.

A signed sum over one bucket is one backward pass. Without regrouping a batch would need one pass per
bucket in it; with it, consolidation costs one epoch of ordinary passes, whatever the number of buckets.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast import memory
from holdfast.rows import RowBatch

__all__ = ["Regrouping"]

HELD_BYTES = 2**28  # 256 MiB: what held-back examples may take

Emit = Callable[[int, RowBatch, Tensor], None]  # (bucket, rows of that bucket, their signs)


@dataclass
class _Store:
    """Room for ``capacity`` rows of each bucket, all of one signature."""

    batch: RowBatch  # how to make rows from columns
    columns: list[Tensor]
    index: Tensor
    signs: Tensor
    fill: Tensor
    capacity: int

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self.columns)


class Regrouping:
    """Sorts rows into buckets and emits each bucket's rows in full batches.

    Args:
        buckets: The number of buckets.
        emit: Called with a bucket, rows that all belong to it, and their signs.
        capacity: Rows to collect per bucket; None takes the size of the first batch.
    """

    def __init__(self, buckets: int, emit: Emit, capacity: int | None = None) -> None:
        self._buckets, self._emit, self._capacity = buckets, emit, capacity
        self._stores: dict[object, _Store] = {}

    def add(self, batch: RowBatch, buckets: Tensor, signs: Tensor) -> None:
        """Take the rows of ``batch``; emit what has become full."""
        columns = batch.columns
        if columns is None:  # cannot be cut: one signed pass per bucket that occurs in it
            for bucket in buckets.unique().tolist():
                self._emit(bucket, batch, signs * (buckets == bucket))
            return
        self._capacity = self._capacity or len(batch)
        store = self._store(batch, columns)
        order = buckets.argsort(stable=True)
        counts = buckets.bincount(minlength=self._buckets)
        before = counts.cumsum(0) - counts
        rank = torch.empty_like(buckets)
        rank[order] = torch.arange(len(buckets)) - before[buckets[order]]
        place = store.fill[buckets] + rank  # position in the bucket's queue
        while len(place):
            now = place < store.capacity
            kept, target = now.nonzero().squeeze(1), (buckets * store.capacity + place)[now]
            for held, column in zip(store.columns, columns, strict=True):
                held.index_copy_(0, target.to(held.device), column[kept.to(column.device)])
            store.index[target], store.signs[target] = batch.index[kept], signs[kept]
            store.fill += buckets[kept].bincount(minlength=self._buckets)
            for bucket in (store.fill >= store.capacity).nonzero().squeeze(1).tolist():
                self._flush(store, bucket)
            if bool(now.all()):
                return
            rest = (~now).nonzero().squeeze(1)
            columns = [column[rest.to(column.device)] for column in columns]
            batch, signs = batch.like(columns, batch.index[rest]), signs[rest]
            buckets, place = buckets[rest], place[rest] - store.capacity

    @property
    def held(self) -> int:
        """Rows that wait for others of their bucket."""
        return sum(int(store.fill.sum()) for store in self._stores.values())

    def flush(self) -> None:
        """Emit everything that is still held."""
        for store in self._stores.values():
            for bucket in store.fill.nonzero().squeeze(1).tolist():
                self._flush(store, bucket)
        self._stores.clear()

    def _flush(self, store: _Store, bucket: int) -> None:
        first, count = bucket * store.capacity, int(store.fill[bucket])
        part = slice(first, first + count)
        rows = store.batch.like([column[part] for column in store.columns], store.index[part])
        self._emit(bucket, rows, store.signs[part])
        store.fill[bucket] = 0

    def _store(self, batch: RowBatch, columns: list[Tensor]) -> _Store:
        """The store for this signature; room is made by emitting the oldest."""
        key = batch.signature
        if key in self._stores:
            return self._stores[key]
        each = sum(column[:1].nbytes for column in columns)
        assert self._capacity is not None
        capacity = min(self._capacity, max(1, HELD_BYTES // max(1, each * self._buckets)))
        rows = self._buckets * capacity
        while (
            self._stores
            and sum(s.nbytes for s in self._stores.values()) + each * rows > HELD_BYTES
        ):
            oldest = next(iter(self._stores))
            for bucket in self._stores[oldest].fill.nonzero().squeeze(1).tolist():
                self._flush(self._stores[oldest], bucket)
            del self._stores[oldest]
        device = columns[0].device if columns else torch.device("cpu")
        advice = "consolidate with a smaller batch size or a smaller sketch"
        memory.require(f"holding back {rows} examples", each * rows, device, advice)
        self._stores[key] = _Store(
            batch=batch.like([column[:0] for column in columns], batch.index[:0]),
            columns=[column.new_empty((rows, *column.shape[1:])) for column in columns],
            index=torch.zeros(rows, dtype=torch.int64),
            signs=torch.zeros(rows, dtype=torch.int64),
            fill=torch.zeros(self._buckets, dtype=torch.int64),
            capacity=capacity,
        )
        return self._stores[key]
