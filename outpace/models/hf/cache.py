"""SlotCache: keys and values of many rows, each as long as it needs to be, in tensors that double.

It is handed to a Transformers model as its `past_key_values`. The model gets its new keys and values back as they are;
our attention function writes them and reads the live part of each row, so nothing is gathered or padded.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from outpace.errors import CacheFull
from outpace.models.segment import Segment

FIRST_CAPACITY = 256  # tokens


class SlotCache(Cache):
    """One pair of tensors per row and layer, `[kv heads, capacity, head dim]`, made when the layer is first written."""

    def __init__(self, layers: int, limit: int | None = None):
        super().__init__(layer_class_to_replicate=DynamicLayer)  # the parent's own layers stay empty
        self.keys: list[dict[int, Tensor]] = [{} for _ in range(layers)]  # of each layer, by row
        self.values: list[dict[int, Tensor]] = [{} for _ in range(layers)]
        self.capacity: dict[int, int] = {}  # tokens, by row
        self.limit = limit  # bytes
        self.token_bytes = 0  # of all layers; known once a token was written
        self.kinds: set[tuple[int, int, torch.dtype]] = set()  # kv heads, head dim and dtype of the layers

    @property
    def nbytes(self) -> int:
        return self.token_bytes * sum(self.capacity.values())

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def write(self, layer: int, key: Tensor, value: Tensor, jobs: Seq[Segment]) -> None:
        """Put the new keys and values of every job behind what its row holds."""  # [1, kv heads, tokens, head dim]
        at = 0
        for job in jobs:
            count = len(job.tokens)
            for side, new in ((self.keys[layer], key), (self.values[layer], value)):
                if job.row not in side:
                    side[job.row] = new.new_empty(new.shape[1], self.capacity[job.row], new.shape[3])
                side[job.row][:, job.offset : job.offset + count] = new[0, :, at : at + count]
            at += count

    def measure(self) -> None:
        """Take the size of a token from what has been written."""
        sample = [next(iter(side.values())) for side in (*self.keys, *self.values) if side]
        self.token_bytes = sum(t.shape[0] * t.shape[2] * t.element_size() for t in sample)
        self.kinds = {(t.shape[0], t.shape[2], t.dtype) for t in sample}

    def reserve(self, row: int, length: int) -> None:
        """Have room for `length` tokens in this row; `CacheFull` when they do not fit beside the other rows."""
        held = self.capacity.get(row, 0)
        if length <= held:
            return
        capacity = max(length, 2 * held, FIRST_CAPACITY)
        if self.limit is not None and self.token_bytes:
            most = self.limit // self.token_bytes - sum(self.capacity.values()) + held
            if length > most:
                raise CacheFull(
                    f"the cache has room for {max(most, 0)} tokens of this request and it needs {length}: "
                    f"{length * self.token_bytes / 2**20:.1f} MiB, with a limit of {self.limit / 2**20:.1f} MiB in all",
                    row,
                )
            capacity = min(capacity, most)
        try:
            for side in (*self.keys, *self.values):
                if row in side:
                    side[row] = _grown(side[row], held, capacity)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not isinstance(error, torch.OutOfMemoryError) and "memory" not in str(error):
                raise
            # What grew before the failure is larger than it needs to be, and stays usable.
            megabytes = capacity * self.token_bytes / 2**20
            raise CacheFull(f"no memory for a cache of {capacity} tokens ({megabytes:.1f} MiB)", row) from None
        self.capacity[row] = capacity

    def forget(self, row: int) -> None:
        self.capacity.pop(row, None)
        for side in (*self.keys, *self.values):
            side.pop(row, None)

    def move(self, row: int, start: int, path: list[int], layers: int | None = None) -> None:
        """Gather the entries `start + path` to directly behind `start`, in all layers or in the first ones."""
        if path == list(range(len(path))):
            return
        for side in (*self.keys[:layers], *self.values[:layers]):
            if row in side:
                index = torch.tensor(path, device=side[row].device) + start
                side[row][:, start : start + len(path)] = side[row].index_select(1, index)

    def copy(self, source: int, target: int, length: int) -> None:
        self.reserve(target, length)
        for side in (*self.keys, *self.values):
            if source in side:
                held = side[source]
                side.setdefault(target, held.new_empty(held.shape[0], self.capacity[target], held.shape[2]))
                side[target][:, :length] = held[:, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are always passed explicitly

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0  # masks are ours


def _grown(old: Tensor, held: int, capacity: int) -> Tensor:
    new = old.new_empty(old.shape[0], capacity, old.shape[2])
    new[:, :held] = old[:, :held]
    return new
