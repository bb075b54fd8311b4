"""Cuts: of each slot, a length to which its text may be cut back after the windows of its layers have moved on."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from outpace.models.cache.group import CacheGroup

WORTH = 256  # tokens; fewer are fed again


class Cut(NamedTuple):
    """A length to which a text may be cut back."""

    length: int
    parted: bool = False  # another text has parted from this one here; else the prompt ends here


class Cuts:
    """What layers with a window would lose of their slots' cuts, set aside. Nothing, in a model without windows."""

    def __init__(self, groups: Seq[CacheGroup]):
        self.groups = [group for group in groups if group.window is not None]
        self.expected: dict[int, Cut] = {}  # by slot

    @staticmethod
    def place(slot: int) -> int:
        """Return the number under which groups hold what is set aside for a slot."""
        return -1 - slot

    def expect(self, slot: int, cut: Cut) -> None:
        """Expect that the slot's text is cut back here, unless a better place is known."""
        known = self.expected.get(slot, Cut(0))
        better = cut.parted or (not known.parted and cut.length > known.length)
        if self.groups and cut.length >= WORTH and better:
            self.drop(slot)
            self.expected[slot] = cut

    def due(self, slot: int, first: int) -> Cut | None:
        """Return the cut to set aside before a span of the slot moves on to entry `first`, if it has not been."""
        cut, place = self.expected.get(slot), self.place(slot)
        if cut is None or self.held(place, cut.length) or not self.held(slot, cut.length):
            return None
        return cut if any(group.reach(cut.length) < first for group in self.groups) else None

    def held(self, place: int, length: int) -> bool:
        """Return whether this slot, or what is set aside under this number, has what a text of this length needs."""
        return all(group.reaches(place, length) for group in self.groups)

    def kept(self, slot: int, length: int) -> int:
        """Return how many of the first `length` tokens of a slot's text can be kept."""
        if self.held(slot, length):
            return length
        cut = min(length, self.expected[slot].length) if slot in self.expected else 0
        return cut if self.held(self.place(slot), cut) else 0

    def drop(self, slot: int) -> None:
        """Drop what is set aside for a slot."""
        for group in self.groups:
            group.forget(self.place(slot))

    def drop_all(self, but: int | None = None) -> bool:
        """Drop what is set aside, but for one number; return whether there was anything."""
        found = {place for group in self.groups for place in group.spans if place < 0 and place != but}
        for place in found:
            self.drop(self.place(place))
        return bool(found)

    def forget(self, slot: int) -> None:
        self.drop(slot)
        self.expected.pop(slot, None)
