"""Seeds: one number in, an independent number for every purpose out."""

import zlib

import numpy as np

__all__ = ["derive"]


def derive(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose of a run, independent of the seeds for every other purpose.

    Seeds are never added: ``seed + task`` would give seed 0, task 1 the numbers of seed 1, task 0.

    Args:
        seed: The seed of the run.
        purpose: What the numbers are for, e.g. ``("order", task)``; words are hashed with CRC-32, which
            is the same on every machine (Python's own ``hash`` is not).
    """
    if seed < 0:
        raise ValueError(f"a seed is 0 or larger, got {seed}")
    words = [p if isinstance(p, int) else zlib.crc32(p.encode()) for p in purpose]
    state = np.random.SeedSequence((seed, *words)).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))  # torch generators take signed 64-bit seeds
