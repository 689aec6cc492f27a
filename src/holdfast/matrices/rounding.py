"""Positive semi-definite matrices in half precision.

Rounding entry by entry adds an error with eigenvalues of either sign: directions that are free become
negative, and an optimiser follows them without end. So the diagonal is raised, by the same share everywhere
and by no more than it takes; what is zero stays zero.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["STORED", "check_range", "coarsest", "rounded"]

STORED = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8)
_HALF = 1e-4  # precisions coarser than this; float32 rounds where nobody can go
_MATTERS = 1e-4  # of the largest entry of a diagonal: rounding alone changes what is smaller
_LOST = 0.05  # of the entries that matter may lose half of what they are


def coarse(dtype: torch.dtype) -> bool:
    """Whether rounding to a precision may turn directions that are free into others."""
    return dtype.is_floating_point and torch.finfo(dtype).eps > _HALF


def coarsest(tensors: Iterable[Tensor]) -> float:
    """ε of the coarsest such precision that numbers are stored in; 0 if none is."""
    return max((torch.finfo(t.dtype).eps for t in tensors if coarse(t.dtype)), default=0.0)


def check_range(exact: Tensor, stored: Tensor, dtype: torch.dtype) -> None:
    """Refuse a precision whose numbers do not reach as far as a matrix: float16, where losses are small.

    Args:
        exact: The diagonal of the matrix.
        stored: That of the matrix in that precision.
        dtype: The precision.
    """
    if not bool(exact.isfinite().all()):
        return  # is refused by name elsewhere
    matter = exact > _MATTERS * exact.max()
    lost = (stored[matter] < exact[matter] / 2).sum() / matter.sum().clamp(min=1)
    if not bool(stored.isfinite().all()):
        what = f"the largest numbers of this matrix, whose diagonal has {float(exact.max()):.3g}"
    elif float(lost) > _LOST:
        what = f"the small numbers of this matrix, whose diagonal ends at {float(exact.max()):.3g}"
    else:
        return
    raise ValueError(
        f"{dtype} does not reach to {what}; take torch.bfloat16, which reaches as far as float32"
    )


def rounded(matrices: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Positive semi-definite (…, n, n) in another precision, and still positive semi-definite."""
    if dtype is None or dtype == matrices.dtype or not coarse(dtype):
        return matrices if dtype is None else matrices.to(dtype)
    stored = matrices.to(dtype)
    work = stored.double()  # which knows eigenvalues far below what rounding has changed
    diagonal = work.diagonal(dim1=-2, dim2=-1)
    if not matrices.numel() or not bool(work.isfinite().all()):
        return stored  # what is not finite is refused by name elsewhere
    roots = diagonal.clamp(min=0).sqrt()
    unit = torch.where(roots > 0, 1 / roots, 0.0)
    # the diagonal is one: a share of it is the same number everywhere
    values = torch.linalg.eigvalsh(work * unit.unsqueeze(-1) * unit.unsqueeze(-2))
    noise = 16 * torch.finfo(torch.float64).eps * values[..., -1:].clamp(min=1)  # of these values
    share = torch.where(values[..., :1] < -noise, noise - values[..., :1], 0.0)
    stored = torch.where((unit.unsqueeze(-1) * unit.unsqueeze(-2)) > 0, stored, 0)
    stored.diagonal(dim1=-2, dim2=-1).copy_(_up(diagonal * (1 + share), dtype))
    return stored


def _up(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to what is not smaller; values are not negative."""
    nearest = values.to(dtype)
    more = (values * (1 + torch.finfo(dtype).eps)).to(dtype)
    return torch.where(nearest.to(values.dtype) < values, more, nearest)
