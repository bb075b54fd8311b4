"""MTP: a layer like the target's own guesses from its last hidden state, token after token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from outpace.drafting.head_drafter import HeadDrafter


@dataclass(eq=False)
class Mtp(HeadDrafter):
    """A trained layer like the target's own guesses from its last hidden state, as a chain."""

    kind: ClassVar[str] = "mtp"
    head: Any = None  # a folder, or "random"; None: the one that came with us for this model
    depth: int = 4
    nodes: int = 0  # 0: as many as a chain, or a tree of this width, of this depth has
    width: int = 1
