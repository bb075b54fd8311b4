"""Run-ahead: launch the next decode step before the host has read the current one.

Without drafts the only unknown input is the token just chosen, and that is already on the GPU. So the host's work
overlaps with the step. When the next pass is requested, the step is used if it matches. If a slot continues in another
way, the step is discarded, and what it wrote is overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from outpace.core.lm import Picked
from outpace.core.tree import Tree
from outpace.models.compiled.graph_pass import CapturedPass
from outpace.models.segment import Segment, SegmentOutput
from outpace.sampling.noise_rule import GUMBEL
from outpace.sampling.sampler import Pick

if TYPE_CHECKING:
    from outpace.models.compiled.cuda_graph import GraphRunner


class LastPass(NamedTuple):
    """The pass that was launched last."""

    captured: CapturedPass
    segments: Seq[Segment]
    outputs: list[SegmentOutput]

    def next(self, slots: Seq[int], picks: Seq[Pick | None]) -> list[Segment] | None:
        """Return the next pass, one token per slot, given as the place of its choice; None if it is not known yet."""
        places, at = dict[int, int](), 0
        for segment, output in zip(self.segments, self.outputs, strict=True):
            at += segment.count
            picked = output.picked
            if segment.layout is not None and len(segment.layout) == 1 and picked is not None and picked.on_device:
                places[segment.slot] = at - 1
        if any(slot not in places for slot in slots) or any(pick is None or pick.rule != GUMBEL for pick in picks):
            return None
        held = {segment.slot: segment.end for segment in self.segments}
        pairs = zip(slots, picks, strict=True)
        return [Segment(slot, held[slot], [], Tree([places[slot]]), pick=pick) for slot, pick in pairs]


class SentAhead(NamedTuple):
    """A slot's part in a pass that was launched ahead."""

    segment: Segment
    before: Picked  # choices of the pass before, which include the token that was fed
    output: SegmentOutput

    def matches(self, segment: Segment) -> bool:
        alike = segment.start == self.segment.start and not segment.pending and segment.pick == self.segment.pick
        return alike and segment.layout is not None and segment.layout.tokens == [self.before.device_tokens[-1]]


@dataclass
class PassAhead:
    """The pass that was launched ahead and has not been requested yet."""

    taps: tuple[int, ...] = ()
    slots: dict[int, SentAhead] = field(default_factory=dict)

    @classmethod
    def after(cls, last: LastPass, segments: Seq[Segment], outputs: Seq[SegmentOutput]) -> PassAhead:
        before = {segment.slot: output.picked for segment, output in zip(last.segments, last.outputs, strict=True)}
        found = cls(last.captured.key.taps)
        for segment, output in zip(segments, outputs, strict=True):
            picked = before[segment.slot]
            assert picked is not None, "segments come from LastPass.next"
            found.slots[segment.slot] = SentAhead(segment, picked, output)
        return found

    def take(self, segments: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput] | None:
        """Return the outputs for these segments if the pass was launched for them; else discard it and return None."""
        sent, self.slots = self.slots, {}
        known = all(segment.slot in sent and sent[segment.slot].matches(segment) for segment in segments)
        return [sent[segment.slot].output for segment in segments] if taps == self.taps and known else None

    def drop(self, slot: int) -> None:
        """Discard the slot's part, because the slot is about to take another text."""
        self.slots.pop(slot, None)


class GraphsAhead:
    """Run-ahead of a model that runs as graphs."""

    def __init__(self, runner: GraphRunner) -> None:
        self.runner = runner
        self.last: LastPass | None = None
        self.sent = PassAhead()

    def begin(self, slots: Seq[int], picks: Seq[Pick | None]) -> bool:
        last = self.last if self.runner.choices_are_sure() else None
        segments = None if last is None or self.runner.lm.takes_features else last.next(slots, picks)
        if last is None or segments is None or not all(map(self._follows, segments)):
            return False
        try:
            return self.runner.attempt(segments, lambda: self.launch(last, segments)) or False
        except torch.OutOfMemoryError:
            return False  # no memory for its graph; run-ahead is optional

    def _follows(self, segment: Segment) -> bool:
        """Return whether the segment follows the root that the slot scored last, and the slot has room for it."""
        slot = self.runner.lm.slots[segment.slot]
        after = slot.layout is not None and len(slot.layout) == 1 and segment.start == slot.length + 1
        return after and segment.end <= self.runner.cache.capacity[segment.slot]

    def launch(self, last: LastPass, segments: list[Segment]) -> bool:
        self.last = self.runner.launch_after(last, segments)
        self.sent = PassAhead.after(last, segments, self.last.outputs)
        return True
