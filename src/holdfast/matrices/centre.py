"""Where the minimum of a penalty with several anchors is."""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["centre"]

# Of conjugate gradients. Where the sum is strong is known after a few steps; with 30 of them the value at the
# centre is a few per cent higher than with all, and each costs two products of all layers.
_TOLERANCE, _STEPS = 1e-6, 50


def centre(
    product: Callable[[Tensor], Tensor], diagonal: Tensor, b: Tensor, share: float
) -> Tensor:
    r"""A c with :math:`\Omega c = b`, in float64: −c is where the minimum is.

    Along directions in which Ω is less than a share s of its diagonal D, c is drawn to zero: there it could
    be so large that what another matrix makes of it is more than it is worth. So :math:`(\Omega + sD)c = b`
    is solved, by conjugate gradients.

    Args:
        product: v ↦ Ωv.
        diagonal: That of Ω.
        b: In the range of Ω, or nearly so.
        share: s, small.
    """
    diagonal = diagonal.double()
    inverse = torch.where(diagonal > 0, 1 / diagonal, 0.0)
    residual = b.double()
    c, z = torch.zeros_like(residual), inverse * residual
    direction, energy = z, residual @ z
    enough = _TOLERANCE**2 * float(energy)
    for _ in range(_STEPS):
        image = product(direction) + share * diagonal * direction
        curvature = direction @ image
        if not (float(energy) > enough and float(curvature) > 0):
            break
        c = c + energy / curvature * direction
        residual = residual - energy / curvature * image
        z, before = inverse * residual, energy
        energy = residual @ z
        direction = z + energy / before * direction
    return c
