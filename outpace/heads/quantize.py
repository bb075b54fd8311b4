"""int8 compression of a head's matrices, with a scale per row: half the bytes, and nearly the same draft tokens."""

from __future__ import annotations

import torch
from torch import Tensor

SCALE = ".scale"  # suffix of a matrix's name, for the factors of its rows


def compressed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Compress all matrices; norms and ids stay as they are, since they are small."""
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
    """Restore compressed matrices in float32; everything else stays as it is."""
    return {
        name: tensor.float() * tensors[name + SCALE][:, None] if name + SCALE in tensors else tensor
        for name, tensor in tensors.items()
        if not (name.endswith(SCALE) and name.removesuffix(SCALE) in tensors)
    }
