"""Positive semi-definite matrices in half precision.

Rounding entry by entry adds an error with eigenvalues of either sign: directions that are free become
negative, and an optimiser follows them without end. So the diagonal is raised, by the same share everywhere
and by no more than it takes; what is zero stays zero.
"""

import torch
from torch import Tensor

__all__ = ["rounded"]

_HALF = 1e-4  # precisions coarser than this; float32 rounds where nobody can go


def rounded(matrices: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Positive semi-definite (…, n, n) in another precision, and still positive semi-definite."""
    if dtype is None or dtype == matrices.dtype or torch.finfo(dtype).eps < _HALF:
        return matrices if dtype is None else matrices.to(dtype)
    stored = matrices.to(dtype)
    work = stored.float()
    diagonal = work.diagonal(dim1=-2, dim2=-1)
    if not matrices.numel() or not bool(work.isfinite().all()):
        return stored  # what is not finite is refused by name elsewhere
    roots = diagonal.clamp(min=0).sqrt()
    unit = torch.where(roots > 0, 1 / roots, 0.0)
    # the diagonal is one: a share of it is the same number everywhere
    values = torch.linalg.eigvalsh(work * unit.unsqueeze(-1) * unit.unsqueeze(-2))
    noise = 16 * torch.finfo(torch.float32).eps * values[..., -1:].clamp(min=1)  # of these values
    share = torch.where(values[..., :1] < -noise, noise - values[..., :1], 0.0)
    stored = torch.where((unit.unsqueeze(-1) * unit.unsqueeze(-2)) > 0, stored, 0)
    stored.diagonal(dim1=-2, dim2=-1).copy_(_up(diagonal * (1 + share), dtype))
    return stored


def _up(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to what is not smaller; values are not negative."""
    nearest = values.to(dtype)
    more = (values * (1 + torch.finfo(dtype).eps)).to(dtype)
    return torch.where(nearest.to(values.dtype) < values, more, nearest)
