"""HeadLM: a trained head that drafts one token per step, run as a model that takes a hidden state beside each token.

A slot holds the text from its second token on, since the target's state of token t - 1 enters with token t. Draft
tokens have no such state yet, so the head's own output state at their parent enters with them. These entries are
discarded when the text continues: committed tokens are fed again, with the target's own states.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from outpace.core.lm import Context
from outpace.models.hf.lm import TransformersLM
from outpace.models.hf.module import STATE
from outpace.models.segment import Segment, SegmentOutput, common_prefix


class HeadLM(TransformersLM):
    """A model that takes hidden states as a second input, with any runner."""

    before = 1  # leading tokens of the text that are not in the slot

    def __init__(self, *given: Any):
        super().__init__(*given)
        self._features: dict[int, tuple[int, Tensor]] = {}  # slot -> position of the first, [positions, hidden]

    @classmethod
    def of_head(cls, head: PreTrainedModel) -> HeadLM:
        lm = cls.fitting(head)
        assert lm is not None, "the layers of a head attend through our function"
        return lm

    def acquire(self, tokens: list[int], *, context: Context = None, taps: tuple[int, ...] = ()) -> int:
        return super().acquire(tokens[1:], context=context, taps=STATE)

    def known(self, slot: int, text: list[int]) -> int:
        """Return how many of the target's states for this text the slot no longer needs."""
        return common_prefix(self.slots[slot].tokens, text[1:])

    def take_features(self, slot: int, first: int, features: Tensor) -> None:
        """Set the states that enter with the slot's tokens from position `first` on."""  # [positions, hidden]
        self._features[slot] = first, features

    def _begin(self, wanted: list[int], index: int) -> list[int]:
        if self.slots[index].layout is not None:
            self.keep_slot(index, [])
        return super()._begin(wanted[1:], index)

    def _adopt(self, index: int, tokens: list[int]) -> None:
        """Copy nothing: the entries depend on the states that entered, too."""

    def forward(self, segments: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        return super().forward([replace(segment, features=self._entering(segment)) for segment in segments], taps)

    def _entering(self, segment: Segment) -> Tensor | None:  # [tokens of the segment, hidden]
        if segment.slot not in self._features:
            return None
        first, features = self._features[segment.slot]
        at = segment.start - first
        if segment.layout is None:
            return features[at : at + len(segment.pending)]
        if not segment.since:
            assert len(segment.layout) == 1, "a new tree has only its root"
            return features[at : at + len(segment.pending) + 1]
        states = self.slots[segment.slot].provisional
        assert states is not None, "nodes are scored after their parents"
        return states[segment.tree.parents[segment.since :]]

    def release(self, slot: int) -> None:
        self._features.pop(slot, None)
        super().release(slot)
