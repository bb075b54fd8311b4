"""EAGLE-3: a head of one layer guesses from three of the target's hidden states, as a tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from outpace.drafting.head_drafter import HeadDrafter


@dataclass(eq=False)
class Eagle3(HeadDrafter):
    """A trained head of one layer guesses from hidden states of the target, as a tree."""

    kind: ClassVar[str] = "eagle3"
    head: Any = None  # a folder, or "random"; None: the one that came with us for this model
    depth: int = 6
    nodes: int = 32
    width: int = 6
