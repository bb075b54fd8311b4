"""Drafters whose trees are as large as their options say."""

from __future__ import annotations

from outpace.core.drafter import Drafter
from outpace.core.tree import Budget
from outpace.errors import UsageError


class SizedDrafter(Drafter):
    """A drafter whose trees are as large as its options say; a subclass brings them."""

    depth: int
    nodes: int  # 0: as many as a chain, or a tree of this width, of this depth has
    width: int

    def __post_init__(self) -> None:
        given = (self.depth, self.nodes, self.width)
        if not all(isinstance(n, int) for n in given) or self.depth < 0 or self.nodes < 0 or self.width < 1:
            name, got = type(self).__name__.lower(), ", ".join(map(str, given))
            raise UsageError(f"{name} needs depth >= 0, nodes >= 0 and width >= 1, whole numbers, got {got}")

    @property
    def limit(self) -> Budget:  # type: ignore[override]
        return Budget(self.depth, self.nodes or self.depth * self.width, self.width)
