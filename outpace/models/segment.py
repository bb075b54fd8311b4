"""Segment: what one slot adds to a pass. Slot: a place of the key-value cache, and the text in it.

Some tokens of a segment may have been through the first layers already, because a draft that is the first layers of the
same model fed them. Then the pass goes on where that draft stopped.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outpace.core.layout import Layout
from outpace.core.lm import Context, Logits, Picked
from outpace.core.tree import ROOT, Tree
from outpace.sampling.sampler import Pick

if TYPE_CHECKING:
    from outpace.core.lm import Context, Logits


@dataclass(frozen=True)
class PartialPass:
    """Pending tokens of a slot and nodes after them whose first layers have run, and wrote their keys and values."""

    tree: Tree
    layers: int  # that have run
    states: Tensor  # [pending tokens and nodes, hidden]: what leaves the last of these layers


@dataclass(frozen=True)
class ResumePoint:
    """The first tokens of a segment, up to where a draft has brought them."""

    layers: int
    states: Tensor  # [tokens, hidden]
    nodes: list[int]  # their places in the cache of these layers, from the root's entry on
    order: list[int]  # place in the segment's tree of each node of the tree that was to be scored


@dataclass(frozen=True)
class Segment:
    """What one slot adds to a pass: its pending tokens, then the nodes of its layout from `since` on."""

    slot: int
    start: int  # entries in the cache
    pending: list[int]
    layout: Layout | None = None
    since: int = 0
    pick: Pick | None = None
    resumed: ResumePoint | None = None
    features: Tensor | None = None  # [tokens, hidden]: what enters beside the tokens, for a model that takes features

    @property
    def tokens(self) -> list[int]:
        return self.pending + (self.layout.tokens[self.since :] if self.layout is not None else [])

    @property
    def positions(self) -> list[int]:
        first = self.start + len(self.pending)
        nodes = self.layout.positions(first, self.since) if self.layout is not None else []
        return [*range(self.start, first), *nodes]

    @property
    def offset(self) -> int:
        """The entry of the slot at which the first of `tokens` is written."""
        return self.start + len(self.pending) + self.since if not self.pending else self.start

    @property
    def end(self) -> int:
        """Cache entries that exist after the pass."""
        return self.start + len(self.pending) + (len(self.layout) if self.layout is not None else 0)

    @property
    def tree(self) -> Tree:
        """The layout, for code that only works on trees."""
        assert isinstance(self.layout, Tree), "this pass scores a tree"
        return self.layout

    def resume(self, begun: PartialPass) -> Segment:
        """The same segment with the nodes that were begun first. Their parents were begun too, so it stays a tree."""
        tree, fed = self.tree, len(self.pending)
        assert not self.since, "a whole tree is resumed"
        found = _found(tree, begun.tree, len(begun.states) - fed)
        ordered = [*sorted(found, key=lambda node: found[node]), *(n for n in range(len(tree)) if n not in found)]
        nodes = sorted(found.values())
        order = [0] * len(tree)
        for place, node in enumerate(ordered):
            order[node] = place
        states = begun.states
        if fed + len(nodes) < len(states):  # some that were begun are not scored now
            states = states[[*range(fed), *(fed + node for node in nodes)]]
        parents = [-1, *(order[tree.parents[node]] for node in ordered[1:])]
        arranged = Tree([tree.tokens[node] for node in ordered], parents)
        return replace(self, layout=arranged, resumed=ResumePoint(begun.layers, states, nodes, order))

    def fresh(self) -> Segment | None:
        """The part of a resumed segment that no layer has seen; None if there is none."""
        assert self.resumed is not None
        fed, done = len(self.pending), len(self.resumed.nodes)
        if done == len(self.tree):
            return None
        return Segment(self.slot, self.start + fed, [], self.layout, done)


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


def joined(segments: Seq[Segment], size: int) -> dict[str, Tensor]:
    """What enters beside the tokens of a pass of this size, for a model that takes features."""
    given = [segment.features for segment in segments if segment.features is not None]
    if not given:
        return {}
    features = torch.cat(given)
    return {"features": torch.nn.functional.pad(features, (0, 0, 0, size - len(features)))[None]}


@dataclass
class Slot:
    """One place of the cache: the tokens in it, those that the next pass feeds first, and the layout scored last."""

    tokens: list[int] = field(default_factory=list)
    length: int = 0  # cache entries of these tokens
    pending: list[int] = field(default_factory=list)
    layout: Layout | None = None
    scored: int = 0  # nodes of the layout that a pass has seen; a drafter may have added more since
    order: list[int] | None = None  # place in the layout of each node that was to be scored, if they were put in order
    begun: PartialPass | None = None  # by a draft that is this model's first layers
    context: Context = None
    taps: tuple[int, ...] = ()
    hidden: list[Tensor] = field(default_factory=list)  # of `tokens`, in pieces
    provisional: Tensor | None = None  # [nodes of the layout, taps]
    busy: bool = False

    def forget_layout(self) -> None:
        self.layout, self.scored, self.order, self.provisional, self.begun = None, 0, None, None, None


@dataclass(frozen=True)
class SegmentOutput:
    """What a pass gives for one segment."""

    logits: Tensor | Logits | None  # [new nodes, vocab]
    hidden: dict[int, Tensor]  # tap -> [pending and new nodes, hidden]
    picked: Picked | None = None


def common_prefix(a: Seq[int], b: Seq[int]) -> int:
    """How many tokens two texts begin with alike."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])
