"""The subsampled randomised Hadamard transform of the rows, in blocks."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from holdfast.approximation.count_sketch import check_merge
from holdfast.approximation.product_sketch import ProductSketch
from holdfast.configuration import keep_positive

__all__ = ["SRHT"]


@dataclass(frozen=True)
class SRHT(ProductSketch):
    r"""F = Σₖ √(B/t) Rₖ Pₖ H Dₖ Wₖ over blocks Wₖ of B consecutive rows.

    H is the orthonormal Hadamard matrix of size B; :math:`D_k` and :math:`R_k` are fresh random signs
    and :math:`P_k` takes t of the B rows, without replacement. A stream has no length, so blocks
    stand for the one transform of all n rows. The mean is exactly Ω: within a block because the
    sample is uniform, between blocks because the signs are independent. Pairs of rows contribute
    to the mean-square error as in a dense sketch of signs, those within a block only
    (B − t)/(B − 1) times as much: a single block with t = B is exact.

    Only t rows of H are ever used, so their product with the block takes the place of the fast
    transform: the arithmetic is that of :class:`DenseSketch`. The fast transform would have to hold B
    rows of W, and passes log B times over them (written in torch, it took 25 times as long for 512
    rows of 200,000 entries and t = 50).

    Args:
        size: The number t of rows kept.
        block: The number B of rows transformed together: a power of two, at least ``size``.
        merge: "rows" adds the sketches of tasks (constant memory; they are independent, so the mean
            stays Ω); "stack" keeps them apart (memory grows with tasks).

    References:
        Improved Analysis of the Subsampled Randomized Hadamard Transform (Tropp, 2011)
        https://arxiv.org/abs/1011.1595
    """

    size: int = 50
    block: int = 1024
    merge: Literal["rows", "stack"] = "rows"

    def __post_init__(self) -> None:
        keep_positive(self, "size", "block")
        if self.block & (self.block - 1) or self.block < self.size:
            raise ValueError(
                f"block must be a power of two and at least size={self.size}, got {self.block}; "
                f"{1 << (self.size - 1).bit_length()} is the smallest"
            )
        check_merge(self.merge)

    @property
    def chunk(self) -> int:
        return self.block

    def columns(self, generator: np.random.Generator) -> NDArray[Any]:
        sampled = generator.choice(self.block, self.size, replace=False)
        before = 1 - 2 * generator.integers(0, 2, (self.block, 1), dtype=np.int8)
        after = 1 - 2 * generator.integers(0, 2, self.size, dtype=np.int8)
        return before * _hadamard(np.arange(self.block)[:, None], sampled) * after


def _hadamard(row: NDArray[np.int64], column: NDArray[np.int64]) -> NDArray[np.int8]:
    """Entries ±1 of Sylvester's matrix: the parity of the bits that both indices have."""
    bits = row & column
    for shift in (32, 16, 8, 4, 2, 1):
        bits = bits ^ (bits >> shift)
    signs: NDArray[np.int8] = (1 - 2 * (bits & 1)).astype(np.int8)
    return signs
