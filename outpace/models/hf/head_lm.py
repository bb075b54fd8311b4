"""HeadLM: a trained head that is asked token by token, as a model: it takes a state beside each token.

A slot holds the text from its second token on: what enters with token t is the target's state of token t - 1. Draft
tokens have no such state yet, so what the head itself left at their parent enters with them. That is forgotten when the
text goes on: committed tokens are fed again, with the target's own states.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from outpace.core.lm import Context
from outpace.models.hf.lm import TransformersLM
from outpace.models.segment import Segment, SegmentOutput, common_prefix

STATE = (-1,)  # the tap of what a head feeds back


class HeadLM(TransformersLM):
    """A model that takes states; its runner may be any."""

    before = 1  # tokens of the text that are not in the slot

    def __init__(self, *given: Any):
        super().__init__(*given)
        self._features: dict[int, tuple[int, Tensor]] = {}  # slot -> place of the first, [places, hidden]

    @classmethod
    def of_head(cls, head: PreTrainedModel) -> HeadLM:
        lm = cls.fitting(head)
        assert lm is not None, "a head is made of layers that attend through our function"
        return lm

    def acquire(self, tokens: list[int], *, context: Context = None, taps: tuple[int, ...] = ()) -> int:
        return super().acquire(tokens[1:], context=context, taps=STATE)

    def known(self, slot: int, text: list[int]) -> int:
        """How many of the target's states for this text the slot needs no more."""
        return common_prefix(self.slots[slot].tokens, text[1:])

    def take_features(self, slot: int, first: int, features: Tensor) -> None:
        """Take the states that enter with the tokens of the slot, from place `first` on."""  # [places, hidden]
        self._features[slot] = first, features

    def _feed(self, wanted: list[int], index: int, limit: int | None = None) -> int:
        if self.slots[index].layout is not None:
            self.keep_slot(index, [])
        return super()._feed(wanted[1:], index, limit)

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
            assert len(segment.layout) == 1, "a tree grows from its root"
            return features[at : at + len(segment.pending) + 1]
        left = self.slots[segment.slot].provisional
        assert left is not None, "nodes are scored after their parents"
        return left[segment.tree.parents[segment.since :]]

    def release(self, slot: int) -> None:
        self._features.pop(slot, None)
        super().release(slot)
