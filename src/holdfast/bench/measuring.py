"""Measured speed as ratios: a reference and a subject, interleaved, in one process.

Absolute times differ by a factor of ten between machines, and by two between seconds on a busy one; the
median ratio of neighbouring measurements does not.
"""

import contextlib
import ctypes
import gc
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["PAIRS", "Measurement", "Ratio", "exponent", "freed_memory_kept", "peak_bytes", "ratio"]

PAIRS = 15


@dataclass(frozen=True)
class Ratio:
    """Subject over reference: the median over pairs, its quartiles, and the median seconds of each."""

    median: float
    low: float
    high: float
    reference_seconds: float
    subject_seconds: float
    pairs: int


@dataclass(frozen=True)
class Measurement:
    """One line of a suite: what was compared, the ratio (or exponent), and what it should be."""

    suite: str
    what: str
    value: float
    low: float
    high: float
    target: float | None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None without one."""
        return None if self.target is None else self.value <= self.target


def ratio(
    reference: Callable[[], object], subject: Callable[[], object], pairs: int = PAIRS
) -> Ratio:
    """Time two functions in turn; both run once before."""
    reference(), subject()
    first, second = [], []
    for _ in range(pairs):
        start = time.perf_counter()
        reference()
        middle = time.perf_counter()
        subject()
        first.append(middle - start)
        second.append(time.perf_counter() - middle)
    ratios = sorted(b / a for a, b in zip(first, second, strict=True))
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    middle_ratio = statistics.median(ratios)
    return Ratio(
        middle_ratio, low, high, statistics.median(first), statistics.median(second), pairs
    )


@contextlib.contextmanager
def freed_memory_kept() -> Iterator[bool]:
    """Inside, what is freed stays with the process, where the C library allows it (glibc; says so).

    Large results are otherwise given back to the system and asked for again at every repetition: on a virtual
    machine that alone can take as long as the work that is measured.
    """
    try:
        mallopt, trim = ctypes.CDLL(None).mallopt, ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        yield False
        return
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD, M_MMAP_MAX
    kept = bool(mallopt(mmap_max, 0)) and bool(mallopt(trim_threshold, -1))
    try:
        yield kept
    finally:
        mallopt(mmap_max, 65536)  # glibc's own
        mallopt(trim_threshold, 128 * 1024)
        gc.collect()
        trim(0)


def peak_bytes(function: Callable[[], Any]) -> tuple[Any, int]:
    """The result of a function, and how far the process's memory rose while it ran (Linux).

    What was freed before is given back to the system first: taken again, it would not be seen to rise.
    """
    gc.collect()
    with contextlib.suppress(AttributeError, OSError, TypeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)
    before, peak, done = _resident(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], _resident())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        result = function()
        peak[0] = max(peak[0], _resident())
    finally:
        done.set()
        thread.join()
    return result, max(0, peak[0] - before)


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The slope b of log seconds = a + b · log size, by least squares.

    Example:
        >>> round(exponent([1, 2, 4], [3, 6, 12]), 6)
        1.0
    """
    x, y = [math.log(s) for s in sizes], [math.log(s) for s in seconds]
    mx, my = statistics.fmean(x), statistics.fmean(y)
    top = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    return top / sum((a - mx) ** 2 for a in x)
