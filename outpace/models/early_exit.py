"""EarlyExitLM: a draft that is the first layers of a model, with its final norm and head, on the model's own slots.

It writes keys and values where the model itself would write them, and keeps the hidden states after its last layer.
When the model scores the drafted tree, nodes that ran here resume from those states: no layer runs twice for a node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq

import torch
from torch import Tensor

from outpace.core.layout import Layout
from outpace.core.lm import LM, Context, Logits, Picks, Reference, Scores, Weights
from outpace.core.tree import Tree
from outpace.errors import UsageError
from outpace.models.segment import PartialPass, Segment, SegmentOutput
from outpace.models.slots import SlotLM

# A pass of the first N layers, with their output as tap N.
FirstLayers = Callable[[Seq[Segment], int], list[SegmentOutput]]


class EarlyExitLM(LM):
    """A model's first layers as a draft. It uses the model's slots, and only the model can commit what it begins."""

    def __init__(self, whole: SlotLM, count: int, run: FirstLayers):
        assert whole.layers is not None, "an early exit needs a model whose layers can run apart"
        if not 0 < count < whole.layers.count:
            most = whole.layers.count
            raise UsageError(f"a model of {most} layers has exits after 1 to {most - 1}, got {count}")
        self.whole, self.count, self._run = whole, count, run
        self.vocab, self.max_length, self.trees = whole.vocab, whole.max_length, whole.trees
        self.identity = f"{whole.identity}, the first {count}"
        self.worker = whole.worker

    @property
    def weights(self) -> Weights | None:  # type: ignore[override]
        return self.whole.weights

    def reference(self) -> Reference:
        assert self.whole.layers is not None
        return self.whole.layers.reference(range(self.count))

    def acquire(self, tokens: list[int], *, context: Context = None, taps: tuple[int, ...] = ()) -> int:
        return self.whole.acquire(tokens, context=context, taps=taps)

    def release(self, slot: int) -> None:
        self.whole.release(slot)

    def feed(
        self, tokens: Seq[list[int]], slots: Seq[int], limit: int | None = None, defer: bool = False
    ) -> list[bool]:
        return self.whole.feed(tokens, slots, limit, defer)

    def score(
        self, layouts: Seq[Layout], slots: Seq[int], since: Seq[int] | None = None, picks: Picks = None
    ) -> list[Scores]:
        segments = []
        for i, (layout, index) in enumerate(zip(layouts, slots, strict=True)):
            slot, first = self.whole.slots[index], since[i] if since else 0
            if slot.layout is not None:
                self.whole.keep_slot(index, [])  # the new tree overwrites one that was not kept
            if first:  # the pending tokens ran with the first nodes
                segments.append(Segment(index, slot.length + len(slot.pending), [], layout, first))
            else:
                segments.append(Segment(index, slot.length, slot.pending, layout))
        self.whole.reserve(segments)
        outputs = self._run(segments, self.count)
        return [self._begin(segment, output) for segment, output in zip(segments, outputs, strict=True)]

    def _begin(self, segment: Segment, output: SegmentOutput) -> Scores:
        slot, states = self.whole.slots[segment.slot], output.hidden[self.count]
        if segment.since:
            assert slot.begun is not None, "the nodes before `since` must be scored first"
            states = torch.cat([slot.begun.states, states])
        assert isinstance(segment.layout, Tree) and isinstance(output.logits, Tensor)
        slot.begun = PartialPass(segment.layout, self.count, states)
        return Scores(Logits(output.logits))

    def keep(self, paths: Seq[list[int]], slots: Seq[int]) -> None:
        """Do nothing: the model itself commits or drops what was begun."""

    def clear(self) -> None:
        self.whole.clear()
