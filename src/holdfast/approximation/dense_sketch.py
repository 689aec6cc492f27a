"""Random projection of the rows: independent signs, or normal numbers."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from holdfast.approximation.count_sketch import check_merge
from holdfast.approximation.product_sketch import ProductSketch
from holdfast.configuration import keep_positive

__all__ = ["DenseSketch"]

_CHUNK = 1024  # row indices whose entries are drawn together: 400 kB for 50 rows


@dataclass(frozen=True)
class DenseSketch(ProductSketch):
    r"""F = SW/√t, every entry of S independent with mean 0 and variance 1.

    Unbiased. With signs the mean-square error is that of CountSketch; with normal numbers
    :math:`\mathbb{E}\lVert\tilde\Omega-\Omega\rVert_F^2 = \frac1t\left[(\mathrm{tr}\,\Omega)^2 +
    \lVert\Omega\rVert_F^2\right]`, a little more. What is gained over CountSketch is the tail:
    t = O((r + log 1/δ)/ε²) rows are enough for all directions at once with probability 1 − δ, r being
    the stable rank. What is paid: every row of W is written out and enters all t rows of F.

    Args:
        size: The number t of rows kept.
        kind: "rademacher" for signs, "gaussian" for normal numbers.
        merge: "rows" adds the sketches of tasks (constant memory; they are independent, so the sum is
            again such a sketch of all rows); "stack" keeps them apart (memory grows with tasks).

    References:
        Optimal Approximate Matrix Product in Terms of Stable Rank (Cohen et al., 2016)
        https://arxiv.org/abs/1507.02268
    """

    size: int = 50
    kind: Literal["rademacher", "gaussian"] = "rademacher"
    merge: Literal["rows", "stack"] = "rows"

    def __post_init__(self) -> None:
        keep_positive(self, "size")
        if self.kind not in ("rademacher", "gaussian"):
            raise ValueError(f"kind must be 'rademacher' or 'gaussian', got {self.kind!r}")
        check_merge(self.merge)

    @property
    def chunk(self) -> int:
        return _CHUNK

    def columns(self, generator: np.random.Generator) -> NDArray[Any]:
        shape = _CHUNK, self.size
        if self.kind == "gaussian":
            return generator.standard_normal(shape)
        return 1 - 2 * generator.integers(0, 2, shape, dtype=np.int8)
