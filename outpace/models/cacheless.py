"""CachelessLM: the base class of models that keep no cache between passes."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outpace.models.segment import Segment
from outpace.models.slots import SlotLM


class CachelessLM(SlotLM):
    """A model that computes every node from scratch, so it has no cache to move or to crop."""

    def reserve(self, segments: Seq[Segment]) -> None:
        """Do nothing: there is no cache."""

    def commit(self, slot: int, path: list[int]) -> None:
        """Do nothing: there is no cache."""

    def crop(self, slot: int, length: int) -> int:
        return length

    def copy(self, source: int, target: int, length: int) -> bool:
        return True
