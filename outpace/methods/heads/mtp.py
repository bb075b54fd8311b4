"""MTP: a layer like the target's own drafts from its last hidden state, token after token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from outpace.drafting.head_drafter import HeadDrafter


@dataclass(eq=False)
class Mtp(HeadDrafter):
    """A trained layer drafts a chain from hidden states."""

    kind: ClassVar[str] = "mtp"
    head: Any = None  # a folder, or "random"; None: the head that ships for this model
    depth: int = 4
    nodes: int = 0  # 0: depth * width
    width: int = 1
