r"""Products of matrices by the fastest road that torch has on this processor.

torch multiplies float32 matrices with MKL, which leaves the 512-bit registers of AMD's processors unused.
oneDNN, which torch has for convolutions, uses them, in the same precision: 2.2 × as fast on a Zen 5 core at
the shapes of the paper's perceptron.

Matrices that are stored in bfloat16 are multiplied as such where the processor has an instruction for it:
the other factor is rounded likewise, sums are in float32.
"""

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["add_product_", "linear", "multiply_", "narrow", "precision", "wide"]

_LEAST = 2**21  # multiplications; below, the way into oneDNN costs more than it gains


@cache
def wide() -> bool:
    """Whether this processor has registers that torch's own product does not use."""
    if (
        torch.backends.cpu.get_cpu_capability() != "AVX512"
        or not torch.backends.mkldnn.is_available()
    ):
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """The product x Wᵀ; either may be a transposed view."""
    if _applies(x, weight):
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        return product
    return x @ weight.t()


def multiply_(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Write A B into ``out``, which may be of a higher precision; all may be batches and transposed views."""
    if _applies(a, b.mT):
        out.copy_(linear(a, b.mT))
    elif a.dtype is out.dtype:
        torch.matmul(a, b, out=out)
    else:
        out.copy_(a @ b)


def add_product_(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Add A B to ``out``, which may be of a higher precision; all may be batches and transposed views."""
    if _applies(a, b.mT):
        out.add_(linear(a, b.mT))
    elif a.dtype is not out.dtype:
        out.add_(a @ b)
    elif out.ndim == 3:
        out.baddbmm_(a, b)
    else:
        out.addmm_(a, b)


@cache
def narrow() -> bool:
    """Whether this processor multiplies bfloat16 numbers by itself, at twice the speed of float32."""
    known = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return known is not None and torch.backends.mkldnn.is_available() and bool(known())


def precision(stored: Tensor, x: Tensor, multiplications: int) -> torch.dtype:
    """In which precision ``stored`` is multiplied with ``x``: bfloat16 where it gains, else that of ``x``."""
    gains = (
        stored.dtype is torch.bfloat16
        and x.dtype is torch.float32
        and multiplications >= _LEAST
        and x.device.type == "cpu"
        and narrow()
    )
    return torch.bfloat16 if gains else x.dtype


def _applies(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN multiplies these faster."""
    return (
        x.dtype is torch.float32
        and weight.dtype is torch.float32
        and x.ndim == 2
        and weight.ndim == 2
        and len(x) * x.shape[1] * len(weight) >= _LEAST
        and x.device.type == "cpu"
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        and not torch.compiler.is_compiling()
        and wide()
    )
