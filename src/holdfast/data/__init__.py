"""Verified data sets. A new one is one file and one line in ``DATASETS``."""

from collections.abc import Mapping
from types import ModuleType

from holdfast.data import cifar100, mnist
from holdfast.data.cache import CorruptData, DataError, DataFile, MissingData, root
from holdfast.data.generated import generated
from holdfast.data.images import Images

__all__ = [
    "DATASETS",
    "CorruptData",
    "DataError",
    "DataFile",
    "Images",
    "MissingData",
    "cifar100",
    "generated",
    "mnist",
    "root",
]

DATASETS: Mapping[str, ModuleType] = {
    "mnist": mnist,
    "cifar100": cifar100,
}  # load, fetch, missing, damaged
