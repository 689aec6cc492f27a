"""What we can afford: one file per approximation, one line per member."""

from holdfast.approximation.base import Approximation, Setting
from holdfast.approximation.block_diagonal import BlockDiagonal
from holdfast.approximation.composite import Composite
from holdfast.approximation.count_sketch import CountSketch
from holdfast.approximation.diagonal import Diagonal
from holdfast.approximation.diagonal_plus_low_rank import DiagonalPlusLowRank
from holdfast.approximation.full import Full
from holdfast.approximation.low_rank import LowRank
from holdfast.configuration import register

__all__ = [
    "APPROXIMATIONS",
    "Approximation",
    "BlockDiagonal",
    "Composite",
    "CountSketch",
    "Diagonal",
    "DiagonalPlusLowRank",
    "Full",
    "LowRank",
    "Setting",
]

APPROXIMATIONS = register(
    Approximation,
    "approximation",
    {
        "diagonal": Diagonal,
        "block_diagonal": BlockDiagonal,
        "count_sketch": CountSketch,
        "low_rank": LowRank,
        "diagonal_plus_low_rank": DiagonalPlusLowRank,
        "full": Full,
        "composite": Composite,
    },
)
