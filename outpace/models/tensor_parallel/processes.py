"""The processes that share a model: how they find each other, and how they put their results together.

Partial sums are gathered and added in the order of the ranks. An all-reduce would add them in an order that depends on
the backend and on the size of the tensor, and then a text would depend on what it is batched with. This way every
process gets the same bits, and the sums make no token depend on the other tokens of its pass.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from outpace.errors import OutpaceError, UsageError
from outpace.models.tensor_parallel import torchrun

PATIENCE = timedelta(minutes=10)  # how long a process waits for another one's part of a layer


class ProcessLost(OutpaceError):
    """A process that shares the model has ended or does not answer, so no pass can run any more."""

    def __init__(self) -> None:
        super().__init__(
            "a process of this tensor-parallel model has ended or does not answer: start all of them again"
        )


def join(on_gpu: bool, patience: timedelta) -> None:
    """Join the group of processes that torchrun describes in the environment. On GPUs, each process takes its own."""
    if on_gpu:
        local, there = torchrun.local_rank(), torch.cuda.device_count()
        if local >= there:
            raise UsageError(f"process {local} on this machine has no GPU: start at most {there} processes")
        torch.cuda.set_device(local)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=patience)


def gathered(part: Tensor) -> Tensor:
    """Return the tensors of all processes, which have the same shape, in the order of their ranks."""  # [size, *shape]
    found = part.new_empty(dist.get_world_size(), *part.shape)
    try:
        dist.all_gather(list(found), part.contiguous())
    except RuntimeError as error:  # what every backend raises
        raise ProcessLost from error
    return found


def summed(part: Tensor) -> Tensor:
    """Return the sum of the tensors of all processes, added in the order of their ranks."""
    first, *others = gathered(part)
    total = first.float() if part.dtype.itemsize < 4 else first
    for other in others:
        total = total + other
    return total.to(part.dtype)


def gathered_columns(part: Tensor, width: int) -> Tensor:
    """Join the last dimensions of all processes' tensors to one of this width; the last ones may be narrower."""
    each = -(-width // dist.get_world_size())
    parts = gathered(torch.nn.functional.pad(part, (0, each - part.shape[-1])))
    return torch.cat(list(parts), dim=-1)[..., :width]
