"""Memory: what a model and its cache take, and what is there, known before a run."""

from __future__ import annotations

import os

import torch
from torch import nn


def weights(model: nn.Module) -> int:
    """Bytes of all tensors of a model; those that are shared count once."""
    held = {tensor.untyped_storage().data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


def free(device: torch.device) -> int:
    """Bytes that a tensor on this device could still have."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    try:
        with open("/proc/meminfo") as lines:
            found = {name: int(value.split()[0]) * 1024 for name, value in (line.split(":") for line in lines)}
        return found["MemAvailable"]
    except (OSError, KeyError, ValueError):  # not Linux: all the memory that the machine has
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
