"""How much memory there is, said before it is allocated."""

import os
from pathlib import Path

import torch

__all__ = ["available", "readable", "require"]

_UNKNOWN = 2**62


def available(device: torch.device) -> int:
    """Bytes that can still be allocated on ``device``; a huge number where it cannot be told."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_of_machine(), _of_container())


def _of_machine() -> int:
    """What the whole machine has left."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return _UNKNOWN


def _of_container(place: Path = Path("/sys/fs/cgroup")) -> int:
    """What the limit of a container or a batch job leaves; files that are only cached make room."""
    try:
        limit, used = ((place / f"memory.{name}").read_text() for name in ("max", "current"))
        stat = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - int(used) + int(stat["inactive_file"]))
    except (OSError, ValueError, KeyError):  # no limit ("max"), or none that can be read
        return _UNKNOWN


def readable(count: float) -> str:
    """Bytes as a person says them.

    Example:
        >>> readable(292_147_200)
        '292 MB'
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.3g} {unit}" if count < 100 else f"{count:.0f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def require(what: str, needed: int, device: torch.device, advice: str) -> None:
    """Refuse an allocation that does not fit, saying how large it would be and what would fit.

    Raises:
        MemoryError: ``needed`` bytes are not available.
    """
    free = available(device)
    if needed > free:
        raise MemoryError(
            f"{what} needs {readable(needed)}, {readable(free)} are free on {device}; {advice}"
        )
