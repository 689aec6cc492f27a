"""Learn new tasks while holding on to the old ones.

>>> import holdfast as hf
>>> regularizer = hf.Regularizer(hf.EWC(), hf.CountSketch(size=50), strength=1e3)
"""

from importlib.metadata import version

from holdfast import losses
from holdfast.analysis import frobenius_error, spectrum, stable_rank
from holdfast.approximation import (
    APPROXIMATIONS,
    Approximation,
    BlockDiagonal,
    CountSketch,
    Diagonal,
    Full,
    LowRank,
    Setting,
)
from holdfast.diagnosis import Diagnosis, diagnose
from holdfast.history import HISTORIES, History, Mean, MovingAverage, Sum
from holdfast.importance import EWC, IMPORTANCES, MAS, SCP, Custom, Importance
from holdfast.matrices import (
    BlockDiagonalMatrix,
    DenseMatrix,
    DiagonalMatrix,
    FactoredMatrix,
    PSDMatrix,
)
from holdfast.parameters import ParameterSpace
from holdfast.penalty import Penalty, TaskRecord
from holdfast.regularizer import ImportanceWarning, Regularizer
from holdfast.rows import RowBatch

__version__ = version("holdfast")

__all__ = [
    "APPROXIMATIONS",
    "EWC",
    "HISTORIES",
    "IMPORTANCES",
    "MAS",
    "SCP",
    "Approximation",
    "BlockDiagonal",
    "BlockDiagonalMatrix",
    "CountSketch",
    "Custom",
    "DenseMatrix",
    "Diagnosis",
    "Diagonal",
    "DiagonalMatrix",
    "FactoredMatrix",
    "Full",
    "History",
    "Importance",
    "ImportanceWarning",
    "LowRank",
    "Mean",
    "MovingAverage",
    "PSDMatrix",
    "ParameterSpace",
    "Penalty",
    "Regularizer",
    "RowBatch",
    "Setting",
    "Sum",
    "TaskRecord",
    "diagnose",
    "frobenius_error",
    "losses",
    "spectrum",
    "stable_rank",
]
