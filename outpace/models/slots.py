"""SlotLM: the base class of the runtimes. It manages KV cache slots, prefix reuse and provisional nodes.

A runtime implements the forward pass (`forward`) and the operations on its cache (`reserve`, `commit`, `crop`, `copy`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq

import torch

from outpace.core.layout import Layout
from outpace.core.lm import LM, Context, Logits, Picks, Scores
from outpace.errors import UsageError
from outpace.models.segment import Segment, SegmentOutput, Slot, StateLog, common_prefix, log_states
from outpace.threads.worker import Worker

CHUNK = 512  # prompt tokens per pass; bounds the memory of a long prefill
MAX_DEFERRED = 16  # up to this many pending tokens get no pass of their own: they run together with the next layout


class SlotLM(LM):
    """A model with slots. It has no optional capabilities; a runtime adds them."""

    chunk: int = CHUNK
    # True: prompts of several slots share passes. Then their bits depend on each other, as a library's products round a
    # row by its place; False: a prompt runs in the same pieces, whatever other requests there are.
    shares_prompts: bool = False

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.worker = Worker()

    @abstractmethod
    def forward(self, segments: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        """Run one forward pass and write its keys and values to the cache."""

    @abstractmethod
    def reserve(self, segments: Seq[Segment]) -> None:
        """Make room in the cache for these segments, or raise `CacheFull`."""

    @abstractmethod
    def commit(self, slot: int, path: list[int]) -> None:
        """Move the cache entries of the nodes in `path` to directly after the slot's tokens."""

    @abstractmethod
    def crop(self, slot: int, length: int) -> int:
        """Drop the tokens after the first `length`; return how many tokens could be kept."""

    def reach(self, slot: int, length: int) -> int:
        """Return how many tokens `crop` would keep: fewer than `length` where layers have lost what lies before."""
        return length

    @abstractmethod
    def copy(self, source: int, target: int, length: int) -> bool:
        """Copy the state of the first `length` tokens between slots; return False if this model cannot."""

    def entries(self, tokens: int) -> int:
        """Return the cache entries that the first `tokens` of a text take; a model that packs tokens takes fewer."""
        return tokens

    def _known(self, index: int, tokens: list[int], context: Context, taps: tuple[int, ...]) -> int:
        """Return how many of these tokens a slot can keep, under the same context and taps."""
        slot = self.slots[index]
        if not slot.tokens or (slot.context, slot.taps) != (context, taps):
            return 0
        return self.reach(index, common_prefix(slot.tokens, tokens))

    def acquire(self, tokens: list[int], *, context: Context = None, taps: tuple[int, ...] = ()) -> int:
        if all(slot.busy for slot in self.slots):
            self.slots.append(Slot())
        known = [self._known(i, tokens, context, taps) for i in range(len(self.slots))]
        free = [i for i, slot in enumerate(self.slots) if not slot.busy]
        best = max(free, key=lambda i: (known[i], -len(self.slots[i].tokens)))
        source = max(range(len(known)), key=known.__getitem__)
        if known[source] > known[best] and self.copy(source, best, known[source]):
            self._truncate(best, self.slots[source], known[source])
        elif (self.slots[best].context, self.slots[best].taps) != (context, taps):
            self._truncate(best, self.slots[best], self.crop(best, 0))
        slot = self.slots[best]
        slot.context, slot.taps, slot.busy, slot.computed = context, taps, True, 0
        return best

    def _adopt(self, index: int, tokens: list[int]) -> None:
        """Copy a longer prefix from another slot, which may have been fed since this one was acquired."""
        slot = self.slots[index]
        if slot.layout is not None or len(tokens) <= len(slot.tokens) + MAX_DEFERRED:
            return
        known = [self._known(i, tokens, slot.context, slot.taps) for i in range(len(self.slots))]
        source = max(range(len(known)), key=known.__getitem__)
        if known[source] > known[index] + MAX_DEFERRED and self.copy(source, index, known[source]):
            self._truncate(index, self.slots[source], known[source])

    def _truncate(self, index: int, source: Slot, length: int) -> None:
        hidden = source.hidden.since(0)
        slot = self.slots[index]
        slot.tokens, slot.length = source.tokens[:length], self.entries(length)
        slot.hidden = StateLog([] if hidden is None else [hidden[:length]])

    def release(self, slot: int) -> None:
        left = self.slots[slot]
        left.busy, left.pending = False, []
        left.forget_layout()

    def reused(self, slot: int) -> int:
        held = self.slots[slot]
        return max(0, len(held.tokens) - held.computed)

    def clear(self) -> None:
        for index, slot in enumerate(self.slots):
            if not slot.busy:
                self._truncate(index, slot, self.crop(index, 0))

    def feed(
        self, tokens: Seq[list[int]], slots: Seq[int], limit: int | None = None, defer: bool = False
    ) -> list[bool]:
        texts = {index: self._begin(wanted, index) for wanted, index in zip(tokens, slots, strict=True)}
        left = limit
        while left is None or left > 0:
            if defer and self.late_prompts and (ready := self._ready(texts)):
                return [index in ready for index in slots]
            segments = self._prompt_pass(texts, left)
            if not segments:
                break
            self._run(segments)
            left = None if left is None else left - sum(len(segment.pending) for segment in segments)
        return [len(self.slots[index].pending) <= MAX_DEFERRED for index in slots]

    def _ready(self, texts: dict[int, list[int]]) -> list[int]:
        """Return the first slots whose pending tokens fit into one pass."""
        ready, room = list[int](), self.chunk
        for index, text in texts.items():
            self._adopt_pending(index, text)
            room -= len(self.slots[index].pending)
            if room < 0:
                break
            if not any(self._shares_with(index, text, other, texts[other]) for other in ready):
                ready.append(index)
        return ready

    def _adopt_pending(self, index: int, text: list[int]) -> None:
        """Take what another slot holds of a slot's pending tokens by now."""
        slot = self.slots[index]
        if len(slot.pending) > MAX_DEFERRED:
            self._adopt(index, text)
            slot.pending = text[len(slot.tokens) :]

    def catch_up(self, slots: Seq[int]) -> None:
        """Run the pending tokens of slots, which otherwise run with the next layout."""
        late = [(index, self.slots[index]) for index in slots if self.slots[index].pending]
        if late:
            self._run([Segment(index, slot.length, slot.pending) for index, slot in late])

    def _begin(self, wanted: list[int], index: int) -> list[int]:
        """Keep the common prefix of a slot, and mark the rest as pending; return the text in terms of the slot."""
        slot = self.slots[index]
        slot.begun = None
        self._adopt(index, wanted)
        held = slot.tokens + slot.pending
        common = common_prefix(held, wanted)
        if slot.layout is not None:
            drafted = slot.layout.walk(wanted[common:]) if common == len(held) else []
            self.keep_slot(index, [node for node in drafted if node < slot.scored])
            common = common_prefix(slot.tokens, wanted)
        if common < len(slot.tokens):
            self._truncate(index, slot, self.crop(index, common))
        slot.pending = wanted[len(slot.tokens) :]
        if len(slot.pending) > MAX_DEFERRED:
            self.reserve([Segment(index, slot.length, slot.pending)])  # room for all tokens before any runs
        return wanted

    def _prompt_pass(self, texts: dict[int, list[int]], limit: int | None) -> list[Segment]:
        """Return the next pass over pending tokens, up to a chunk. A short remainder runs with the next layout.

        A text that begins like one of this pass waits for it, because the common part can then be copied.
        """
        room = self.chunk if limit is None or not self.shares_prompts else min(self.chunk, limit)
        segments = list[Segment]()
        for index, text in texts.items():
            slot = self.slots[index]
            self._adopt_pending(index, text)
            if room <= 0 or (segments and not self.shares_prompts):
                break
            waits = any(self._shares_with(index, text, other.slot, texts[other.slot]) for other in segments)
            if len(slot.pending) > MAX_DEFERRED and not waits:
                segments.append(Segment(index, slot.length, slot.pending[:room]))
                room -= len(segments[-1].pending)
        return segments

    def _shares_with(self, index: int, text: list[int], other: int, others: list[int]) -> bool:
        """Return whether another slot is about to hold more of this text than this slot does."""
        mine, theirs = self.slots[index], self.slots[other]
        same = (mine.context, mine.taps) == (theirs.context, theirs.taps)
        return same and common_prefix(text, others) > len(mine.tokens) + MAX_DEFERRED

    def score(
        self, layouts: Seq[Layout], slots: Seq[int], since: Seq[int] | None = None, picks: Picks = None
    ) -> list[Scores]:
        segments = []
        for i, (layout, index) in enumerate(zip(layouts, slots, strict=True)):
            slot = self.slots[index]
            if not self.trees and not layout.is_chain:
                raise UsageError("this model can only score chains; give its tree a width of 1")
            if slot.layout is not None and not (since and since[i]):
                self.keep_slot(index, [])  # the new layout overwrites one that was not kept
            pick = picks[i] if picks else None
            segments.append(Segment(index, slot.length, slot.pending, layout, since[i] if since else 0, pick))
        if not any(self.slots[index].taps for index in slots):  # a resumed pass has no states of the first layers
            segments = [
                segment.resume(begun) if (begun := self.slots[segment.slot].begun) else segment for segment in segments
            ]
        return self._run(segments)

    def _run(self, segments: list[Segment]) -> list[Scores]:
        self.reserve(segments)
        taps = tuple(sorted({tap for segment in segments for tap in self.slots[segment.slot].taps}))
        for segment in segments:
            self.slots[segment.slot].begun = None  # consumed, even if the pass fails
        outputs = self.forward(segments, taps)
        found = [self._take(segment, output) for segment, output in zip(segments, outputs, strict=True)]
        return [scores for scores in found if scores is not None]

    def _take(self, segment: Segment, output: SegmentOutput) -> Scores | None:
        """Update a slot after a pass; return the scores of its layout, if it has one."""
        slot, fed, hidden = self.slots[segment.slot], len(segment.pending), None
        slot.tokens.extend(segment.pending)
        slot.computed += fed
        slot.length = self.entries(len(slot.tokens))
        slot.pending = slot.pending[fed:]
        if slot.taps:
            states = output.states(slot.taps)
            slot.hidden.append(states[:fed])
            hidden = states[fed:]
            old = slot.provisional if segment.since else None
            slot.provisional = hidden if old is None else torch.cat([old, hidden])
        if segment.layout is None:
            return None
        slot.layout, slot.scored = segment.layout, len(segment.layout)
        slot.order = None if segment.resumed is None else segment.resumed.order
        assert output.logits is not None
        logits = output.logits if isinstance(output.logits, Logits) else Logits(output.logits)
        return Scores(logits if slot.order is None else Logits(logits.all()[slot.order]), hidden, output.picked)

    def keep(self, paths: Seq[list[int]], slots: Seq[int]) -> None:
        ordered = []
        for path, index in zip(paths, slots, strict=True):
            order = self.slots[index].order
            ordered.append(path if order is None else [order[node] for node in path])
        log_states([self.slots[index] for index in slots], ordered)
        for path, index in zip(ordered, slots, strict=True):
            self.keep_slot(index, path)

    def keep_slot(self, index: int, path: list[int]) -> None:
        slot = self.slots[index]
        assert slot.layout is not None, "keep() must follow score()"
        self.commit(index, path)
        slot.tokens.extend(slot.layout.tokens[node] for node in path)
        slot.length = self.entries(len(slot.tokens))
        log_states([slot], [path])
        slot.forget_layout()
