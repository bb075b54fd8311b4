"""Numerical agreement between two ways to compute the same logits: only rounding may differ."""

from __future__ import annotations

import torch
from torch import Tensor


def apart(ours: Tensor, theirs: Tensor) -> float:
    """Return the distance between two results, relative to the second; logits that both exclude do not count."""
    ours, theirs = ours.float(), theirs.float()
    excluded = theirs.isinf() & (ours == theirs)
    return float((ours - theirs).masked_fill(excluded, 0).norm() / theirs.masked_fill(excluded, 0).norm())


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest distance that rounding alone can cause in this precision."""
    return max(0.01, 8 * torch.finfo(dtype).eps)


def agree(ours: Tensor, theirs: Tensor) -> bool:
    return apart(ours, theirs) <= tolerance(theirs.dtype)
