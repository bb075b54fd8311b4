"""Plain decoding: an empty tree, so every pass commits one token. The baseline of all other methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outpace.core.drafter import Drafter
from outpace.core.sequence import Sequence
from outpace.core.tree import OFF, Budget, Tree


@dataclass(eq=False)
class Plain(Drafter):
    """One token per pass: the baseline."""

    remembers: ClassVar[bool] = False
    limit = OFF

    def propose(self, seq: Sequence, budget: Budget) -> Tree:
        return Tree([seq.tokens[-1]])
