r"""Full batches of one bucket: rows are held back until enough of them belong together.

A signed sum over one bucket is one backward pass. Without regrouping a batch would need one pass per
bucket in it; with it, consolidation costs one epoch of ordinary passes, whatever the number of buckets.
"""

import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast import memory
from holdfast.rows import RowBatch

__all__ = ["Regrouping"]

HELD_BYTES = 2**28  # 256 MiB: what held-back examples may take

_FREE = -1

Emit = Callable[[int, RowBatch, Tensor], None]  # (bucket, rows of that bucket, their signs)


@dataclass
class _Pool:
    """Places for rows of one signature, given to whichever bucket needs them.

    Buckets fill at random, so that on average half of what each may hold is in use: places of its own
    for every bucket would lie idle. The place used last is given away first, and memory that was never
    needed is never touched.
    """

    batch: RowBatch  # how to make rows from columns
    columns: list[Tensor]
    index: NDArray[np.int64]
    signs: NDArray[np.int64]
    bucket: NDArray[np.int64]  # of the row in each place
    count: NDArray[np.int64]  # rows of each bucket
    free: NDArray[np.int64]  # a stack of places
    room: int  # places on it

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self.columns)

    def put(
        self, columns: Sequence[Tensor], index: Tensor, signs: Tensor, buckets: NDArray[np.int64]
    ) -> None:
        """Take rows, for which there must be room."""
        self.room -= len(index)
        places = self.free[self.room : self.room + len(index)][::-1].copy()
        target = torch.from_numpy(places)
        for held, column in zip(self.columns, columns, strict=True):
            held.index_copy_(0, target.to(held.device), column)
        self.index[places], self.signs[places] = index.numpy(), signs.numpy()
        self.bucket[places] = buckets
        self.count += np.bincount(buckets, minlength=len(self.count))

    def rows(self, bucket: int) -> tuple[RowBatch, Tensor, Callable[[], None]]:
        """The rows of a bucket, their signs, and what gives their places back."""
        places = np.flatnonzero(self.bucket == bucket)
        first, last = int(places[0]), int(places[-1]) + 1
        if last - first == len(places):  # side by side: no copy
            columns = [column[first:last] for column in self.columns]
        else:
            which = torch.from_numpy(places)
            columns = [column.index_select(0, which.to(column.device)) for column in self.columns]
        index = torch.from_numpy(self.index[places])
        signs = torch.from_numpy(self.signs[places])

        def give_back() -> None:
            self.bucket[places] = _FREE
            self.count[bucket] = 0
            self.free[self.room : self.room + len(places)] = places[::-1]
            self.room += len(places)

        return self.batch.like(columns, index), signs, give_back


class Regrouping:
    """Sorts rows into buckets and emits the rows of one bucket together.

    Args:
        buckets: The number of buckets.
        emit: Called with a bucket, rows that all belong to it, and their signs. A method is not kept alive:
            its object, which has this one, would live on until the next garbage collection.
        capacity: Rows of a bucket to emit at once. None takes twice as many as the largest batch so
            far has (fewer and larger passes, in no more than twice the memory of a training step with
            that batch) and keeps back as many rows as fill a batch for every bucket.
    """

    def __init__(self, buckets: int, emit: Emit, capacity: int | None = None) -> None:
        self._buckets = buckets
        self._method = weakref.WeakMethod(emit) if inspect.ismethod(emit) else None
        self._function = emit if self._method is None else None
        self._fixed = capacity is not None
        self._capacity, self._places = capacity or 0, (capacity or 0) * buckets
        self._pools: dict[object, _Pool] = {}

    def add(self, batch: RowBatch, buckets: Tensor, signs: Tensor) -> None:
        """Take the rows of ``batch``; emit what has become full."""
        columns = batch.columns
        if columns is None:  # cannot be cut: one signed pass per bucket that occurs in it
            for bucket in buckets.unique().tolist():
                self._emit(bucket, batch, signs * (buckets == bucket))
            return
        if not self._fixed and 2 * len(batch) > self._capacity:
            self.flush()  # a larger batch than before: what it may take, others may
            self._capacity, self._places = 2 * len(batch), self._buckets * len(batch)
        pool, which, first = self._pool(batch, columns), buckets.numpy(), 0
        while first < len(batch):
            part = slice(first, min(len(batch), first + pool.room))
            some = [column[part] for column in columns]
            pool.put(some, batch.index[part], signs[part], which[part])
            for bucket in np.flatnonzero(pool.count >= self._capacity).tolist():
                self._flush(pool, bucket)
            if not pool.room:
                self._flush(pool, int(pool.count.argmax()))
            first = part.stop

    def _emit(self, bucket: int, rows: RowBatch, signs: Tensor) -> None:
        emit = self._function if self._method is None else self._method()
        assert emit is not None
        emit(bucket, rows, signs)

    @property
    def held(self) -> int:
        """Rows that wait for others of their bucket."""
        return sum(int(pool.count.sum()) for pool in self._pools.values())

    def flush(self) -> None:
        """Emit everything that is still held."""
        for pool in self._pools.values():
            self._empty(pool)
        self._pools.clear()

    def _empty(self, pool: _Pool) -> None:
        for bucket in np.flatnonzero(pool.count).tolist():
            self._flush(pool, bucket)

    def _flush(self, pool: _Pool, bucket: int) -> None:
        rows, signs, give_back = pool.rows(bucket)
        self._emit(bucket, rows, signs)
        give_back()

    def _pool(self, batch: RowBatch, columns: list[Tensor]) -> _Pool:
        """The pool for this signature; room is made by emitting the oldest."""
        key = batch.signature
        if key in self._pools:
            return self._pools[key]
        each = sum(column[:1].nbytes for column in columns)
        places = max(1, min(self._places, HELD_BYTES // max(1, each)))
        while (
            self._pools
            and sum(pool.nbytes for pool in self._pools.values()) + each * places > HELD_BYTES
        ):
            self._empty(self._pools.pop(next(iter(self._pools))))
        device = columns[0].device if columns else torch.device("cpu")
        advice = "consolidate with a smaller batch size or a smaller sketch"
        memory.require(f"holding back {places} examples", each * places, device, advice)
        self._pools[key] = _Pool(
            batch=batch.like([column[:0] for column in columns], batch.index[:0]),
            columns=[column.new_empty((places, *column.shape[1:])) for column in columns],
            index=np.zeros(places, np.int64),
            signs=np.zeros(places, np.int64),
            bucket=np.full(places, _FREE),
            count=np.zeros(self._buckets, np.int64),
            free=np.arange(places)[::-1].copy(),
            room=places,
        )
        return self._pools[key]
