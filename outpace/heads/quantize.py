"""Compress: matrices of a head as int8 with a scale for each row: half of the bytes, and nearly the same guesses."""

from __future__ import annotations

import torch
from torch import Tensor

SCALE = ".scale"  # behind the name of a matrix: what its rows are multiplied by


def compressed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Norms and ids stay as they are: they are small."""
    found = dict[str, Tensor]()
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or not tensor.is_floating_point():
            found[name] = tensor
            continue
        scale = tensor.float().abs().amax(1).clamp(min=1e-12) / 127  # [rows]
        found[name] = (tensor.float() / scale[:, None]).round().to(torch.int8)
        found[name + SCALE] = scale
    return found


def expanded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What was compressed, in float32; everything else as it is."""
    return {
        name: tensor.float() * tensors[name + SCALE][:, None] if name + SCALE in tensors else tensor
        for name, tensor in tensors.items()
        if not (name.endswith(SCALE) and name.removesuffix(SCALE) in tensors)
    }
