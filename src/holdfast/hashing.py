r"""k-wise independent hash families in exact modular arithmetic.

A polynomial of degree k - 1 with uniform coefficients over the field :math:`\mathbb{F}_p` is exactly
k-wise independent. With p = 2³¹ - 1 every product stays below 2⁶², so ``int64`` never overflows.
"""

import hashlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

__all__ = ["PRIME", "Draw", "SketchHash", "checked_seed", "polynomial"]

PRIME = 2**31 - 1  # a Mersenne prime; (p - 1)² + p < 2⁶³

# One number per use of randomness, so that no two uses share a stream.
_PURPOSES = {
    "sketch": 0,
    "labels": 1,
    "slices": 2,
    "groups": 3,
    "probes": 4,
    "parts": 5,
    "entries": 6,
    "test_matrix": 7,
}


def checked_seed(seed: Any) -> int:
    """A seed as a plain integer; NumPy's integers are as good."""
    if isinstance(seed, bool) or not hasattr(seed, "__index__") or operator.index(seed) < 0:
        raise ValueError(f"seed must be a non-negative integer, got {seed!r}")
    return operator.index(seed)


@dataclass(frozen=True)
class Draw:
    """Where randomness comes from: a seed, the task's number and the rank, never added together.

    Example:
        >>> Draw(seed=0, task=2).generator("sketch").integers(10) in range(10)
        True
    """

    seed: int
    task: int = 0
    rank: int = 0

    def generator(self, purpose: str, copy: int = 0) -> np.random.Generator:
        """A fresh generator for one purpose, on the CPU."""
        key = (self.seed, self.task, self.rank, copy, _PURPOSES[purpose])
        return np.random.default_rng(np.random.SeedSequence(key))

    def part(self, place: int) -> "Draw":
        """The source for one of several sketches of a task: that of the first is this one itself."""
        if not place:
            return self
        key = (self.seed, self.task, self.rank, 0, _PURPOSES["parts"], place)
        seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))
        return Draw(seed, self.task, self.rank)


def polynomial(coefficients: Sequence[int], index: Tensor, prime: int = PRIME) -> Tensor:
    r"""Evaluate :math:`\sum_j c_j i^{k-1-j} \bmod p` exactly, by Horner's rule.

    Args:
        coefficients: k integers in [0, p), highest power first.
        index: Integers in [0, p).
        prime: The field; at most 2³¹ - 1.
    """
    # numpy: for a batch of indices torch spends more on the calls than on the arithmetic
    i = index.to(torch.int64).numpy()  # a product of two narrower integers would overflow
    if i.size and not 0 <= i.min() <= i.max() < prime:
        outside = i[(i < 0) | (i >= prime)][0]
        raise ValueError(
            f"row index must lie in [0, {prime}), got {outside}; "
            "the hash field has no more elements: consolidate on fewer rows"
        )
    value = np.zeros_like(i)
    for c in coefficients:
        value = (value * i + c) % prime
    return torch.from_numpy(value)


@dataclass(frozen=True)
class SketchHash:
    r"""Bucket :math:`h(i)` (2-wise independent) and sign :math:`\sigma(i)` (4-wise independent).

    Both are near uniform: a value mod t is off by at most t/p.

    Example:
        >>> SketchHash.draw(50, np.random.default_rng(0)).signs(torch.arange(4)).abs().tolist()
        [1, 1, 1, 1]
    """

    size: int
    bucket_coefficients: tuple[int, int]
    sign_coefficients: tuple[int, int, int, int]

    @classmethod
    def draw(cls, size: int, generator: np.random.Generator) -> Self:
        """Six uniform coefficients from ``generator``."""
        c = [int(x) for x in generator.integers(0, PRIME, size=6)]
        return cls(size, (c[0], c[1]), (c[2], c[3], c[4], c[5]))

    @property
    def id(self) -> str:
        """A name for this draw; two sketches with the same id must never be merged."""
        text = f"{self.size}:{self.bucket_coefficients}:{self.sign_coefficients}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def buckets(self, index: Tensor) -> Tensor:
        """h(i) in [0, size)."""
        return polynomial(self.bucket_coefficients, index) % self.size

    def signs(self, index: Tensor) -> Tensor:
        """σ(i) in {-1, 1}."""
        return 1 - 2 * (polynomial(self.sign_coefficients, index) & 1)
