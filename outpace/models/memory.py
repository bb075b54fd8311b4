"""Memory accounting before a run: the bytes that a model takes and the bytes that are available."""

from __future__ import annotations

import os

import torch
from torch import nn

from outpace.models.quantized import parts, tensors


def weights(model: nn.Module) -> int:
    """Return the bytes of all tensors of a model, counting shared storage once."""
    plain = [part for tensor in tensors(model) for part in parts(tensor)]
    held = {part.untyped_storage().data_ptr(): part for part in plain}
    return sum(part.untyped_storage().nbytes() for part in held.values())


def free(device: torch.device) -> int:
    """Return the bytes that can still be allocated on this device."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    try:
        with open("/proc/meminfo") as lines:
            found = {name: int(value.split()[0]) * 1024 for name, value in (line.split(":") for line in lines)}
        return found["MemAvailable"]
    except (OSError, KeyError, ValueError):  # not Linux: take the total memory of the machine
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
