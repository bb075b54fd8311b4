"""CacheGroup: keys and values of the layers that keep the same part of each text.

Layers without a window keep all of it. Layers with a sliding window keep a span: what the window reaches, and room to
go on. When the room is used up, the span moves on (docs/internals/cache.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence as Seq
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from outpace.models.memory import CacheKind

FIRST_CAPACITY = 256  # entries
# Spans begin at multiples of this, because kernels read up to this many entries at a time; so do their sizes.
GRAIN = 64
BEHIND = 64  # entries that are kept behind a window, so that a text can be cut back by a few tokens
AHEAD = 1  # entries after a pass, for one that is launched before this one is read
# A span moves on by this fraction of its window at a time, or by this many entries: more than a draft reserves ahead.
ROOM, LEAST_ROOM = 4, 192


G = TypeVar("G", bound="CacheGroup")


class NoRoom(Exception):
    """The entries of a slot do not fit beside those of the others."""


class Span(NamedTuple):
    """The entries of a text that a slot has room for."""

    first: int
    size: int

    @property
    def end(self) -> int:
        return self.first + self.size


class Want(NamedTuple):
    """The span that a slot should get: these entries at least, `size` of them if there is memory."""

    first: int
    least: int
    size: int


class CacheGroup(ABC):
    """The layers with the same window. A subclass says where the entries of their spans are."""

    scrap = 0  # entries that belong to no slot

    def __init__(self, layers: Seq[int], window: int | None):
        self.layers, self.window = list(layers), window
        self.entry_bytes = 0  # of a token in all these layers
        self.spans: dict[int, Span] = {}  # by slot
        self.wide: set[int] = set()  # slots with a longer span, for a chunk of a prompt or for many nodes
        self.most: int | None = None  # entries of the other spans
        if window is not None:
            self.room = grained(max(window // ROOM, LEAST_ROOM))
            self.most = grained(window + BEHIND + GRAIN) + self.room

    @property
    def kind(self) -> CacheKind:
        return CacheKind(self.entry_bytes, self.most)

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the memory of this group."""

    @abstractmethod
    def _place(self, slot: int, want: Want, allowed: int | None) -> None:
        """Do what `place` says."""

    def allocate(self, index: int, slot: int, key: Tensor, value: Tensor) -> None:  # noqa: B027 (a pool has memory)
        """Allocate memory for a slot in one of the layers, if it has none there, for entries like these."""
        # [1, kv heads, tokens, head dim] twice

    @abstractmethod
    def views(self, index: int, slot: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a slot in one of the layers, as many as its span has room for."""
        # [kv heads, size, head dim] twice

    @abstractmethod
    def transfer(self, source: int, target: int, first: int, count: int) -> None:
        """Copy entries of a text between slots."""

    @abstractmethod
    def move(self, slot: int, start: int, path: list[int], layers: int) -> None:
        """Gather the entries `start + path` directly after `start`, in the first `layers` layers of this group."""

    def place(self, slot: int, want: Want, allowed: int | None) -> None:
        """Give a slot this span; what it holds of it stays. Raise `NoRoom` if the group would exceed these bytes."""
        self._place(slot, want, allowed)
        self.wide.discard(slot)
        if self.most is not None and want.least > self.most:
            self.wide.add(slot)

    def forget(self, slot: int) -> None:
        self.spans.pop(slot, None)
        self.wide.discard(slot)

    @property
    def used(self) -> int:
        """Entries of all slots."""
        return self.scrap + sum(span.size for span in self.spans.values())

    def others(self, slot: int) -> int:
        """Return the entries that are not this slot's."""
        return self.used - self.spans.get(slot, Span(0, 0)).size

    def trim(self) -> bool:
        """Give back memory that no slot uses; return whether there was any."""
        return False

    def reach(self, length: int) -> int:
        """Return the first entry that a token after `length` tokens sees."""
        return 0 if self.window is None else max(0, length - self.window + 1)

    def reaches(self, slot: int, length: int) -> bool:
        """Return whether a slot could be cut back to this length."""
        return slot in self.spans and self.spans[slot].first <= self.reach(length)

    def covers(self, slot: int, want: Want) -> bool:
        """Return whether a slot has at least this span."""
        span = self.spans.get(slot)
        return span is not None and span.first == want.first and span.size >= want.least

    def want(self, slot: int, start: int, end: int) -> Want | None:
        """Return a span for the entries from `start` to `end` and all that they see, or None if the slot has it."""
        span = self.spans.get(slot, Span(0, 0))
        assert span.first <= self.reach(start), "a slot is cut back no further than it can be"
        if self.most is None:
            return self._sized(0, end, span.size) if end > span.end else None
        first = max(span.first, self._first(start))
        narrows = slot in self.wide and end + AHEAD - first <= self.most
        return self._sized(first, end + AHEAD, span.size) if narrows or end + AHEAD > span.end else None

    def copied(self, source: int, target: int, length: int) -> Want:
        """Return the span that a slot needs to take over the first `length` tokens of another slot's text."""
        first = max(self.spans[source].first, self._first(length))
        return self._sized(first, length, self.spans.get(target, Span(0, 0)).size)

    def _first(self, start: int) -> int:
        """Return where a span begins that is needed from `start` tokens on."""
        return max(0, self.reach(start) - BEHIND) // GRAIN * GRAIN

    def _sized(self, first: int, end: int, held: int) -> Want:
        least = end - first
        size = max(least, 2 * held, FIRST_CAPACITY)
        if self.most is not None:
            size = least + self.room // 2 if least > self.most else self.most if first else min(size, self.most)
        return Want(first, least, size)


class SlotGroup(CacheGroup):
    """Each slot has a pair of tensors per layer, allocated at the layer's first write."""

    def __init__(self, layers: Seq[int], window: int | None):
        super().__init__(layers, window)
        self.keys: list[dict[int, Tensor]] = [{} for _ in layers]  # of each layer, by slot
        self.values: list[dict[int, Tensor]] = [{} for _ in layers]

    @property
    def nbytes(self) -> int:
        return self.entry_bytes * self.used

    def _sides(self, layers: int | None = None) -> list[dict[int, Tensor]]:
        return [*self.keys[:layers], *self.values[:layers]]

    def allocate(self, index: int, slot: int, key: Tensor, value: Tensor) -> None:
        for side, like in ((self.keys[index], key), (self.values[index], value)):
            if slot not in side:
                side[slot] = like.new_empty(like.shape[1], self.spans[slot].size, like.shape[3])

    def views(self, index: int, slot: int) -> tuple[Tensor, Tensor]:
        return self.keys[index][slot], self.values[index][slot]

    def _place(self, slot: int, want: Want, allowed: int | None) -> None:
        size = want.size
        if allowed is not None:
            most = allowed // self.entry_bytes - self.others(slot)
            if want.least > most:
                raise NoRoom
            size = min(size, most)
        old, new = self.spans.get(slot), Span(want.first, size)
        if old is not None:
            sides = [side for side in self._sides() if slot in side]
            moved = ((side, _moved(side[slot], old, new)) for side in sides)
            # Tensors that grew before memory ran out stay usable; those that moved on would not be.
            for side, tensor in moved if old.first == new.first else list(moved):
                side[slot] = tensor
        self.spans[slot] = new

    def forget(self, slot: int) -> None:
        super().forget(slot)
        for side in self._sides():
            side.pop(slot, None)

    def move(self, slot: int, start: int, path: list[int], layers: int) -> None:
        at = start - self.spans[slot].first
        for side in self._sides(layers):
            if slot in side:
                index = torch.tensor(path, device=side[slot].device) + at
                side[slot][:, at : at + len(path)] = side[slot].index_select(1, index)

    def transfer(self, source: int, target: int, first: int, count: int) -> None:
        here, there = (first - self.spans[slot].first for slot in (source, target))
        for side in self._sides():
            if source in side:
                held = side[source]
                if target not in side:
                    side[target] = held.new_empty(held.shape[0], self.spans[target].size, held.shape[2])
                side[target][:, there : there + count] = held[:, here : here + count]


def _moved(held: Tensor, old: Span, new: Span) -> Tensor:  # [kv heads, old size, dim] -> [kv heads, new size, dim]
    made = held.new_empty(held.shape[0], new.size, held.shape[2])
    first, end = max(old.first, new.first), min(old.end, new.end)
    if first < end:
        made[:, first - new.first : end - new.first] = held[:, first - old.first : end - old.first]
    return made


def grained(count: int) -> int:
    return -(-count // GRAIN) * GRAIN


def by_window(windows: Seq[int | None], make: Callable[[list[int], int | None], G]) -> list[G]:
    """Make a group for each window that layers have."""
    groups = {window: [i for i, other in enumerate(windows) if other == window] for window in windows}
    return [make(layers, window) for window, layers in groups.items()]
