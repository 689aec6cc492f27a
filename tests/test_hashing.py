"""Hash families: exact arithmetic, exact independence, and streams that never meet."""

import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.hashing import _PURPOSES, PRIME, Draw, SketchHash, checked_seed, polynomial

element = st.integers(0, PRIME - 1)


def test_field_is_prime_and_products_fit_in_int64() -> None:
    assert all(PRIME % d for d in range(2, int(PRIME**0.5) + 1))
    assert (PRIME - 1) ** 2 + PRIME - 1 < 2**63


@settings(deadline=None, max_examples=60)
@given(
    coefficients=st.lists(element, min_size=1, max_size=6),
    index=st.lists(element, min_size=1, max_size=20),
)
def test_polynomial_equals_python_integers(coefficients: list[int], index: list[int]) -> None:
    index += [0, 1, PRIME - 2, PRIME - 1]
    k = len(coefficients)
    exact = [sum(c * i ** (k - 1 - j) for j, c in enumerate(coefficients)) % PRIME for i in index]
    assert polynomial(coefficients, torch.tensor(index)).tolist() == exact


def test_polynomial_does_not_overflow_at_the_largest_values() -> None:
    top = [PRIME - 1] * 4
    exact = sum((PRIME - 1) * (PRIME - 1) ** j for j in range(4)) % PRIME
    assert polynomial(top, torch.tensor([PRIME - 1])).item() == exact
    # an index in a narrower type must not overflow either
    assert polynomial(top, torch.tensor([PRIME - 1], dtype=torch.int32)).item() == exact


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 3000), index=st.lists(element, min_size=1))
def test_sketch_hash_equals_its_definition(seed: int, size: int, index: list[int]) -> None:
    h = SketchHash.draw(size, np.random.default_rng(seed))
    (a, b), (c3, c2, c1, c0) = h.bucket_coefficients, h.sign_coefficients
    buckets = [(a * i + b) % PRIME % size for i in index]
    even = [(c3 * i**3 + c2 * i**2 + c1 * i + c0) % PRIME % 2 == 0 for i in index]
    assert h.buckets(torch.tensor(index)).tolist() == buckets
    assert h.signs(torch.tensor(index)).tolist() == [1 if e else -1 for e in even]


def _values(degree: int, prime: int) -> torch.Tensor:
    """Every polynomial of a small field at every point: (p^degree, p)."""
    points = torch.arange(prime)
    family = itertools.product(range(prime), repeat=degree)
    return torch.stack([polynomial(c, points, prime) for c in family])


@pytest.mark.parametrize(("wise", "prime"), [(2, 5), (2, 7), (2, 11), (4, 5), (4, 7), (4, 11)])
def test_joint_distribution_factorises_exactly(wise: int, prime: int) -> None:
    """k values at k points take every one of the p^k combinations exactly once."""
    values = _values(wise, prime)
    for points in itertools.combinations(range(prime), wise):
        code = (values[:, list(points)] * prime ** torch.arange(wise)).sum(1)
        assert code.unique().numel() == prime**wise


@pytest.mark.parametrize("prime", [5, 7, 11])
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_buckets_are_pairwise_independent_and_nearly_uniform(prime: int, size: int) -> None:
    buckets = _values(2, prime) % size
    total = len(buckets)
    single = {k: Fraction(n, total) for k, n in Counter(buckets[:, 0].tolist()).items()}
    for share in single.values():  # within t/p of uniform, relatively
        assert abs(size * share - 1) <= Fraction(size, prime)
    for i, j in itertools.combinations(range(prime), 2):
        pairs = Counter(map(tuple, buckets[:, [i, j]].tolist()))
        for (a, b), n in pairs.items():
            assert Fraction(n, total) == single[a] * single[b]
        assert len(pairs) == len(single) ** 2


@pytest.mark.parametrize("prime", [5, 7])
def test_signs_are_fourfold_independent_and_nearly_balanced(prime: int) -> None:
    signs = 1 - 2 * (_values(4, prime) & 1)
    total = len(signs)
    plus = Fraction(int((signs[:, 0] == 1).sum()), total)
    assert abs(2 * plus - 1) == Fraction(1, prime)
    share = {1: plus, -1: 1 - plus}
    for points in itertools.combinations(range(prime), 4):
        joint = Counter(map(tuple, signs[:, list(points)].tolist()))
        assert len(joint) == 16
        for combination, n in joint.items():
            expected = Fraction(1)
            for sign in combination:
                expected *= share[sign]
            assert Fraction(n, total) == expected


def test_a_lower_degree_would_not_be_fourfold_independent() -> None:
    """The check above can fail: three coefficients leave the fourth value determined."""
    values = _values(3, 5)
    code = (values[:, [0, 1, 2, 3]] * 5 ** torch.arange(4)).sum(1)
    assert code.unique().numel() < 5**4


@pytest.mark.parametrize("index", [PRIME, PRIME + 5, 2**40, -1])
def test_index_outside_the_field_is_refused(index: int) -> None:
    h = SketchHash.draw(50, np.random.default_rng(0))
    rows = torch.tensor([0, index, 3])
    for function in (h.buckets, h.signs):
        with pytest.raises(ValueError, match=rf"\[0, {PRIME}\), got {index}.*fewer rows"):
            function(rows)


def test_no_index_is_fine() -> None:
    assert SketchHash.draw(5, np.random.default_rng(0)).buckets(torch.arange(0)).tolist() == []


def test_coefficients_cover_the_whole_field() -> None:
    drawn = [SketchHash.draw(5, np.random.default_rng(s)) for s in range(2000)]
    values = [c for h in drawn for c in (*h.bucket_coefficients, *h.sign_coefficients)]
    assert 0 <= min(values) < PRIME / 500
    assert PRIME * (1 - 1 / 500) < max(values) < PRIME
    mean = sum(values) / len(values) / PRIME
    assert abs(mean - 0.5) < 4 / (12 * len(values)) ** 0.5


def test_streams_are_distinct_for_every_part_of_the_key() -> None:
    """No two of (seed, task, rank, copy, purpose) share a stream, whatever the order of addition."""
    seeds = [0, 1, 2, 2**32, 2**32 + 1, 2**63 - 1, 1 << 70]
    streams = {}
    for seed, task, rank, copy in itertools.product(seeds, range(3), range(3), range(3)):
        for purpose in _PURPOSES:
            generator = Draw(seed, task, rank).generator(purpose, copy)
            first = tuple(generator.integers(0, 2**63, size=2).tolist())
            key = (seed, task, rank, copy, purpose)
            assert first not in streams, f"{key} and {streams[first]} share a stream"
            streams[first] = key


def test_streams_are_reproducible() -> None:
    first, again = (Draw(7, 2, 1).generator("sketch", 3).integers(0, 2**63, 8) for _ in range(2))
    assert first.tolist() == again.tolist()


def test_ids_name_the_draw() -> None:
    ids = {SketchHash.draw(50, Draw(s).generator("sketch")).id for s in range(500)}
    assert len(ids) == 500
    one, same = (SketchHash.draw(50, Draw(3).generator("sketch")) for _ in range(2))
    assert one == same
    assert one.id == same.id
    assert SketchHash(49, one.bucket_coefficients, one.sign_coefficients).id != one.id


def test_seeds_of_numpy_are_seeds() -> None:
    assert checked_seed(np.int64(7)) == 7
    assert type(checked_seed(np.uint8(7))) is int
    for bad in (-1, True, 0.5, "7", None):
        with pytest.raises(ValueError, match="seed must be a non-negative integer"):
            checked_seed(bad)
