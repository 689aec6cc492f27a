"""Reading a pickled batch of arrays without running what a pickle may contain."""

import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.data.cache import CorruptData

__all__ = ["read"]


def _empty(kind: Any, shape: Any, code: Any) -> NDArray[Any]:
    """What numpy's ``_reconstruct`` does for a plain array: its state is set afterwards."""
    del code
    if kind is not np.ndarray:
        raise pickle.UnpicklingError(f"expected an array, got {kind!r}")
    return np.ndarray.__new__(np.ndarray, shape, dtype="b")


def _dtype(code: Any, align: Any = False, copy: Any = False) -> np.dtype[Any]:
    """A number type; object arrays and records are refused."""
    del align, copy
    name = code.decode("ascii") if isinstance(code, bytes) else str(code)
    if name not in ("u1", "i8", "i4"):
        raise pickle.UnpicklingError(f"expected an array of whole numbers, got type {name!r}")
    return np.dtype(name)


# All that a batch of CIFAR needs. Everything else a pickle could name is refused before it is looked up.
_ALLOWED: dict[tuple[str, str], Callable[..., Any] | type] = {
    ("numpy.core.multiarray", "_reconstruct"): _empty,
    ("numpy._core.multiarray", "_reconstruct"): _empty,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): _dtype,
}


class _Reader(pickle.Unpickler):
    """An unpickler that knows arrays of numbers only."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not allowed")
        return _ALLOWED[module, name]


def read(data: bytes, name: str) -> dict[bytes, Any]:
    """The dictionary in a pickle of plain values and arrays of numbers.

    Args:
        data: The pickle.
        name: The file's name, for messages.

    Raises:
        CorruptData: It is not such a pickle, or names anything but arrays.
    """
    try:
        value = _Reader(io.BytesIO(data), encoding="bytes").load()
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        TypeError,
        IndexError,
        KeyError,
    ) as error:
        raise CorruptData(f"{name} is refused: {error}") from error
    except (AttributeError, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise CorruptData(f"{name} is not a readable batch ({error})") from error
    if not isinstance(value, dict):
        raise CorruptData(f"{name}: expected a dictionary, got {type(value).__name__}")
    return value
