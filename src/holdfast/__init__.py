"""Learn new tasks while holding on to the old ones.

>>> import holdfast as hf
>>> regularizer = hf.Regularizer(hf.EWC(), hf.CountSketch(size=50), strength=1e3)
"""

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast import losses
    from holdfast.analysis import frobenius_error, spectrum, stable_rank
    from holdfast.approximation import (
        APPROXIMATIONS,
        OSNAP,
        SRHT,
        Approximation,
        BlockDiagonal,
        Composite,
        CountSketch,
        DenseSketch,
        Diagonal,
        DiagonalPlusLowRank,
        Full,
        Kronecker,
        KroneckerPlusLowRank,
        LowRank,
        Nystrom,
        Setting,
    )
    from holdfast.coupling import CouplingWarning
    from holdfast.diagnosis import Diagnosis, diagnose
    from holdfast.gradients import VectorisationWarning
    from holdfast.history import HISTORIES, History, Mean, MovingAverage, Sum
    from holdfast.importance import EWC, IMPORTANCES, MAS, SCP, Custom, Importance
    from holdfast.matrices import (
        BlockDiagonalMatrix,
        DenseMatrix,
        DiagonalMatrix,
        FactoredMatrix,
        KroneckerMatrix,
        PartsMatrix,
        PSDMatrix,
        SumMatrix,
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
    "OSNAP",
    "SCP",
    "SRHT",
    "Approximation",
    "BlockDiagonal",
    "BlockDiagonalMatrix",
    "Composite",
    "CountSketch",
    "CouplingWarning",
    "Custom",
    "DenseMatrix",
    "DenseSketch",
    "Diagnosis",
    "Diagonal",
    "DiagonalMatrix",
    "DiagonalPlusLowRank",
    "FactoredMatrix",
    "Full",
    "History",
    "Importance",
    "ImportanceWarning",
    "Kronecker",
    "KroneckerMatrix",
    "KroneckerPlusLowRank",
    "LowRank",
    "Mean",
    "MovingAverage",
    "Nystrom",
    "PSDMatrix",
    "ParameterSpace",
    "PartsMatrix",
    "Penalty",
    "Regularizer",
    "RowBatch",
    "Setting",
    "Sum",
    "SumMatrix",
    "TaskRecord",
    "VectorisationWarning",
    "diagnose",
    "frobenius_error",
    "losses",
    "spectrum",
    "stable_rank",
]

# Where each name lives. They are imported on first use, so that the command line, which needs none of
# them to show its help, does not wait for torch.
_HOMES = {
    "frobenius_error": "holdfast.analysis",
    "spectrum": "holdfast.analysis",
    "stable_rank": "holdfast.analysis",
    "APPROXIMATIONS": "holdfast.approximation",
    "Approximation": "holdfast.approximation",
    "BlockDiagonal": "holdfast.approximation",
    "Composite": "holdfast.approximation",
    "CountSketch": "holdfast.approximation",
    "DenseSketch": "holdfast.approximation",
    "Diagonal": "holdfast.approximation",
    "DiagonalPlusLowRank": "holdfast.approximation",
    "Full": "holdfast.approximation",
    "Kronecker": "holdfast.approximation",
    "KroneckerPlusLowRank": "holdfast.approximation",
    "LowRank": "holdfast.approximation",
    "Nystrom": "holdfast.approximation",
    "OSNAP": "holdfast.approximation",
    "SRHT": "holdfast.approximation",
    "Setting": "holdfast.approximation",
    "Diagnosis": "holdfast.diagnosis",
    "diagnose": "holdfast.diagnosis",
    "CouplingWarning": "holdfast.coupling",
    "VectorisationWarning": "holdfast.gradients",
    "HISTORIES": "holdfast.history",
    "History": "holdfast.history",
    "Mean": "holdfast.history",
    "MovingAverage": "holdfast.history",
    "Sum": "holdfast.history",
    "EWC": "holdfast.importance",
    "IMPORTANCES": "holdfast.importance",
    "MAS": "holdfast.importance",
    "SCP": "holdfast.importance",
    "Custom": "holdfast.importance",
    "Importance": "holdfast.importance",
    "BlockDiagonalMatrix": "holdfast.matrices",
    "DenseMatrix": "holdfast.matrices",
    "DiagonalMatrix": "holdfast.matrices",
    "FactoredMatrix": "holdfast.matrices",
    "KroneckerMatrix": "holdfast.matrices",
    "PSDMatrix": "holdfast.matrices",
    "PartsMatrix": "holdfast.matrices",
    "SumMatrix": "holdfast.matrices",
    "ParameterSpace": "holdfast.parameters",
    "Penalty": "holdfast.penalty",
    "TaskRecord": "holdfast.penalty",
    "ImportanceWarning": "holdfast.regularizer",
    "Regularizer": "holdfast.regularizer",
    "RowBatch": "holdfast.rows",
}


def __getattr__(name: str) -> Any:
    if name == "losses":
        return importlib.import_module("holdfast.losses")
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
