"""Rows are sorted into buckets: each leaves once, with its own, and no more wait than there is room for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from holdfast import regrouping
from holdfast.regrouping import Regrouping
from holdfast.rows import GivenRows, RowBatch

Emitted = list[tuple[int, list[int], list[int], list[float]]]


def sort_rows(
    sizes: list[int], buckets: int, seed: int, capacity: int | None
) -> tuple[Emitted, Tensor, Tensor, int]:
    """Rows 0, 1, 2, … in batches; what was emitted, their buckets and signs, and the most held."""
    draw = torch.Generator().manual_seed(seed)
    total = sum(sizes)
    where = torch.randint(buckets, (total,), generator=draw)
    signs = 2 * torch.randint(2, (total,), generator=draw) - 1
    emitted: Emitted = []

    def emit(bucket: int, rows: RowBatch, signs: Tensor) -> None:
        (given,) = rows.columns or ()
        emitted.append((bucket, rows.index.tolist(), signs.tolist(), given[:, 0].tolist()))

    sorter, first, held = Regrouping(buckets, emit, capacity), 0, 0
    for size in sizes:
        index = torch.arange(first, first + size)
        batch = GivenRows(index.to(torch.float64).unsqueeze(1) + 0.5, index)
        sorter.add(batch, where[index], signs[index])
        held, first = max(held, sorter.held), first + size
    sorter.flush()
    assert sorter.held == 0
    return emitted, where, signs, held


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    buckets=st.integers(1, 7),
    seed=st.integers(0, 1000),
    capacity=st.none() | st.integers(1, 9),
    places=st.integers(1, 200),
)
def test_every_row_leaves_once_with_its_own(
    sizes: list[int], buckets: int, seed: int, capacity: int | None, places: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regrouping, "HELD_BYTES", 8 * places)
        emitted, where, signs, held = sort_rows(sizes, buckets, seed, capacity)
    assert sorted(i for _, index, _, _ in emitted for i in index) == list(range(sum(sizes)))
    for bucket, index, sign, values in emitted:
        assert where[index].tolist() == [bucket] * len(index)
        assert signs[index].tolist() == sign
        assert values == [i + 0.5 for i in index], "a row keeps what it is made from"
    assert held <= min(places, buckets * (capacity or max(sizes)))


@pytest.mark.parametrize("size", [1, 10, 100])
def test_passes_are_larger_than_batches_and_not_much(size: int) -> None:
    emitted, _, _, _ = sort_rows([size] * (4000 // size), 5, 0, None)
    lengths = [len(index) for _, index, _, _ in emitted]
    assert max(lengths) < 2 * size + size
    assert sum(length >= size for length in lengths) >= len(lengths) - 5, "but for what is left"


def test_one_bucket_is_emitted_in_the_order_of_arrival() -> None:
    emitted, _, _, _ = sort_rows([7] * 10, 1, 0, 8)
    lengths = [len(index) for _, index, _, _ in emitted]
    assert lengths == [8] * 8 + [6]
    assert [i for _, index, _, _ in emitted for i in index] == list(range(70))
