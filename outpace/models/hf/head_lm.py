"""HeadLM: a trained head that drafts one token per step, run as a model that takes a hidden state beside each token.

A slot holds the text from its second token on, since the target's state of token t - 1 enters with token t. Draft
tokens have no such state yet, so the head's own output state at their parent enters with them. These entries are
discarded when the text continues: committed tokens are fed again, with the target's own states. Only a draft's root has
the target's state, and stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outpace.core.lm import Context
from outpace.models.cache.cuts import Cut
from outpace.models.hf.lm import TransformersLM
from outpace.models.hf.module import STATE
from outpace.models.segment import Segment, SegmentOutput, common_prefix


class HeadLM(TransformersLM):
    """A model that takes hidden states as a second input, with any runner."""

    before = 1  # leading tokens of the text that are not in the slot

    def __init__(self, *given: Any):
        super().__init__(*given)
        self._states: dict[int, tuple[int, Tensor]] = {}  # slot -> position of the first, [positions, taps * hidden]
        # Fuses the target's states into the one that enters: [tokens, taps * hidden] -> [tokens, hidden].
        self.fuse: Callable[[Tensor], Tensor] = self.model.fuse  # type: ignore[assignment]

    @classmethod
    def of_head(cls, head: PreTrainedModel) -> HeadLM:
        lm = cls.fitting(head)
        assert lm is not None, "the layers of a head attend through our function"
        return lm

    def acquire(self, tokens: list[int], *, context: Context = None, taps: tuple[int, ...] = ()) -> int:
        return super().acquire(tokens[1:], context=context, taps=STATE)

    def known(self, slot: int, text: list[int]) -> int:
        """Return how many of the target's states for this text the slot no longer needs."""
        held = self.slots[slot]
        root = [] if held.layout is None else held.layout.tokens[:1]
        return self.reach(slot, common_prefix(held.tokens + root, text[1:]))

    def take_states(self, slot: int, first: int, states: Tensor) -> None:
        """Set the target's states that enter with the slot's tokens from position `first` on."""
        self._states[slot] = first, states  # [positions, taps * hidden]

    def _begin(self, wanted: list[int], index: int) -> list[int]:
        self.slots[index].scored = min(self.slots[index].scored, 1)  # the root's state is the target's own
        return super()._begin(wanted[1:], index)

    def _adopt(self, index: int, tokens: list[int]) -> None:
        """Copy nothing: the entries depend on the states that entered, too."""

    def _expect_cut(self, slot: int, cut: Cut) -> None:
        """Expect none: what is set aside may be dropped between `known` and the pass that relies on it."""

    def forward(self, segments: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        return super().forward([replace(segment, features=self._entering(segment)) for segment in segments], taps)

    @torch.no_grad()
    def _entering(self, segment: Segment) -> Tensor | None:  # [tokens of the segment, hidden]
        if segment.since:
            states = self.slots[segment.slot].provisional
            assert states is not None, "nodes are scored after their parents"
            return states[segment.tree.parents[segment.since :]]
        states = self.with_states(segment).features
        return None if states is None else self.fuse(states)

    def with_states(self, segment: Segment) -> Segment:
        if segment.slot not in self._states:
            return segment
        assert segment.layout is None or len(segment.layout) == 1, "a new tree has only its root"
        first, states = self._states[segment.slot]
        at = segment.start - first
        return replace(segment, features=states[at : at + segment.count])

    def release(self, slot: int) -> None:
        self._states.pop(slot, None)
        super().release(slot)
