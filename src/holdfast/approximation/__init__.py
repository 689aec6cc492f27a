"""What we can afford: one file per approximation, one line per member."""

from holdfast.approximation.base import Approximation, Setting
from holdfast.approximation.block_diagonal import BlockDiagonal
from holdfast.approximation.composite import Composite
from holdfast.approximation.count_sketch import CountSketch
from holdfast.approximation.dense_sketch import DenseSketch
from holdfast.approximation.diagonal import Diagonal
from holdfast.approximation.diagonal_plus_low_rank import DiagonalPlusLowRank
from holdfast.approximation.full import Full
from holdfast.approximation.kronecker import Kronecker
from holdfast.approximation.kronecker_plus_low_rank import KroneckerPlusLowRank
from holdfast.approximation.low_rank import LowRank
from holdfast.approximation.nystrom import Nystrom
from holdfast.approximation.osnap import OSNAP
from holdfast.approximation.srht import SRHT
from holdfast.configuration import register

__all__ = [
    "APPROXIMATIONS",
    "OSNAP",
    "SRHT",
    "Approximation",
    "BlockDiagonal",
    "Composite",
    "CountSketch",
    "DenseSketch",
    "Diagonal",
    "DiagonalPlusLowRank",
    "Full",
    "Kronecker",
    "KroneckerPlusLowRank",
    "LowRank",
    "Nystrom",
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
        "dense_sketch": DenseSketch,
        "osnap": OSNAP,
        "srht": SRHT,
        "nystrom": Nystrom,
        "kronecker": Kronecker,
        "kronecker_plus_low_rank": KroneckerPlusLowRank,
    },
)
