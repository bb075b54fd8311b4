"""Layout: what a pass scores for one sequence: tokens, where they stand, and which of them see which.

A `Tree` is the usual one: a node sees its ancestors. A block of a diffusion model is another: every token of the block
sees all others. Runtimes read a layout through these few methods, so they need not know which kind it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

if TYPE_CHECKING:
    from outpace.core.tree import Budget


class Layout:
    """Base of all layouts. A subclass says where its tokens stand, and what each of them sees."""

    tokens: list[int]
    is_chain: bool = False  # each token follows the one before it, and sees all before it

    def __len__(self) -> int:
        return len(self.tokens)

    def positions(self, start: int, since: int = 0) -> list[int]:
        """The position of each node from `since` on, where the text before the layout has `start` tokens."""
        raise NotImplementedError

    def sees(self, since: int = 0) -> list[int]:
        """For each node from `since` on, the nodes that it sees, itself among them, as bits of one number."""
        raise NotImplementedError

    def visible(self, since: int = 0) -> Tensor:
        """The same as a mask."""  # [new nodes, nodes]
        count = len(self)
        return torch.tensor([[bool(bits >> node & 1) for node in range(count)] for bits in self.sees(since)])

    def children(self, node: int) -> list[int]:
        """Nodes that follow this one as drafts of the same place; a layout that is no tree has none."""
        return []

    def walk(self, tokens: Sequence[int]) -> list[int]:
        """Nodes, root first, that spell the longest beginning of these tokens."""
        return []

    def trim(self, budget: Budget) -> Self:
        """The part that fits a budget; a layout that is no tree is scored whole or not at all."""
        return self
