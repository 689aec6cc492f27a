"""The idx format of MNIST: a type, a number of dimensions, their sizes, then the bytes."""

import math
import struct

import numpy as np
from numpy.typing import NDArray

from holdfast.data.cache import CorruptData

__all__ = ["parse"]

UNSIGNED_BYTE = 0x08
DIMENSIONS = 4  # more than any file of the family has; a larger number is noise


def parse(data: bytes, name: str) -> NDArray[np.uint8]:
    """The array in the content of an idx file of unsigned bytes.

    Args:
        data: The whole file, uncompressed.
        name: The file's name, for messages.

    Raises:
        CorruptData: The header is not that of such a file, or the length does not follow from it.
    """
    if len(data) < 4 or data[:2] != b"\0\0":
        raise CorruptData(f"{name} is not an idx file: it begins with {data[:4].hex(' ')!r}")
    kind, dimensions = data[2], data[3]
    if kind != UNSIGNED_BYTE or not 1 <= dimensions <= DIMENSIONS:
        raise CorruptData(
            f"{name}: expected unsigned bytes (type 8) in 1 to {DIMENSIONS} dimensions, "
            f"got type {kind} in {dimensions}"
        )
    start = 4 + 4 * dimensions
    if len(data) < start:
        raise CorruptData(f"{name} ends inside its header: {len(data)} of {start} bytes")
    shape = struct.unpack(f">{dimensions}I", data[4:start])
    expected = start + math.prod(shape)  # Python integers: a forged header cannot overflow
    if len(data) != expected:
        raise CorruptData(
            f"{name}: a header for {' × '.join(map(str, shape))} asks for {expected:,} bytes, "
            f"the file has {len(data):,}"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)
