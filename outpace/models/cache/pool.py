"""PoolGroup: the entries of all slots in one tensor, which a compiled pass reads and writes by index."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outpace.models.cache.group import FIRST_CAPACITY, CacheGroup, NoRoom, Span, Want, grained
from outpace.models.gpu_memory import growing

SCRAP = 64  # entries at the front of the pool, where padding tokens are written


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


class PoolGroup(CacheGroup):
    """One tensor `[layers, 2, entries, kv heads, head dim]`; slots are regions of it. On a CUDA device it grows in
    place, elsewhere by copying."""

    scrap = SCRAP

    def __init__(
        self, layers: list[int], window: int | None, shape: CacheShape, device: torch.device, limit: int | None
    ):
        super().__init__(layers, window)
        self.shape = shape._replace(layers=len(layers))
        self.device = device
        self.entry_bytes = self.shape.nbytes
        self.bases: dict[int, int] = {}  # first pool entry of each slot's region
        self.generation = 0  # changes with the size of the pool, which compiled code checks its indices against
        self.memory = growing((len(layers), 2), (shape.heads, shape.dim), shape.dtype, device, limit)
        self.pool = self._empty(SCRAP + FIRST_CAPACITY) if self.memory is None else self.memory.tensor
        self.sides = self._sides()

    @property
    def size(self) -> int:
        return self.pool.shape[2]

    @property
    def nbytes(self) -> int:
        return self.entry_bytes * self.size

    def region(self, slot: int) -> CacheRegion:
        return CacheRegion(self.bases[slot], self.spans[slot].size)

    def origin(self, slot: int) -> int:
        """Return the place of entry 0 of a slot's text, which may lie before the slot's region."""
        return self.bases[slot] - self.spans[slot].first

    def _empty(self, entries: int) -> Tensor:
        # Zeros, because padding tokens must read finite values.
        s = self.shape
        return torch.zeros(s.layers, 2, entries, s.heads, s.dim, dtype=s.dtype, device=self.device)

    def _sides(self) -> list[tuple[Tensor, Tensor]]:
        """Return views of each layer's keys and values, `[entries, kv heads, head dim]`."""
        return [(layer[0], layer[1]) for layer in self.pool]

    def views(self, index: int, slot: int) -> tuple[Tensor, Tensor]:
        region, (keys, values) = self.region(slot), self.sides[index]
        return keys[region.base : region.end].transpose(0, 1), values[region.base : region.end].transpose(0, 1)

    def _place(self, slot: int, want: Want, allowed: int | None) -> None:
        wanted, least = grained(want.size), grained(want.least)
        if allowed is not None:
            most = allowed // self.entry_bytes - self.others(slot)
            if want.least > most:
                raise NoRoom
            wanted = min(wanted, most)
        try:
            self._give(slot, Span(want.first, wanted), allowed)
        except torch.OutOfMemoryError:
            if wanted <= least:
                raise
            self._give(slot, Span(want.first, least), allowed)  # no room to grow into

    def _give(self, slot: int, span: Span, allowed: int | None) -> None:
        base = self._gap(span.size, slot)
        if base is None:
            self._make_gap(slot, span.size, allowed)
            base = self._gap(span.size, slot)
        assert base is not None, "a pool without gaps has enough room"
        self._settle(slot, base, span)

    def _gap(self, size: int, slot: int) -> int | None:
        """Return the start of the first free stretch of this size; the slot's own region counts as free."""
        at = SCRAP
        for region in sorted(self.region(other) for other in self.spans if other != slot):
            if region.base - at >= size:
                return at
            at = region.end
        return at if self.size - at >= size else None

    def _settle(self, slot: int, base: int, span: Span) -> None:
        """Give a slot this span in a region that no other slot uses; what it holds of the span stays."""
        old, origin = self.spans.get(slot), base - span.first
        if old is not None:
            first, end, before = max(old.first, span.first), min(old.end, span.end), self.origin(slot)
            if first < end and before != origin:
                held = self.pool[:, :, before + first : before + end]
                overlapping = abs(before - origin) < end - first
                self.pool[:, :, origin + first : origin + end] = held.clone() if overlapping else held
        self.spans[slot], self.bases[slot] = span, base

    def _make_gap(self, slot: int, wanted: int, allowed: int | None) -> None:
        """Enlarge the pool or close its gaps, so that there is a free stretch of this size for the slot."""
        least = self.others(slot) + wanted
        size = max(least, 2 * self.size)
        if allowed is not None:
            size = max(least, min(size, allowed // self.entry_bytes))
        self._enlarge(size if self.memory is None else least, size)
        if self._gap(wanted, slot) is None:
            self._close_gaps(self.pool, slot)

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
        self._changed(old)

    def _changed(self, old: Tensor) -> None:
        """Take the regions over from another pool, and note that the size has changed."""
        self.generation += int(self.memory is None or self.size != old.shape[2])
        self.sides = self._sides()
        if self.memory is None:
            self._close_gaps(old)

    def expect(self, entries: int, limit: int | None) -> None:
        """Make the pool large enough for this many entries, if there is memory, before anything is captured."""
        if entries > self.size and (limit is None or entries * self.entry_bytes <= limit):
            self._enlarge(self.size, entries)

    def trim(self) -> bool:
        old = self.pool
        if self.used == self.size:
            return False
        if self.memory is None:
            try:
                self.pool = self._empty(self.used)
            except torch.OutOfMemoryError:
                return False
        else:
            self._close_gaps(self.pool)
            self.memory.shrink(self.used)
            self.pool = self.memory.tensor
        self._changed(old)
        return self.size < old.shape[2]

    def _close_gaps(self, old: Tensor, last: int | None = None) -> None:
        """Move all regions, from the old pool or within this one, to its front; the one of slot `last` behind them."""
        slots = sorted(self.spans, key=lambda slot: (slot == last, self.bases[slot]))
        end = [old[:, :, self.region(slot).base : self.region(slot).end].clone() for slot in slots if slot == last]
        at = SCRAP
        for slot in slots:
            region = self.region(slot)
            held = end[0] if slot == last else old[:, :, region.base : region.end]
            if old is not self.pool or at != region.base:
                self.pool[:, :, at : at + region.size] = held.clone() if old is self.pool else held
            self.bases[slot] = at
            at += region.size

    def forget(self, slot: int) -> None:
        super().forget(slot)
        self.bases.pop(slot, None)

    def move(self, slot: int, start: int, path: list[int], layers: int) -> None:
        first = next(i for i, node in enumerate(path) if node != i)
        at = self.origin(slot) + start
        index = torch.tensor(path[first:], device=self.device) + at
        self.pool[:layers, :, at + first : at + len(path)] = self.pool[:layers].index_select(2, index)

    def transfer(self, source: int, target: int, first: int, count: int) -> None:
        here, there = (self.origin(slot) + first for slot in (source, target))
        self.pool[:, :, there : there + count] = self.pool[:, :, here : here + count]
