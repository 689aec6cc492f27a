"""Where the minimum of a penalty with several anchors is."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["centre", "largest_ritz"]

# Each step costs two products of all layers. On the paper's perceptron, two tasks of digits, a hundred take
# off the value 0.88 of what 400 of conjugate gradients do; small networks can afford more.
_FEWEST, _MOST, _WORK = 100, 500, 2**27  # steps, and steps times entries
# Steps towards the largest eigenvalue, and what is added to what they find.
_LOOK, _ABOVE = 12, 1.1


def centre(
    product: Callable[[Tensor], Tensor], diagonal: Tensor, b: Tensor, share: float
) -> Tensor:
    r"""A c with :math:`\Omega c = b`, nearly, in float64: −c is where the minimum is.

    Along directions in which Ω is less than a share s of its diagonal D, c is drawn to zero: there it could
    be so large that what another matrix makes of it is more than it is worth. So :math:`(\Omega + sD)c = b`
    is solved, by k steps of Brakhage's ν-method (ν = 1): along a direction whose eigenvalue beside D is a
    share λ of the largest, about :math:`1/k^2\lambda` is left out, and where that is more than one, all.

    Conjugate gradients come nearer with as many products, but what they do with directions that are not
    reached yet depends on rounding: the same examples in another order gave centres that differed by a per
    cent. Here c is a fixed polynomial of Ω times b.

    Args:
        product: v ↦ Ωv.
        diagonal: That of Ω.
        b: In the range of Ω, or nearly so.
        share: s, small.

    References:
        On ill-posed problems and the method of conjugate gradients (Brakhage, 1987); Regularization of
        Inverse Problems, section 6.3 (Engl, Hanke & Neubauer, 1996)
    """
    diagonal = diagonal.double()
    root = torch.where(diagonal > 0, diagonal.rsqrt(), 0.0)

    def scaled(v: Tensor) -> Tensor:
        return root * product(root * v).double() + share * v

    start = root * b.double()
    norm = float(start.norm())
    if not 0 < norm < math.inf:
        return torch.zeros_like(start)
    steps = min(_MOST, max(_FEWEST, _WORK // len(b)))
    bound = _ABOVE * largest_ritz(scaled, start, _LOOK)
    while bound < math.inf:  # neither beyond all numbers nor none
        found, residual = _solution(scaled, start, bound, steps)
        if float(residual.norm()) <= 1.01 * norm:
            return root * found
        bound *= 2  # there was a larger eigenvalue, along which the steps went astray
    return torch.zeros_like(start)


def _solution(
    product: Callable[[Tensor], Tensor], b: Tensor, bound: float, steps: int
) -> tuple[Tensor, Tensor]:
    """An x near that with A x = b, and b − A x, for eigenvalues of A from 0 to ``bound``."""
    x, residual, step = torch.zeros_like(b), b, torch.zeros_like(b)
    for k in range(1, steps + 1):
        momentum = (k - 1) * (2 * k - 3) * (2 * k + 1) / ((k + 1) * (2 * k + 3) * (2 * k - 1))
        length = 4 * (2 * k + 1) * k / ((k + 1) * (2 * k + 3)) if k > 1 else 6 / 5
        step = momentum * step + length / bound * residual
        x = x + step
        residual = residual - product(step)
    return x, residual


def largest_ritz(
    product: Callable[[Tensor], Tensor], start: Tensor, steps: int, tolerance: float = 0.0
) -> float:
    """The largest eigenvalue as Lanczos sees it; the others would need reorthogonalisation.

    Args:
        product: Of a positive semi-definite matrix with a vector.
        start: Where to look from.
        steps: Products at most.
        tolerance: Relative change between two steps at which to stop.
    """
    v, before, beta, largest = start / start.norm(), torch.zeros_like(start), 0.0, 0.0
    diagonal: list[float] = []
    beside: list[float] = []
    for _ in range(min(steps, len(start))):
        w = product(v).double() - beta * before
        diagonal.append(float(w @ v))
        if not math.isfinite(diagonal[-1]):
            return math.inf
        w -= diagonal[-1] * v
        T = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
        off = torch.tensor(beside, dtype=torch.float64)
        T += torch.diag(off, 1) + torch.diag(off, -1) if beside else 0
        found = float(torch.linalg.eigvalsh(T)[-1])
        beta = float(w.norm())
        if found - largest <= tolerance * found or beta <= max(tolerance, 1e-12) * found:
            return max(found, 0.0)
        largest = found
        beside.append(beta)
        v, before = w / beta, v
    return largest
