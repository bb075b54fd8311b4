"""Layout: the tokens that a pass scores for one sequence, their positions, and their attention mask.

The usual layout is a `Tree`, in which a node attends to its ancestors. In another one, a block of a diffusion model,
every token attends to all others. Runtimes read a layout only through these methods and need not know its kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

if TYPE_CHECKING:
    from outpace.core.tree import Budget


class Layout:
    """Base class of all layouts. A subclass defines the positions of its tokens and what each of them attends to."""

    tokens: list[int]
    is_chain: bool = False  # each token follows the previous one and attends to all before it

    def __len__(self) -> int:
        return len(self.tokens)

    def positions(self, start: int, since: int = 0) -> list[int]:
        """Return the position of each node from `since` on, if `start` tokens of text come before the layout."""
        raise NotImplementedError

    def sees(self, since: int = 0) -> list[int]:
        """Return the nodes that each node from `since` on attends to (itself included), as a bit set per node."""
        raise NotImplementedError

    def visible(self, since: int = 0) -> Tensor:
        """Return `sees` as a boolean mask."""  # [new nodes, nodes]
        return torch.tensor([[bool(bits >> node & 1) for node in range(len(self))] for bits in self.sees(since)])

    def children(self, node: int) -> list[int]:
        """Return the candidates for the position after this node; only trees have any."""
        return []

    def walk(self, tokens: Sequence[int]) -> list[int]:
        """Return the longest path, root first, whose tokens are a prefix of `tokens`."""
        return []

    def trim(self, budget: Budget) -> Self:
        """Return the part that fits a budget; a layout other than a tree is always scored as a whole."""
        return self
