"""CachelessLM: base of models that keep nothing of a slot between passes."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outpace.models.segment import Segment
from outpace.models.slots import SlotLM


class CachelessLM(SlotLM):
    """A model that computes every node from scratch, and so has nothing to move or to forget."""

    def reserve(self, segments: Seq[Segment]) -> None:
        """Nothing is kept."""

    def commit(self, slot: int, path: list[int]) -> None:
        """Nothing is kept."""

    def crop(self, slot: int, length: int) -> int:
        return length

    def copy(self, source: int, target: int, length: int) -> bool:
        return True
