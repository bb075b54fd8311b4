"""PoolCache: keys and values of all rows in one tensor, so that a pass reads and writes them by index.

Every row owns a region of the pool. Compiled passes see one tensor per layer and side, of a size that changes rarely;
the eager ones see the same memory as views, one per row. Accepted nodes move in all layers at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outpace.errors import CacheFull
from outpace.models.hf.cache import FIRST_CAPACITY, SlotCache

SCRAP = 64  # entries at the front where the tokens that only fill up a pass are written
GRAIN = 64  # regions are multiples of this


class CacheShape(NamedTuple):
    """What one token takes in the cache."""

    layers: int
    heads: int
    dim: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return 2 * self.layers * self.heads * self.dim * self.dtype.itemsize


class CacheRegion(NamedTuple):
    """Where a row lives in the pool."""

    base: int
    size: int

    @property
    def end(self) -> int:
        return self.base + self.size


class PooledCache(SlotCache):
    """One tensor `[layers, 2, entries, kv heads, head dim]`; rows are regions of it."""

    def __init__(self, shape: CacheShape, device: torch.device, limit: int | None = None):
        super().__init__(shape.layers, limit)
        self.shape = shape
        self.device = device
        self.token_bytes = shape.nbytes
        self.regions: dict[int, CacheRegion] = {}
        self.generation = 0  # changes when the pool is another tensor
        self.pool = self._empty(SCRAP + FIRST_CAPACITY)
        self.sides = self._sides()

    @property
    def size(self) -> int:
        return self.pool.shape[2]

    @property
    def nbytes(self) -> int:
        return self.token_bytes * self.size

    def base(self, row: int) -> int:
        return self.regions[row].base

    def _empty(self, entries: int) -> Tensor:
        # Zeros: what a padded row reads must be finite.
        s = self.shape
        return torch.zeros(s.layers, 2, entries, s.heads, s.dim, dtype=s.dtype, device=self.device)

    def _sides(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer, `[entries, kv heads, head dim]`."""
        return [(layer[0], layer[1]) for layer in self.pool]

    def reserve(self, row: int, length: int) -> None:
        held = self.capacity.get(row, 0)
        if length <= held:
            return
        wanted = -(-max(length, 2 * held, FIRST_CAPACITY) // GRAIN) * GRAIN
        others = sum(region.size for other, region in self.regions.items() if other != row)
        if self.limit is not None:
            most = self.limit // self.token_bytes - SCRAP - others
            if length > most:
                raise self._full(row, length, most)
            wanted = min(wanted, most)
        base = self._gap(wanted, row)
        if base is None:
            self._rebuild(row, wanted, SCRAP + others + wanted)
        else:
            self._settle(row, CacheRegion(base, wanted))

    def _full(self, row: int, length: int, most: int) -> CacheFull:
        assert self.limit is not None
        return CacheFull(
            f"the cache has room for {max(most, 0)} tokens of this request and it needs {length}: "
            f"{length * self.token_bytes / 2**20:.1f} MiB, with a limit of {self.limit / 2**20:.1f} MiB in all",
            row,
        )

    def _gap(self, size: int, row: int) -> int | None:
        """The first free stretch of this size; the row's own region counts as free."""
        at = SCRAP
        for region in sorted(region for other, region in self.regions.items() if other != row):
            if region.base - at >= size:
                return at
            at = region.end
        return at if self.size - at >= size else None

    def _settle(self, row: int, region: CacheRegion) -> None:
        """Move a row into this region, which no other row has."""
        old = self.regions.get(row)
        if old is not None and old.base != region.base:
            held = self.pool[:, :, old.base : old.end].clone()
            self.pool[:, :, region.base : region.base + old.size] = held
        self.regions[row], self.capacity[row] = region, region.size
        self._show(row)

    def _rebuild(self, row: int, wanted: int, least: int) -> None:
        """A larger pool, or the same one without gaps, with a region of `wanted` entries for this row."""
        size = max(least, 2 * self.size)
        if self.limit is not None:
            size = max(least, min(size, self.limit // self.token_bytes))
        try:
            self._resize(size)
        except torch.OutOfMemoryError:
            megabytes = size * self.token_bytes / 2**20
            raise CacheFull(f"no memory for a cache of {size} tokens ({megabytes:.1f} MiB)", row) from None
        base = self._gap(wanted, row)
        assert base is not None, "a pool without gaps has the room"
        self._settle(row, CacheRegion(base, wanted))

    def _resize(self, size: int) -> None:
        old, self.pool = self.pool, self._empty(size)
        self.sides = self._sides()
        self.generation += 1
        at = SCRAP
        for row, region in sorted(self.regions.items(), key=lambda item: item[1]):
            self.pool[:, :, at : at + region.size] = old[:, :, region.base : region.end]
            self.regions[row] = CacheRegion(at, region.size)
            at += region.size
            self._show(row)

    def _show(self, row: int) -> None:
        """The row as the eager passes see it: a view per layer and side, `[kv heads, entries, head dim]`."""
        base, size = self.regions[row]
        for layer in range(self.shape.layers):
            self.keys[layer][row] = self.pool[layer, 0, base : base + size].transpose(0, 1)
            self.values[layer][row] = self.pool[layer, 1, base : base + size].transpose(0, 1)

    def forget(self, row: int) -> None:
        super().forget(row)
        self.regions.pop(row, None)

    def move(self, row: int, start: int, path: list[int], layers: int | None = None) -> None:
        first = next((i for i, node in enumerate(path) if node != i), len(path))
        if first == len(path):
            return
        at = self.base(row) + start
        index = torch.tensor(path[first:], device=self.device) + at
        self.pool[:layers, :, at + first : at + len(path)] = self.pool[:layers].index_select(2, index)

    def copy(self, source: int, target: int, length: int) -> None:
        if source not in self.regions:
            return
        self.reserve(target, length)
        held = self.pool[:, :, self.base(source) : self.base(source) + length]
        self.pool[:, :, self.base(target) : self.base(target) + length] = held
