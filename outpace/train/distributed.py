"""Distributed training: the processes that torchrun starts, or a single one."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from outpace.models.tensor_parallel import processes, torchrun
from outpace.train.data.batches import Batch
from outpace.train.losses import LossResult
from outpace.train.recipes.heads import Recipe

PATIENCE = timedelta(hours=2)  # how long the other processes wait while the first one measures


class Distributed:
    """The process group: this process's rank, the number of processes, and the operations between them."""

    def __init__(self, rank: int = 0, size: int = 1, local: int = 0):
        self.rank, self.size, self.local = rank, size, local

    @classmethod
    def join(cls, device: str = "") -> Distributed:
        """Join the process group that torchrun describes in the environment, or return a group of one."""
        size = torchrun.size()
        if size == 1:
            return cls()
        processes.join(torch.cuda.is_available() and device != "cpu", PATIENCE)
        return cls(dist.get_rank(), size, torchrun.local_rank())

    def leave(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()

    @property
    def first(self) -> bool:
        """Whether this is the process that measures, writes files and shows progress."""
        return self.rank == 0

    def device(self, given: str) -> str | None:
        """Return the device of this process; each process gets its own GPU."""
        shared = self.size > 1 and given in ("", "cuda") and torch.cuda.is_available()
        return f"cuda:{self.local}" if shared else given or None

    def share(self, batch: Batch) -> tuple[Batch, int]:
        """Return this process's texts of a batch, and how many of their tokens count. A process without a text
        computes one that does not count, because every process must take part."""
        texts = slice(self.rank, None, self.size)
        if self.rank < len(batch.tokens):
            ours = Batch(*(tensor[texts] for tensor in batch))
            return ours, int(ours.mask.sum())
        return Batch(*(tensor[:1] for tensor in batch)), 0

    def sum(self, values: Seq[float], device: torch.device) -> list[float]:
        """Sum each of these numbers over all processes."""
        if self.size == 1:
            return list(values)
        together = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(together)
        return together.tolist()

    def broadcast(self, value: Any) -> Any:
        """Broadcast the value of the first process to all."""
        if self.size == 1:
            return value
        held = [value]
        dist.broadcast_object_list(held)
        return held[0]

    def wrap(self, module: TrainedRecipe) -> nn.Module:
        """Wrap the module so that gradients are averaged over all processes."""
        return module if self.size == 1 else DistributedDataParallel(module)

    def without_averaging(self, module: nn.Module, wanted: bool) -> AbstractContextManager[None]:
        """Skip the averaging of gradients if `wanted`: more batches of the same update follow."""
        return module.no_sync() if wanted and isinstance(module, DistributedDataParallel) else nullcontext()  # type: ignore[no-any-return]


class TrainedRecipe(nn.Module):
    """A recipe as the module that DistributedDataParallel wraps."""

    def __init__(self, recipe: Recipe):
        super().__init__()
        self.recipe = recipe
        self.changed = nn.ParameterList(recipe.parameters())

    def forward(self, batch: Batch, step: int, total: int) -> LossResult:
        return self.recipe.loss(batch, step, total)
