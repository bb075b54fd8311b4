"""Assisted generation: a smaller model guesses."""

from __future__ import annotations

from dataclasses import dataclass

from outpace.growth import Growing
from outpace.models.base import LM
from outpace.sequence import Sequence


@dataclass(eq=False)
class Draft(Growing):
    """A smaller model with the same vocabulary guesses what comes next."""

    draft: LM
    depth: int = 5
    nodes: int = 0  # 0: as many as a chain, or a tree of this width, of this depth has
    width: int = 1

    def lm(self, seq: Sequence) -> LM:
        return self.draft
