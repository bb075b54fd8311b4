"""Medusa: small layers on the target's last hidden state predict the next tokens, one layer per token, all at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from outpace.core.tree import Budget
from outpace.drafting import parallel_trees
from outpace.drafting.head_drafter import ParallelDrafter


@dataclass(eq=False)
class Medusa(ParallelDrafter):
    """Trained layers draft several tokens from one hidden state."""

    kind: ClassVar[str] = "medusa"
    head: Any = None  # a folder, or "random"; None: the head that ships for this model
    depth: int = 4
    nodes: int = 24
    width: int = 6
    template: str = ""  # ranks of a static tree, such as 0+1+0-0+0-1; empty: the likeliest tree of each pass

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ranks = parallel_trees.parse(str(self.template))

    @property
    def limit(self) -> Budget:  # type: ignore[override]
        if not self.ranks:
            return super().limit
        return Budget(max(map(len, self.ranks)), len(self.ranks), 1 + max(map(max, self.ranks)))
