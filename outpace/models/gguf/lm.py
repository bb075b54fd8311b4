"""LlamaLM: a GGUF model as the engine's target or draft, run by llama.cpp.

A slot is a llama.cpp sequence, and so is every further branch of a tree: a node belongs to the sequences of all
branches below it. The last bits of a node's logits depend on the order in the cache of the tokens that it sees. So
cells are taken in text order, and a cell that is discarded before later ones stays occupied until the cache is full.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from outpace.core.layout import Layout
from outpace.core.lm import Context, Picked, Reference
from outpace.core.tree import ROOT, Tree
from outpace.errors import CacheFull, UnsupportedModel, UsageError
from outpace.models.gguf.outputs import FetchedLogits, LazyPicks
from outpace.models.gguf.reference import LlamaReference
from outpace.models.gguf.runtime import DUMMY_SEQUENCE, LEAST, BatchEntry, File, Runtime
from outpace.models.memory import CacheKind, MemoryNeed, free
from outpace.models.segment import Segment, SegmentOutput
from outpace.models.slots import SlotLM

SLOTS = 64  # the first sequences are slots
UNREAD = DUMMY_SEQUENCE - 1  # holds discarded cells; the sequences from SLOTS up to it are for branches
CELLS = 4096  # of a new cache


@dataclass
class CachedSlot:
    """The cells and sequences of a slot in the cache."""

    cells: list[int] = field(default_factory=list)  # of its tokens
    nodes: list[int] = field(default_factory=list)  # cells of the nodes of its tree
    sequences: list[int] = field(default_factory=list)  # one sequence of each node
    ends: dict[int, int] = field(default_factory=dict)  # the last node of each of these sequences

    def forget_layout(self) -> None:
        self.nodes, self.sequences, self.ends = [], [], {}


class LlamaLM(SlotLM):
    """A GGUF model that llama.cpp runs."""

    lazy_logits = True
    token_price = 0.7  # llama.cpp reads quantised weights again for nearly every token

    def __init__(self, file: File, cache_limit: int | None = None):
        super().__init__()
        self.file, self.vocab = file, file.vocab
        self.max_length: int = file.model.n_ctx_train
        room = cache_limit if cache_limit is not None else free(torch.device("cpu")) // 2
        self.most = room // file.token_bytes  # cells
        if self.most < LEAST:
            raise UsageError(
                f"the KV cache is too small: {room} bytes hold {self.most} tokens of this model, the minimum is {LEAST}"
            )
        self.runtime = Runtime(file, min(CELLS, self.most))
        self.weights = LlamaWeights(self)
        self.held: list[CachedSlot] = []
        self.end = 0  # cells taken so far
        self._branches = list(range(SLOTS, UNREAD))

    @property
    def identity(self) -> str:  # type: ignore[override]
        model, together = self.file.model, self.file.together
        return f"{model.desc}, {model.size} bytes, {torch.get_num_threads()} threads, calls of {together}"

    def reference(self) -> Reference:
        return LlamaReference(self.file)

    def acquire(self, tokens: list[int], *, context: Context = None, taps: tuple[int, ...] = ()) -> int:
        if taps:
            raise UnsupportedModel("this method needs hidden states, which GGUF models do not provide")
        if len([slot for slot in self.slots if slot.busy]) >= SLOTS:
            raise UsageError(f"a GGUF model runs at most {SLOTS} requests at a time")
        slot = super().acquire(tokens, context=context)
        self.held += [CachedSlot() for _ in range(slot + 1 - len(self.held))]
        return slot

    def release(self, slot: int) -> None:
        if self.slots[slot].layout is not None:
            self.commit(slot, [])
        super().release(slot)

    def reserve(self, segments: Seq[Segment]) -> None:
        need = sum(segment.count for segment in segments)
        # Prompts are split into passes, so only layouts can be too large for one.
        if need > self.file.largest_pass and any(segment.layout is not None for segment in segments):
            raise CacheFull(f"{need} tokens exceed the limit of {self.file.largest_pass} per pass", segments[-1].slot)
        need += self.file.paired  # the dummy token takes a cell as well
        if self.end + need <= self.runtime.cells:
            return
        busy = [i for i, slot in enumerate(self.slots) if slot.busy]
        wanted = need + sum(len(self.slots[i].tokens) for i in busy)
        if wanted > self.most or any(segment.since for segment in segments):
            raise CacheFull(f"{wanted} tokens do not fit into a cache of {self.most}", segments[-1].slot)
        self._renew(busy, wanted)

    def _renew(self, busy: list[int], wanted: int) -> None:
        """Rebuild the cache without discarded cells, larger if needed; idle slots lose their contents."""
        size = self.runtime.cells
        while size < min(2 * wanted, self.most):
            size *= 2
        self._empty(min(size, self.most))
        for index, slot in enumerate(self.slots):
            self.held[index] = CachedSlot()
            slot.forget_layout()
            if index not in busy:
                slot.tokens, slot.length = [], 0
            for first in range(0, len(slot.tokens), self.chunk):
                self._decode([Segment(index, first, slot.tokens[first : first + self.chunk])])

    def _empty(self, cells: int) -> None:
        if cells == self.runtime.cells:
            self.runtime.clear()
        else:
            self.runtime = Runtime(self.file, cells)
        self.end, self._branches = 0, list(range(SLOTS, UNREAD))

    def forward(self, segments: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        try:
            firsts = self._decode(segments)
        except BaseException:  # a part may have been written, so no slot can be trusted
            self._empty(self.runtime.cells)
            for index, slot in enumerate(self.slots):
                slot.pending, slot.tokens, slot.length = slot.tokens + slot.pending, [], 0
                self.held[index] = CachedSlot()
                slot.forget_layout()
            raise
        pairs = zip(segments, firsts, strict=True)
        return [self._output(segment, first + len(segment.pending)) for segment, first in pairs]

    def _output(self, segment: Segment, first: int) -> SegmentOutput:
        if segment.layout is None:
            return SegmentOutput(None, {})
        places = list(range(first, first + len(segment.layout) - segment.since))
        logits, pick = FetchedLogits(self.runtime, places), segment.pick
        if pick is None or pick.temperature or pick.filters:
            return SegmentOutput(logits, {})
        # The largest logit is not fetched, so one that is not finite goes unnoticed here.
        picked = Picked(LazyPicks(self.runtime, places), [0.0] * len(places), [1.0] * len(places))
        return SegmentOutput(logits, {}, picked)

    def _decode(self, segments: Seq[Segment]) -> list[int]:
        """Run a pass and return the index of each segment's first entry."""
        entries: list[BatchEntry] = []
        firsts = []
        for segment in segments:
            firsts.append(len(entries))
            entries += self._entries(segment)
        self.runtime.decode(entries)
        for segment, first in zip(segments, firsts, strict=True):
            cells, fed = [self.end + first + i for i in range(segment.count)], len(segment.pending)
            self.held[segment.slot].cells += cells[:fed]
            self.held[segment.slot].nodes += cells[fed:]
        self.end += len(entries)
        return firsts

    def _entries(self, segment: Segment) -> list[BatchEntry]:
        held, layout = self.held[segment.slot], segment.layout
        entries = [BatchEntry(token, segment.start + i, [segment.slot]) for i, token in enumerate(segment.pending)]
        if layout is None:
            return entries
        tree = _tree(layout)
        if not segment.since:
            held.forget_layout()
        for node in range(segment.since, len(tree)):
            parent = tree.parents[node]
            sequence = held.sequences[parent] if parent >= ROOT else segment.slot
            if parent >= ROOT and held.ends[sequence] != parent:  # another child has continued that sequence
                sequence = self._branch(segment, parent, entries)
            held.sequences.append(sequence)
            held.ends[sequence] = node
            position = segment.start + len(segment.pending) + tree.depths[node]
            entries.append(BatchEntry(tree.tokens[node], position, [sequence], True))
        return entries

    def _branch(self, segment: Segment, parent: int, entries: list[BatchEntry]) -> int:
        """Start a new sequence that holds the text and the path to node `parent`."""
        tree = segment.tree
        if not self._branches:
            raise CacheFull(f"the trees of a GGUF model have at most {UNREAD - SLOTS} branches", segment.slot)
        held, sequence, fed = self.held[segment.slot], self._branches.pop(), len(segment.pending)
        path = tree.path(parent)
        before = [node for node in path if node < segment.since]  # already in the cache, with everything before them
        source = held.sequences[before[-1]] if before else segment.slot
        self.runtime.share(source, sequence, 0, segment.start + (fed + len(before) if before else 0))
        for place in [*range(fed), *(fed + node - segment.since for node in path if node >= segment.since)]:
            entries[place].sequences.append(sequence)
        return sequence

    def commit(self, slot: int, path: list[int]) -> None:
        held = self.held[slot]
        if len(path) < len(held.nodes):
            self._drop(slot, path)
        held.cells += [held.nodes[node] for node in path]
        held.forget_layout()

    def _drop(self, slot: int, path: list[int]) -> None:
        """Discard the nodes that are not on this path; the nodes on it join the slot's own sequence."""
        held, first, kept = self.held[slot], len(self.slots[slot].tokens), set(path)
        depths = self._depths(slot)
        gone = {cell: node for node, cell in enumerate(held.nodes) if node not in kept}
        end = self._tail(gone)
        for cell, node in gone.items():
            if cell < end:
                self.runtime.share(held.sequences[node], UNREAD, first + depths[node], first + depths[node] + 1)
        tip = held.sequences[path[-1]] if path else slot
        same = sum(held.sequences[node] == slot for node in path)
        self.runtime.remove(slot, first + same)
        if tip != slot:
            self.runtime.share(tip, slot, first + same, first + len(path))
        for sequence in set(held.sequences) - {slot}:
            self.runtime.remove(sequence, 0)
            self._branches.append(sequence)
        self.end = end

    def _depths(self, slot: int) -> list[int]:
        layout = self.slots[slot].layout
        assert layout is not None, "its nodes are in the cache"
        return _tree(layout).depths

    def _tail(self, gone: dict[int, int]) -> int:
        """Return where the taken cells end without these."""
        end = self.end
        while end - 1 in gone:
            end -= 1
        return end

    def crop(self, slot: int, length: int) -> int:
        if slot >= len(self.held):
            return length
        held = self.held[slot]
        shared = {cell for other in self.held if other is not held for cell in other.cells}
        gone = {cell: at for at, cell in enumerate(held.cells) if at >= length and cell not in shared}
        end = self._tail(gone)
        unread = [at for cell, at in gone.items() if cell < end]
        if unread:
            self.runtime.share(slot, UNREAD, min(unread), max(unread) + 1)
        self.runtime.remove(slot, length)
        held.cells = held.cells[:length]
        self.end = end
        if not any(other.cells or other.nodes for other in self.held):
            self._empty(self.runtime.cells)
        return length

    def copy(self, source: int, target: int, length: int) -> bool:
        self.held += [CachedSlot() for _ in range(max(source, target) + 1 - len(self.held))]
        self.crop(target, 0)
        self.runtime.share(source, target, 0, length)
        self.held[target].cells = self.held[source].cells[:length]
        return True


def _tree(layout: Layout) -> Tree:
    if not isinstance(layout, Tree):
        raise UnsupportedModel("llama.cpp scores trees only: it cannot run a layout in which tokens see later ones")
    return layout


class LlamaWeights:
    """The weights of a GGUF file, which never change."""

    version = 0

    def __init__(self, lm: LlamaLM):
        self.lm = lm

    def changed(self) -> None:
        self.lm.clear()

    def memory(self, tokens: int, requests: int = 1) -> MemoryNeed:
        file = self.lm.file
        room = self.lm.most * file.token_bytes
        return MemoryNeed(file.model.size, [CacheKind(file.token_bytes)], tokens, requests, room)
