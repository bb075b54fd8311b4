"""Medusa: small layers on the target's last hidden state guess the next tokens, one for each, all at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from outpace.core.tree import Budget
from outpace.drafting import parallel_trees
from outpace.drafting.head_drafter import ParallelDrafter


@dataclass(eq=False)
class Medusa(ParallelDrafter):
    """Trained layers on the target's last hidden state guess the next tokens at once, as a tree."""

    kind: ClassVar[str] = "medusa"
    head: Any = None  # a folder, or "random"; None: the one that came with us for this model
    depth: int = 4
    nodes: int = 24
    width: int = 6
    template: str = ""  # ranks of a static tree, as 0+1+0-0+0-1; none: the likeliest tree, anew in every pass

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ranks = parallel_trees.parse(str(self.template))

    @property
    def limit(self) -> Budget:  # type: ignore[override]
        if not self.ranks:
            return super().limit
        return Budget(max(map(len, self.ranks)), len(self.ranks), 1 + max(map(max, self.ranks)))
