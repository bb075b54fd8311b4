"""Key-value caches with many slots, each as long as it needs to be.

`SlotCache` has separate tensors for each slot, which double when they are full. `PooledCache` has one tensor for all
slots, so that a compiled pass reads and writes it by index; two, if some layers have a sliding window. A Transformers
model gets either as its `past_key_values`. The model gets its new keys and values back unchanged; our attention writes
them, and reads the used part of each slot.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from outpace.errors import CacheFull
from outpace.models.cache.cuts import Cut, Cuts
from outpace.models.cache.group import CacheGroup, NoRoom, SlotGroup, Want, by_window
from outpace.models.cache.pool import CacheShape, PoolGroup
from outpace.models.memory import CacheKind, bytes_of, tokens_within
from outpace.models.segment import Segment


class SlotCache(Cache):
    """The keys and values of all layers: a group of layers for each window."""

    groups: Seq[CacheGroup]

    def __init__(self, windows: Seq[int | None], limit: int | None = None):
        super().__init__(layer_class_to_replicate=DynamicLayer)  # the parent's own layers stay empty
        self.groups = self._made(windows)
        self.limit = limit  # bytes
        self.layer_bytes = [0] * len(windows)  # of a token; known once one has been written
        self.kinds: set[tuple[int, int, torch.dtype]] = set()  # kv heads, head dim and dtype of the layers
        self.cuts = Cuts(self.groups)
        places = {layer: (group, i) for group in self.groups for i, layer in enumerate(group.layers)}
        self._places = [places[layer] for layer in range(len(windows))]  # of each layer: its group, its index there
        self.group_of = [self.groups.index(group) for group, _ in self._places]  # of each layer

    def _made(self, windows: Seq[int | None]) -> Seq[CacheGroup]:
        return by_window(windows, SlotGroup)

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self.groups)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token that all layers keep."""
        return sum(self.layer_bytes)

    @property
    def memory_kinds(self) -> tuple[CacheKind, ...]:
        return tuple(group.kind for group in self.groups)

    def spare_bytes(self, chunk: int) -> int:
        """Return the bytes that no text has: of scrap entries and, beside windows, of a chunk of a prompt."""
        return sum(g.entry_bytes * (g.scrap + (0 if g.window is None else chunk)) for g in self.groups)

    @property
    def wide(self) -> set[int]:
        """Slots that have room for a chunk of a prompt beside a window."""
        return {slot for group in self.groups for slot in group.wide}

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def write(self, layer: int, key: Tensor, value: Tensor, segments: Seq[Segment]) -> None:
        """Append every segment's new keys and values to its slot."""  # [1, kv heads, tokens, head dim]
        (group, index), at = self._places[layer], 0
        for segment in segments:
            count = segment.count
            group.allocate(index, segment.slot, key, value)
            first = segment.offset - group.spans[segment.slot].first
            for side, new in zip(group.views(index, segment.slot), (key, value), strict=True):
                side[:, first : first + count] = new[0, :, at : at + count]
            at += count

    def read(self, layer: int, slot: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of these entries of a slot's text."""  # [kv heads, entries, head dim] twice
        group, index = self._places[layer]
        keys, values = group.views(index, slot)
        start = group.spans[slot].first
        return keys[:, first - start : end - start], values[:, first - start : end - start]

    def measure(self) -> None:
        """Derive the bytes per token of each layer from the tensors written so far."""
        samples = [group.views(index, next(iter(group.spans))) for group, index in self._places]
        self.kinds = {(t.shape[0], t.shape[2], t.dtype) for sides in samples for t in sides}
        self.set_layer_bytes([sum(t.shape[0] * t.shape[2] * t.element_size() for t in sides) for sides in samples])

    def set_layer_bytes(self, sizes: list[int]) -> None:
        self.layer_bytes = sizes
        for group in self.groups:
            group.entry_bytes = sum(sizes[layer] for layer in group.layers)

    def reserve(self, slot: int, start: int, end: int, soon: int | None = None) -> None:
        """Make room for a slot's entries from `start` to `end`; raise `CacheFull` if they do not fit.

        The entries up to `start` are a text that is not cut back before the next pass. `soon` is the end of that pass,
        if it is not `end`: a window has moved on before the passes after it.
        """
        for group in self.groups:
            want = group.want(slot, start, end if soon is None or group.window is None else min(end, soon))
            if want is None:
                continue
            if (cut := self.cuts.due(slot, want.first)) is not None:
                self._set_aside(slot, cut)
            self._place(group, slot, want, end)

    def _place(self, group: CacheGroup, slot: int, want: Want, length: int, source: int | None = None) -> None:
        """Give a slot, for a text of this length, a span in the layers of a group; `source` must not be dropped."""
        if self.limit is not None and self.token_bytes:  # what one group does not need, the others may
            want = want._replace(size=max(want.least, min(want.size, self._left(slot))))
        for last in (False, True):
            try:
                return group.place(slot, want, self._allowed(group))
            except (NoRoom, RuntimeError) as error:
                if not _is_memory(error):
                    raise
                if last or not self._free(group, source):
                    raise CacheFull(self._full(slot, length, isinstance(error, NoRoom)), slot) from None

    def _free(self, group: CacheGroup, source: int | None) -> bool:
        """Free memory for a group that no text needs; return whether there was any."""
        dropped = self.cuts.drop_all(but=source)
        trimmed = [other.trim() for other in self.groups if other is not group]
        return dropped or any(trimmed)

    def _allowed(self, group: CacheGroup) -> int | None:
        """Return the bytes that a group may take beside the others."""
        if self.limit is None or not self.token_bytes:
            return None
        return self.limit - sum(other.nbytes for other in self.groups if other is not group)

    def _left(self, slot: int) -> int:
        """Return how many tokens a slot's text may have within the limit."""
        assert self.limit is not None
        left = self.limit - sum(group.entry_bytes * group.others(slot) for group in self.groups)
        return tokens_within(self.memory_kinds, left)

    def _full(self, slot: int, length: int, limited: bool) -> str:
        """Say why so many tokens do not fit into a slot."""
        megabytes = f"{bytes_of(self.memory_kinds, length) / 2**20:.1f} MiB"
        if not limited or self.limit is None:
            return f"out of memory for a KV cache of {length} tokens ({megabytes})"
        most = max(0, min(self._left(slot), length - 1))
        return (
            f"the KV cache has room for {most} tokens of this request, which needs {length} ({megabytes}); "
            f"the limit is {self.limit / 2**20:.1f} MiB in all"
        )

    def _set_aside(self, slot: int, cut: Cut) -> None:
        """Keep what the slot's text needs when it is cut back here, if there is memory."""
        place = self.cuts.place(slot)
        try:
            for group in self.cuts.groups:
                want = group.copied(slot, place, cut.length)
                group.place(place, want._replace(size=want.least), self._allowed(group))
                group.transfer(slot, place, want.first, want.least)
        except (NoRoom, RuntimeError) as error:
            if not _is_memory(error):
                raise
            self.cuts.drop(slot)

    def crop(self, slot: int, length: int) -> int:
        """Cut a slot's text back to `length` tokens, or to as many as can be kept; return how many."""
        kept = self.cuts.kept(slot, length)
        if kept and not self.cuts.held(slot, kept):
            try:
                self._take(slot, slot, kept, self.cuts.groups)
                self.cuts.expected[slot] = self.cuts.expected[slot]._replace(length=kept)
            except CacheFull:
                kept = 0
        elif kept and slot in self.cuts.expected and self.cuts.expected[slot].length > kept:
            self.cuts.forget(slot)
        if not kept:
            self.forget(slot)
        return kept

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a text, of which a slot can keep all, to another slot."""
        self.cuts.forget(target)
        self._take(source, target, length, self.groups)

    def _take(self, source: int, target: int, length: int, groups: Seq[CacheGroup]) -> None:
        """Let a slot take over what another slot, or what was set aside for it, holds of a text of this length."""
        place = source if source != target and self.cuts.held(source, length) else self.cuts.place(source)
        for group in groups:
            origin = source if group.window is None else place
            want = group.copied(origin, target, length)
            if not group.covers(target, want):
                self._place(group, target, want, length, place)
            group.transfer(origin, target, want.first, want.least)

    def forget(self, slot: int) -> None:
        self.cuts.forget(slot)
        for group in self.groups:
            group.forget(slot)

    def move(self, slot: int, start: int, path: list[int], layers: int | None = None) -> None:
        """Gather the entries `start + path` directly after `start`, in all layers or in the first `layers`."""
        if path == list(range(len(path))):
            return
        for group in self.groups:
            count = len(group.layers) if layers is None else sum(layer < layers for layer in group.layers)
            if count:
                group.move(slot, start, path, count)

    def holds(self, slot: int, end: int) -> bool:
        """Return whether a slot has room for its entries up to this one."""
        return all(slot in group.spans and end <= group.spans[slot].end for group in self.groups)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are always passed explicitly

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0  # our attention builds the masks


def _is_memory(error: Exception) -> bool:
    return isinstance(error, NoRoom | torch.OutOfMemoryError) or "memory" in str(error)


class PooledCache(SlotCache):
    """A pool for each group of layers; slots are regions of it."""

    groups: Seq[PoolGroup]

    def __init__(self, windows: Seq[int | None], shape: CacheShape, device: torch.device, limit: int | None = None):
        self._pool = shape, device, limit
        super().__init__(windows, limit)
        self.kinds = {(shape.heads, shape.dim, shape.dtype)}
        self.set_layer_bytes([shape._replace(layers=1).nbytes] * len(windows))

    def _made(self, windows: Seq[int | None]) -> Seq[PoolGroup]:
        shape, device, limit = self._pool
        return by_window(windows, lambda layers, window: PoolGroup(layers, window, shape, device, limit))

    @property
    def generation(self) -> int:
        """A number that changes when one of the pools does."""
        return sum(group.generation for group in self.groups)

    @property
    def sides(self) -> list[tuple[Tensor, Tensor]]:
        """Views of each layer's keys and values, `[entries, kv heads, head dim]`."""
        return [group.sides[index] for group, index in self._places]  # type: ignore[attr-defined]

    def origins(self, slot: int) -> list[int]:
        """Return the place of entry 0 of a slot's text in the pool of each group."""
        return [group.origin(slot) for group in self.groups]

    def expect(self, entries: int) -> None:
        """Make the pools large enough for this many entries, if there is memory, before anything is captured."""
        for group in self.groups:
            group.expect(entries, self._allowed(group))
