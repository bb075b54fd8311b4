"""Run-ahead: launch the next decode step before the host has read the current one.

Without drafts the only unknown input is the token just chosen, and that is already on the GPU. So the host's work
overlaps with the step. When the next pass is requested, the step is used if it matches. If a slot continues in another
way, the step is discarded, and what it wrote is overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from outpace.core.lm import Picked
from outpace.core.tree import Tree
from outpace.models.compiled.graph_pass import CapturedPass
from outpace.models.segment import Segment, SegmentOutput
from outpace.sampling.noise_rule import GUMBEL
from outpace.sampling.sampler import Pick

if TYPE_CHECKING:
    from outpace.models.compiled.cuda_graph import GraphRunner


class LastPass(NamedTuple):
    """The last pass whose choices were launched."""

    captured: CapturedPass
    segments: Seq[Segment]
    outputs: list[SegmentOutput]
    chosen: Tensor | None = None  # [FOUND, tokens], on the device; None if the pass chose nothing

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

    def matches(self, segment: Segment) -> bool:
        alike = segment.start == self.segment.start and not segment.pending and segment.pick == self.segment.pick
        return alike and segment.layout is not None and segment.layout.tokens == [self.before.device_tokens[-1]]


@dataclass
class PassAhead:
    """The pass that was launched ahead and has not been requested yet."""

    taps: tuple[int, ...] = ()
    slots: dict[int, SentAhead] = field(default_factory=dict)

    @classmethod
    def after(cls, last: LastPass, segments: Seq[Segment]) -> PassAhead:
        before = {segment.slot: output.picked for segment, output in zip(last.segments, last.outputs, strict=True)}
        found = cls(last.captured.key.taps)
        for segment in segments:
            picked = before[segment.slot]
            assert picked is not None, "segments come from LastPass.next"
            found.slots[segment.slot] = SentAhead(segment, picked)
        return found

    def take(self, segments: Seq[Segment], taps: tuple[int, ...]) -> bool:
        """Return whether the pass was launched for these segments; if not, discard it."""
        sent, self.slots = self.slots, {}
        known = all(segment.slot in sent and sent[segment.slot].matches(segment) for segment in segments)
        return taps == self.taps and known

    def drop(self, slot: int) -> None:
        """Discard the slot's part, because the slot is about to take another text."""
        self.slots.pop(slot, None)


class GraphsAhead:
    """Run-ahead of a model that runs as graphs."""

    def __init__(self, runner: GraphRunner) -> None:
        self.runner = runner
        self.last: LastPass | None = None
        self.sent = PassAhead()
        self._undecided: tuple[CapturedPass, list[Segment]] | None = None  # launched, but its choices wait for edits

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
        return after and self.runner.cache.holds(segment.slot, segment.end)

    def launch(self, last: LastPass, segments: list[Segment]) -> bool:
        captured = self.runner.launch_after(last, segments)
        self.sent = PassAhead.after(last, segments)
        if any(segment.pick is not None and segment.pick.edits for segment in segments):
            self._undecided = captured, segments
        else:
            self.last = self.runner.choices.of_pass(captured, segments)
        return True

    def take(self, segments: Seq[Segment], taps: tuple[int, ...]) -> bool:
        """Return whether the pass of these segments was launched ahead; its choices are launched by now."""
        taken, undecided = self.sent.take(segments, taps), self._undecided
        self._undecided = None
        if taken and undecided is not None:
            captured, sent = undecided
            asked = {segment.slot: segment for segment in segments}
            # A request may have ended meanwhile. Nothing reads its choice, so it needs no edits.
            whole = [asked.get(segment.slot, replace(segment, pick=None)) for segment in sent]
            self.last = self.runner.choices.of_pass(captured, whole)
        return taken

    def outputs(self, segments: Seq[Segment]) -> list[SegmentOutput]:
        """Return the outputs of these segments of the last pass."""
        assert self.last is not None
        found = {own.slot: output for own, output in zip(self.last.segments, self.last.outputs, strict=True)}
        return [found[segment.slot] for segment in segments]
