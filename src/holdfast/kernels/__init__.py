"""Work on a factor that torch cannot do in one read of it, compiled once per machine.

torch's own product of a bfloat16 matrix and a vector is slower than a float32 one, there is none for int8
rows, and no way to step parameters between two uses of the same columns. The few lines of C beside this
file do. They are built on first use with the system's C compiler into the user's cache folder; without a
compiler, off the CPU, or with ``HOLDFAST_KERNELS=0``, :func:`library` is None and the caller takes the torch
path.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "AdamConstants",
    "adam_step_",
    "add_lift_",
    "add_project_",
    "library",
    "serves",
    "steps",
]

_SOURCE = Path(__file__).with_name("factor.c")
# Sums in any order, so that they are vectorised. Not -ffast-math: with it, loading the file would
# make the whole process treat subnormal numbers as zero.
_SUMS = ("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno")
_PLAIN = ("-O3", *_SUMS, "-shared", "-fPIC")  # for compilers and machines without the rest
_FLAGS = ("-march=native", "-mprefer-vector-width=512", *_PLAIN)
_NAMES = {torch.bfloat16: "bfloat16", torch.int8: "int8"}
_STEPS = {torch.float32: "float32", **_NAMES}  # of the step, which torch has for no precision
_LEAST = 2**16  # columns per thread


@cache
def library() -> ctypes.CDLL | None:
    """The compiled products, or None where they cannot be had."""
    if os.environ.get("HOLDFAST_KERNELS", "1") == "0":
        return None
    try:
        built = ctypes.CDLL(str(_build()))
    except (
        OSError,
        RuntimeError,
        subprocess.SubprocessError,
    ):  # no compiler, no home, a foreign file
        return None
    pointer, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    for name in _NAMES.values():
        project, lift = getattr(built, f"project_{name}"), getattr(built, f"lift_{name}")
        project.argtypes = [pointer, count, count, count, pointer, pointer]
        lift.argtypes = [pointer, count, count, count, pointer, number, pointer]
        project.restype = lift.restype = None
    for name in _STEPS.values():
        step = getattr(built, f"step_{name}")
        step.argtypes = [pointer, count, count, count, *[pointer] * 6, *[number] * 5]
        step.restype = None
    return built


def _build() -> Path:
    """The path of the compiled file; compiled if this machine has not done so yet."""
    compiler = shlex.split(os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or "")
    if not compiler:
        raise FileNotFoundError("no C compiler")
    text = _SOURCE.read_text()
    key = hashlib.sha256("\n".join((text, *compiler, *_FLAGS, _machine())).encode()).hexdigest()
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "holdfast" / "kernels"
    target = folder / f"factor-{key[:16]}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        out = Path(work) / "factor.so"
        for flags in (_FLAGS, _PLAIN):
            done = subprocess.run(
                [*compiler, *flags, str(_SOURCE), "-o", str(out)], capture_output=True, timeout=60
            )
            if done.returncode == 0:
                break
        done.check_returncode()
        os.replace(out, target)  # whole or not at all, also when two processes build at once
    return target


def _machine() -> str:
    """What the compiled file depends on: a home folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def serves(rows: Tensor, *vectors: Tensor) -> bool:
    """Whether the compiled products apply to this factor and these vectors."""
    return (
        rows.dtype in _NAMES
        and rows.device.type == "cpu"
        and rows.stride(1) == 1
        and all(v.dtype == torch.float32 and v.is_contiguous() for v in vectors)
        and not torch.compiler.is_compiling()
        and library() is not None
    )


def steps(rows: Tensor, point: Tensor) -> bool:
    """Whether :func:`adam_step_` applies to this factor and these parameters."""
    return (
        rows.dtype in _STEPS
        and rows.device.type == "cpu"
        and rows.stride(1) == 1
        and point.dtype == torch.float32
        and point.device.type == "cpu"
        and point.is_contiguous()
        and library() is not None
    )


class AdamConstants(NamedTuple):
    """What a step of Adam takes beside its tensors.

    Attributes:
        new1: Weight of the new gradient in the first moment, 1 − β₁.
        new2: Weight of its square in the second moment, 1 − β₂.
        step_size: The learning rate over the bias correction of the first moment.
        root: The root of the bias correction of the second moment.
        epsilon: Added to the root of the second moment.
    """

    new1: float
    new2: float
    step_size: float
    root: float
    epsilon: float


def adam_step_(
    rows: Tensor,
    w: Tensor,
    point: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    constants: AdamConstants,
) -> Tensor:
    """Step ``point`` and both moments with the gradient plus Fᵀ w; returns F (new − old).

    All are without the scale of int8 rows, and ``gradient`` stays as it is.
    """
    kernel = getattr(library(), f"step_{_STEPS[rows.dtype]}")
    vectors, size = (point, gradient, first, second), rows.element_size()

    def part(columns: tuple[int, int], into: Tensor) -> None:
        start, width = columns
        addresses = [vector.data_ptr() + 4 * start for vector in vectors]
        kernel(
            rows.data_ptr() + start * size,
            rows.stride(0),
            len(rows),
            width,
            w.data_ptr(),
            into.data_ptr(),
            *addresses,
            *constants,
        )

    parts = _parts(point.numel())
    moved = w.new_zeros(len(parts), len(rows))
    if len(parts) == 1:
        part(parts[0], moved[0])
    elif parts:
        with ThreadPoolExecutor(len(parts)) as pool:  # ctypes releases the interpreter's lock
            list(pool.map(part, parts, moved))
    return moved.sum(0)


def add_project_(u: Tensor, rows: Tensor, first: int, d: Tensor) -> None:
    """Add F[:, first : first + len(d)] d to u, without the scale of int8 rows."""
    kernel = getattr(library(), f"project_{_NAMES[rows.dtype]}")
    count, stride, size = len(rows), rows.stride(0), rows.element_size()

    def part(columns: tuple[int, int], into: Tensor) -> None:
        start, width = columns
        F, x = rows.data_ptr() + (first + start) * size, d.data_ptr() + 4 * start
        kernel(F, stride, count, width, x, into.data_ptr())

    parts = _parts(d.numel())
    if len(parts) <= 1:
        part((0, d.numel()), u)
        return
    sums = u.new_zeros(len(parts), count)
    with ThreadPoolExecutor(len(parts)) as pool:  # ctypes releases the interpreter's lock
        list(pool.map(part, parts, sums))
    u += sums.sum(0)


def add_lift_(g: Tensor, rows: Tensor, first: int, u: Tensor, alpha: float) -> None:
    """Add alpha · F[:, first : first + len(g)]ᵀ u to g, without the scale of int8 rows."""
    kernel = getattr(library(), f"lift_{_NAMES[rows.dtype]}")
    count, stride, size = len(rows), rows.stride(0), rows.element_size()

    def part(columns: tuple[int, int]) -> None:
        start, width = columns
        F, out = rows.data_ptr() + (first + start) * size, g.data_ptr() + 4 * start
        kernel(F, stride, count, width, u.data_ptr(), alpha, out)

    parts = _parts(g.numel())
    if len(parts) <= 1:
        part((0, g.numel()))
        return
    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(part, parts))


def _parts(n: int) -> list[tuple[int, int]]:
    """Columns shared among torch's threads: starts and widths."""
    threads = max(1, min(torch.get_num_threads(), n // _LEAST))
    width = max(1, -(-n // threads))
    return [(start, min(width, n - start)) for start in range(0, n, width)]
