"""Job: what one row contributes to a pass.

Some of its tokens may have been through the first layers already, because a draft that is the first layers of the same
model fed them. Then the pass goes on where that draft stopped.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from outpace.core.lm import Picked
from outpace.core.tree import ROOT, Tree
from outpace.sampling.sampler import Pick


@dataclass(frozen=True)
class PartialPass:
    """Pending tokens of a row and nodes behind them whose first layers have run: those have their keys and values."""

    tree: Tree
    layers: int  # that have run
    states: Tensor  # [pending tokens and nodes, hidden]: what leaves the last of these layers


@dataclass(frozen=True)
class ResumePoint:
    """The first tokens of a job, up to where a draft has brought them."""

    layers: int
    states: Tensor  # [tokens, hidden]
    nodes: list[int]  # where the nodes among them lie in the cache of these layers, from the root's entry on
    order: list[int]  # place in the job's tree of each node of the tree that was asked for


@dataclass(frozen=True)
class Segment:
    """What one row contributes to a pass: its pending tokens, then the nodes of its tree from `since` on."""

    row: int
    start: int  # tokens in the cache
    pending: list[int]
    tree: Tree | None = None
    since: int = 0
    pick: Pick | None = None
    resumed: ResumePoint | None = None
    features: Tensor | None = None  # [tokens, hidden]: what enters beside the tokens, for a model that takes anything

    @property
    def tokens(self) -> list[int]:
        return self.pending + (self.tree.tokens[self.since :] if self.tree is not None else [])

    @property
    def positions(self) -> list[int]:
        first = self.start + len(self.pending)
        nodes = [first + depth for depth in self.tree.depths[self.since :]] if self.tree is not None else []
        return [*range(self.start, first), *nodes]

    @property
    def offset(self) -> int:
        """Where in the row's cache the first of `tokens` is written."""
        return self.start + len(self.pending) + self.since if not self.pending else self.start

    @property
    def end(self) -> int:
        """Cache entries that exist after the pass."""
        return self.start + len(self.pending) + (len(self.tree) if self.tree is not None else 0)

    def resume(self, begun: PartialPass) -> Segment:
        """The same job, with the nodes that were begun first: their parents were begun too, so it stays a tree."""
        tree, fed = self.tree, len(self.pending)
        assert tree is not None and not self.since, "a whole tree is resumed"
        found = _found(tree, begun.tree, len(begun.states) - fed)
        ordered = [*sorted(found, key=lambda node: found[node]), *(n for n in range(len(tree)) if n not in found)]
        nodes = sorted(found.values())
        order = [0] * len(tree)
        for place, node in enumerate(ordered):
            order[node] = place
        states = begun.states
        if fed + len(nodes) < len(states):  # some that were begun are not asked for
            states = states[[*range(fed), *(fed + node for node in nodes)]]
        parents = [-1, *(order[tree.parents[node]] for node in ordered[1:])]
        arranged = Tree([tree.tokens[node] for node in ordered], parents)
        return replace(self, tree=arranged, resumed=ResumePoint(begun.layers, states, nodes, order))

    def fresh(self) -> Segment | None:
        """The part of a resumed job that no layer has seen; None if there is none."""
        assert self.resumed is not None and self.tree is not None
        fed, done = len(self.pending), len(self.resumed.nodes)
        if done == len(self.tree):
            return None
        return Segment(self.row, self.start + fed, [], self.tree, done)


def _found(tree: Tree, other: Tree, most: int) -> dict[int, int]:
    """Nodes of `tree` that spell one of the first `most` nodes of `other`, and which."""
    if not most or tree.tokens[ROOT] != other.tokens[ROOT]:
        return {}
    found = {ROOT: ROOT}
    for node in range(1, len(tree)):
        parent = found.get(tree.parents[node])
        same = None if parent is None else other.child(parent, tree.tokens[node])
        if same is not None and same < most:
            found[node] = same
    return found


def joined(jobs: Seq[Segment], size: int) -> dict[str, Tensor]:
    """What enters beside the tokens of a pass of this size, for a model that takes anything."""
    given = [job.features for job in jobs if job.features is not None]
    if not given:
        return {}
    features = torch.cat(given)
    return {"features": torch.nn.functional.pad(features, (0, 0, 0, size - len(features)))[None]}


@dataclass
class Slot:
    """One slot: tokens in the cache, tokens that the next pass feeds first, and the tree scored last."""

    tokens: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    tree: Tree | None = None
    scored: int = 0  # nodes of the tree that a pass has seen; a drafter may have added more since
    order: list[int] | None = None  # place in the tree of each node that was asked for, if they were put in order
    begun: PartialPass | None = None  # by a draft that is this model's first layers
    taps: tuple[int, ...] = ()
    hidden: list[Tensor] = field(default_factory=list)  # of `tokens`, in pieces
    provisional: Tensor | None = None  # [nodes of the tree, taps]
    busy: bool = False

    def forget_tree(self) -> None:
        self.tree, self.scored, self.order, self.provisional, self.begun = None, 0, None, None, None


@dataclass(frozen=True)
class SegmentOutput:
    """What a pass gives for one job."""

    logits: Tensor | None  # [new nodes, vocab]
    hidden: dict[int, Tensor]  # tap -> [pending and new nodes, hidden]
    chosen: Picked | None = None
