"""Block: a few layers over the target's hidden states fill in the next tokens as one block, all at once (DFlash)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from outpace.drafting.head_drafter import ParallelDrafter


@dataclass(eq=False)
class Block(ParallelDrafter):
    """Trained layers over hidden states of the target guess a block of tokens at once, as a tree."""

    kind: ClassVar[str] = "block"
    head: Any = None  # a folder, or "random"; None: the one that came with us for this model
    depth: int = 7
    nodes: int = 24
    width: int = 4
