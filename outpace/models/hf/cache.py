"""Key-value caches with many slots, each as long as it needs to be.

`SlotCache` has separate tensors for each slot, which double when they are full. `PooledCache` has one tensor for all
slots, so that a compiled pass reads and writes it by index. A Transformers model gets either as its `past_key_values`.
The model gets its new keys and values back unchanged; our attention writes them, and reads the used part of each slot.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from outpace.errors import CacheFull
from outpace.models.gpu_memory import growing
from outpace.models.segment import Segment

FIRST_CAPACITY = 256  # tokens
SCRAP = 64  # entries at the front of the pool, where padding tokens are written
GRAIN = 64  # region sizes are multiples of this


class SlotCache(Cache):
    """A pair of tensors per slot and layer, `[kv heads, capacity, head dim]`, allocated at the layer's first write."""

    def __init__(self, layers: int, limit: int | None = None):
        super().__init__(layer_class_to_replicate=DynamicLayer)  # the parent's own layers stay empty
        self.keys: list[dict[int, Tensor]] = [{} for _ in range(layers)]  # of each layer, by slot
        self.values: list[dict[int, Tensor]] = [{} for _ in range(layers)]
        self.capacity: dict[int, int] = {}  # tokens, by slot
        self.limit = limit  # bytes
        self.token_bytes = 0  # in all layers; known once a token has been written
        self.kinds: set[tuple[int, int, torch.dtype]] = set()  # kv heads, head dim and dtype of the layers

    @property
    def nbytes(self) -> int:
        return self.token_bytes * sum(self.capacity.values())

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def write(self, layer: int, key: Tensor, value: Tensor, segments: Seq[Segment]) -> None:
        """Append every segment's new keys and values to its slot."""  # [1, kv heads, tokens, head dim]
        at = 0
        for segment in segments:
            count = segment.count
            for side, new in ((self.keys[layer], key), (self.values[layer], value)):
                if segment.slot not in side:
                    side[segment.slot] = new.new_empty(new.shape[1], self.capacity[segment.slot], new.shape[3])
                side[segment.slot][:, segment.offset : segment.offset + count] = new[0, :, at : at + count]
            at += count

    def measure(self) -> None:
        """Derive the bytes per token from the tensors written so far."""
        sample = [next(iter(side.values())) for side in (*self.keys, *self.values) if side]
        self.token_bytes = sum(t.shape[0] * t.shape[2] * t.element_size() for t in sample)
        self.kinds = {(t.shape[0], t.shape[2], t.dtype) for t in sample}

    def reserve(self, slot: int, length: int) -> None:
        """Make room for `length` tokens in this slot; raise `CacheFull` if they do not fit beside the other slots."""
        held = self.capacity.get(slot, 0)
        if length <= held:
            return
        capacity = max(length, 2 * held, FIRST_CAPACITY)
        if self.limit is not None and self.token_bytes:
            most = self.limit // self.token_bytes - sum(self.capacity.values()) + held
            if length > most:
                raise CacheFull(
                    f"the KV cache has room for {max(most, 0)} tokens of this request, which needs {length} "
                    f"({length * self.token_bytes / 2**20:.1f} MiB); the limit is {self.limit / 2**20:.1f} MiB in all",
                    slot,
                )
            capacity = min(capacity, most)
        try:
            for side in (*self.keys, *self.values):
                if slot in side:
                    side[slot] = _grown(side[slot], held, capacity)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not isinstance(error, torch.OutOfMemoryError) and "memory" not in str(error):
                raise
            # Tensors that grew before the failure are larger than they need to be, and stay usable.
            megabytes = capacity * self.token_bytes / 2**20
            raise CacheFull(f"out of memory for a KV cache of {capacity} tokens ({megabytes:.1f} MiB)", slot) from None
        self.capacity[slot] = capacity

    def forget(self, slot: int) -> None:
        self.capacity.pop(slot, None)
        for side in (*self.keys, *self.values):
            side.pop(slot, None)

    def move(self, slot: int, start: int, path: list[int], layers: int | None = None) -> None:
        """Gather the entries `start + path` directly after `start`, in all layers or in the first `layers`."""
        if path == list(range(len(path))):
            return
        for side in (*self.keys[:layers], *self.values[:layers]):
            if slot in side:
                index = torch.tensor(path, device=side[slot].device) + start
                side[slot][:, start : start + len(path)] = side[slot].index_select(1, index)

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
        return query_length, 0  # our attention builds the masks


def _grown(old: Tensor, held: int, capacity: int) -> Tensor:
    new = old.new_empty(old.shape[0], capacity, old.shape[2])
    new[:, :held] = old[:, :held]
    return new


class CacheShape(NamedTuple):
    """The shape of one token's entry in the cache."""

    layers: int
    heads: int
    dim: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return 2 * self.layers * self.heads * self.dim * self.dtype.itemsize


class CacheRegion(NamedTuple):
    """The part of the pool that belongs to a slot."""

    base: int
    size: int

    @property
    def end(self) -> int:
        return self.base + self.size


class PooledCache(SlotCache):
    """One tensor `[layers, 2, entries, kv heads, head dim]`; slots are regions of it. On a CUDA device it grows in
    place, elsewhere by copying."""

    def __init__(self, shape: CacheShape, device: torch.device, limit: int | None = None):
        super().__init__(shape.layers, limit)
        self.shape = shape
        self.device = device
        self.token_bytes = shape.nbytes
        self.regions: dict[int, CacheRegion] = {}
        self.generation = 0  # changes with the size of the pool, which compiled code checks its indices against
        self.memory = growing((shape.layers, 2), (shape.heads, shape.dim), shape.dtype, device, limit)
        self.pool = self._empty(SCRAP + FIRST_CAPACITY) if self.memory is None else self.memory.tensor
        self.sides = self._sides()

    @property
    def size(self) -> int:
        return self.pool.shape[2]

    @property
    def nbytes(self) -> int:
        return self.token_bytes * self.size

    def base(self, slot: int) -> int:
        return self.regions[slot].base

    def _empty(self, entries: int) -> Tensor:
        # Zeros, because padding tokens must read finite values.
        s = self.shape
        return torch.zeros(s.layers, 2, entries, s.heads, s.dim, dtype=s.dtype, device=self.device)

    def _sides(self) -> list[tuple[Tensor, Tensor]]:
        """Return views of each layer's keys and values, `[entries, kv heads, head dim]`."""
        return [(layer[0], layer[1]) for layer in self.pool]

    def reserve(self, slot: int, length: int) -> None:
        held = self.capacity.get(slot, 0)
        if length <= held:
            return
        wanted, others = _grained(max(length, 2 * held, FIRST_CAPACITY)), self._others(slot)
        if self.limit is not None:
            most = self.limit // self.token_bytes - SCRAP - others
            if length > most:
                raise self._full(slot, length, most)
            wanted = min(wanted, most)
        try:
            self._place(slot, wanted)
        except CacheFull:
            if wanted <= _grained(length):
                raise
            self._place(slot, _grained(length))  # no room to grow into

    def _others(self, slot: int) -> int:
        return sum(region.size for other, region in self.regions.items() if other != slot)

    def _place(self, slot: int, wanted: int) -> None:
        """Give this slot a region of `wanted` entries."""
        base = self._gap(wanted, slot)
        if base is None:
            self._rebuild(slot, wanted, SCRAP + self._others(slot) + wanted)
        else:
            self._settle(slot, CacheRegion(base, wanted))

    def _full(self, slot: int, length: int, most: int) -> CacheFull:
        assert self.limit is not None
        return CacheFull(
            f"the KV cache has room for {max(most, 0)} tokens of this request, which needs {length} "
            f"({length * self.token_bytes / 2**20:.1f} MiB); the limit is {self.limit / 2**20:.1f} MiB in all",
            slot,
        )

    def _gap(self, size: int, slot: int) -> int | None:
        """Return the start of the first free stretch of this size; the slot's own region counts as free."""
        at = SCRAP
        for region in sorted(region for other, region in self.regions.items() if other != slot):
            if region.base - at >= size:
                return at
            at = region.end
        return at if self.size - at >= size else None

    def _settle(self, slot: int, region: CacheRegion) -> None:
        """Move a slot into this region, which no other slot uses."""
        old = self.regions.get(slot)
        if old is not None and old.base != region.base:
            held = self.pool[:, :, old.base : old.end].clone()
            self.pool[:, :, region.base : region.base + old.size] = held
        self.regions[slot], self.capacity[slot] = region, region.size
        self._show(slot)

    def _rebuild(self, slot: int, wanted: int, least: int) -> None:
        """Enlarge the pool or close its gaps, and give this slot a region of `wanted` entries."""
        size = max(least, 2 * self.size)
        if self.limit is not None:
            size = max(least, min(size, self.limit // self.token_bytes))
        try:
            self._enlarge(size if self.memory is None else least, size)
        except torch.OutOfMemoryError:
            megabytes = least * self.token_bytes / 2**20
            raise CacheFull(f"out of memory for a KV cache of {least} tokens ({megabytes:.1f} MiB)", slot) from None
        base = self._gap(wanted, slot)
        if base is None:
            self._close_gaps(self.pool, slot)
            base = self._gap(wanted, slot)
        assert base is not None, "a pool without gaps has enough room"
        self._settle(slot, CacheRegion(base, wanted))

    def _enlarge(self, least: int, size: int) -> None:
        """Make the pool this large or, where it grows in place, at least `least`."""
        old = self.pool
        if self.memory is None:
            self.pool = self._empty(size)
        else:
            try:
                self.memory.grow(size)
            except torch.OutOfMemoryError:
                self.memory.grow(least)
            self.pool = self.memory.tensor
        self.generation += int(self.memory is None or self.size != old.shape[2])
        self.sides = self._sides()
        if self.memory is None:
            self._close_gaps(old)

    def expect(self, entries: int) -> None:
        """Make the pool large enough for this many entries, if there is memory, before anything is captured."""
        if entries > self.size and (self.limit is None or entries * self.token_bytes <= self.limit):
            self._enlarge(self.size, entries)

    def _close_gaps(self, old: Tensor, last: int | None = None) -> None:
        """Move all regions, from the old pool or within this one, to its front; the one of slot `last` behind them."""
        regions = sorted(self.regions.items(), key=lambda item: (item[0] == last, item[1]))
        end = [old[:, :, region.base : region.end].clone() for slot, region in regions if slot == last]
        at = SCRAP
        for slot, region in regions:
            held = end[0] if slot == last else old[:, :, region.base : region.end]
            if old is not self.pool or at != region.base:
                self.pool[:, :, at : at + region.size] = held.clone() if old is self.pool else held
            self.regions[slot] = CacheRegion(at, region.size)
            at += region.size
            self._show(slot)

    def _show(self, slot: int) -> None:
        """Set the slot's views for eager passes: `[kv heads, entries, head dim]`, for keys and values of each layer."""
        base, size = self.regions[slot]
        for layer in range(self.shape.layers):
            self.keys[layer][slot] = self.pool[layer, 0, base : base + size].transpose(0, 1)
            self.values[layer][slot] = self.pool[layer, 1, base : base + size].transpose(0, 1)

    def forget(self, slot: int) -> None:
        super().forget(slot)
        self.regions.pop(slot, None)

    def move(self, slot: int, start: int, path: list[int], layers: int | None = None) -> None:
        first = next((i for i, node in enumerate(path) if node != i), len(path))
        if first == len(path):
            return
        at = self.base(slot) + start
        index = torch.tensor(path[first:], device=self.device) + at
        self.pool[:layers, :, at + first : at + len(path)] = self.pool[:layers].index_select(2, index)

    def copy(self, source: int, target: int, length: int) -> None:
        if source not in self.regions:
            return
        self.reserve(target, length)
        held = self.pool[:, :, self.base(source) : self.base(source) + length]
        self.pool[:, :, self.base(target) : self.base(target) + length] = held


def _grained(length: int) -> int:
    return -(-length // GRAIN) * GRAIN
