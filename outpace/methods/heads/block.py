"""Block (DFlash): a few layers over the target's hidden states predict the next tokens as one block, all at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from outpace.drafting.head_drafter import ParallelDrafter


@dataclass(eq=False)
class Block(ParallelDrafter):
    """Trained layers draft a whole block in one pass."""

    kind: ClassVar[str] = "block"
    head: Any = None  # a folder, or "random"; None: the head that ships for this model
    depth: int = 7
    nodes: int = 24
    width: int = 4
