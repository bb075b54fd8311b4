"""Row: a slot of a model. Output: what a pass gives for the job of one."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from outpace.models.chosen import Chosen
from outpace.models.job import Begun
from outpace.tree import Tree


@dataclass
class Row:
    """One slot: tokens in the cache, tokens that the next pass feeds first, and the tree scored last."""

    tokens: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    tree: Tree | None = None
    scored: int = 0  # nodes of the tree that a pass has seen; a drafter may have added more since
    order: list[int] | None = None  # place in the tree of each node that was asked for, if they were put in order
    begun: Begun | None = None  # by a draft that is this model's first layers
    taps: tuple[int, ...] = ()
    hidden: list[Tensor] = field(default_factory=list)  # of `tokens`, in pieces
    provisional: Tensor | None = None  # [nodes of the tree, taps]
    busy: bool = False

    def forget_tree(self) -> None:
        self.tree, self.scored, self.order, self.provisional, self.begun = None, 0, None, None, None


@dataclass(frozen=True)
class Output:
    """What a pass gives for one job."""

    logits: Tensor | None  # [new nodes, vocab]
    hidden: dict[int, Tensor]  # tap -> [pending and new nodes, hidden]
    chosen: Chosen | None = None
