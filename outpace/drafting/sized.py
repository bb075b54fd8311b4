"""SizedDrafter: the base of drafters that take the size of their trees from options."""

from __future__ import annotations

from outpace.core.drafter import Drafter
from outpace.core.tree import Budget
from outpace.errors import UsageError


class SizedDrafter(Drafter):
    """A drafter that takes the size of its trees from options; a subclass declares these options."""

    depth: int
    nodes: int  # 0: depth * width
    width: int

    def __post_init__(self) -> None:
        given = (self.depth, self.nodes, self.width)
        if not all(isinstance(n, int) for n in given) or self.depth < 0 or self.nodes < 0 or self.width < 1:
            name, got = type(self).__name__.lower(), ", ".join(map(str, given))
            raise UsageError(f"{name} needs depth >= 0, nodes >= 0 and width >= 1 as whole numbers, got {got}")

    @property
    def limit(self) -> Budget:  # type: ignore[override]
        return Budget(self.depth, self.nodes or self.depth * self.width, self.width)
