"""EAGLE-3: a one-layer head drafts a tree from three of the target's hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from outpace.drafting.head_drafter import HeadDrafter


@dataclass(eq=False)
class Eagle3(HeadDrafter):
    """A trained layer drafts a tree from hidden states."""

    kind: ClassVar[str] = "eagle3"
    head: Any = None  # a folder, or "random"; None: the head that ships for this model
    depth: int = 6
    nodes: int = 32
    width: int = 6
