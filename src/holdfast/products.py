r"""Products of float32 matrices by the faster of the two libraries that torch brings.

torch multiplies float32 matrices with MKL, which leaves the 512-bit registers of AMD's processors unused.
oneDNN, which torch has for convolutions, uses them, in the same precision: 2.2 × as fast on a Zen 5 core at
the shapes of the paper's perceptron.
"""

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["add_product_", "linear", "multiply_", "wide"]

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
    """Write A B into ``out``; both may be transposed views."""
    if _applies(a, b.t()):
        out.copy_(linear(a, b.t()))
    else:
        torch.mm(a, b, out=out)


def add_product_(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Add A B to ``out``; both may be transposed views."""
    if _applies(a, b.t()):
        out.add_(linear(a, b.t()))
    else:
        out.addmm_(a, b)


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
