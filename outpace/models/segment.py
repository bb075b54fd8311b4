"""Segments and slots. A slot is a place in the KV cache and the text in it; a segment is what it adds to one pass.

An early-exit draft, which is the first layers of the same model, may have run some tokens of a segment through those
layers already. The pass then resumes where the draft stopped.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from outpace.core.layout import Layout
from outpace.core.lm import Context, Logits, Picked
from outpace.core.tree import ROOT, Tree
from outpace.models.transfer import sent
from outpace.sampling.sampler import Pick

MOST_PIECES = 64  # beyond this, the pieces of a text's hidden states are joined


@dataclass(frozen=True)
class PartialPass:
    """Pending tokens of a slot, and nodes after them, that have run through the first layers; their KV is written."""

    tree: Tree
    layers: int  # how many layers have run
    states: Tensor  # [pending tokens and nodes, hidden]: output of the last of these layers


@dataclass(frozen=True)
class ResumePoint:
    """Where a pass resumes the tokens of a segment that an early-exit draft has begun."""

    layers: int
    states: Tensor  # [tokens, hidden]
    nodes: list[int]  # their places in the cache of these layers, counted from the root's entry
    order: list[int]  # for each node of the original tree, its place in the segment's reordered tree


@dataclass(frozen=True)
class Segment:
    """What one slot adds to a forward pass: its pending tokens, then the nodes of its layout from `since` on."""

    slot: int
    start: int  # cache entries of the slot before the pending tokens
    pending: list[int]
    layout: Layout | None = None
    since: int = 0
    pick: Pick | None = None
    resumed: ResumePoint | None = None
    features: Tensor | None = None  # [tokens, hidden]: input beside the tokens, for a model that takes features

    @property
    def count(self) -> int:
        """The number of `tokens`."""
        return len(self.pending) + (0 if self.layout is None else len(self.layout.tokens) - self.since)

    @property
    def tokens(self) -> list[int]:
        return self.pending + (self.layout.tokens[self.since :] if self.layout is not None else [])

    @property
    def positions(self) -> list[int]:
        first = self.start + len(self.pending)
        if self.layout is not None and len(self.layout.tokens) == 1 and not self.since:
            return [*range(self.start, first), first]
        nodes = self.layout.positions(first, self.since) if self.layout is not None else []
        return [*range(self.start, first), *nodes]

    @property
    def offset(self) -> int:
        """The slot's cache entry to which the first of `tokens` is written."""
        return self.start + len(self.pending) + self.since if not self.pending else self.start

    @property
    def end(self) -> int:
        """The number of cache entries of the slot after the pass."""
        return self.start + len(self.pending) + (0 if self.layout is None else len(self.layout.tokens))

    @property
    def tree(self) -> Tree:
        """The layout as a tree, for code that only works on trees."""
        assert isinstance(self.layout, Tree), "the layout must be a tree"
        return self.layout

    def resume(self, begun: PartialPass) -> Segment:
        """Return this segment with the begun nodes first. Their parents have begun too, so the tree stays valid."""
        tree, fed = self.tree, len(self.pending)
        assert not self.since, "only a whole tree can be resumed"
        found = _found(tree, begun.tree, len(begun.states) - fed)
        ordered = [*sorted(found, key=lambda node: found[node]), *(n for n in range(len(tree)) if n not in found)]
        nodes = sorted(found.values())
        order = [0] * len(tree)
        for place, node in enumerate(ordered):
            order[node] = place
        states = begun.states
        if fed + len(nodes) < len(states):  # some begun nodes are not scored now
            states = states[[*range(fed), *(fed + node for node in nodes)]]
        parents = [-1, *(order[tree.parents[node]] for node in ordered[1:])]
        arranged = Tree([tree.tokens[node] for node in ordered], parents)
        return replace(self, layout=arranged, resumed=ResumePoint(begun.layers, states, nodes, order))

    def remainder(self) -> Segment | None:
        """Return the part of a resumed segment that no layer has run yet, or None."""
        assert self.resumed is not None
        fed, done = len(self.pending), len(self.resumed.nodes)
        if done == len(self.tree):
            return None
        return Segment(self.slot, self.start + fed, [], self.layout, done)


def _found(tree: Tree, other: Tree, most: int) -> dict[int, int]:
    """Map nodes of `tree` to the nodes with the same path of tokens among the first `most` of `other`."""
    if not most or tree.tokens[ROOT] != other.tokens[ROOT]:
        return {}
    found = {ROOT: ROOT}
    for node in range(1, len(tree)):
        parent = found.get(tree.parents[node])
        same = None if parent is None else other.child(parent, tree.tokens[node])
        if same is not None and same < most:
            found[node] = same
    return found


def packed_features(segments: Seq[Segment], size: int) -> dict[str, Tensor]:
    """Return the features of a pass, padded to `size` tokens, as a model input; {} if there are none."""
    given = [segment.features for segment in segments if segment.features is not None]
    if not given:
        return {}
    features = torch.cat(given)
    return {"features": torch.nn.functional.pad(features, (0, 0, 0, size - len(features)))[None]}


class StateLog:
    """The hidden states of a text, in the pieces in which passes left them: most readers want only the newest."""

    def __init__(self, pieces: Seq[Tensor] = ()):
        self.pieces = [piece for piece in pieces if len(piece)]  # [tokens, taps] each

    def append(self, states: Tensor) -> None:
        if len(states):
            self.pieces.append(states)

    def since(self, first: int) -> Tensor | None:
        """Return the states from token `first` on, or None if there are none at all."""  # [tokens - first, taps]
        if not first or len(self.pieces) > MOST_PIECES:
            self.pieces = [torch.cat(self.pieces)] if len(self.pieces) > 1 else self.pieces
        if not self.pieces:
            return None
        end = sum(map(len, self.pieces))
        wanted, found = end - first, list[Tensor]()
        for piece in reversed(self.pieces):
            if wanted > 0 or not found:
                found.append(piece[max(0, len(piece) - max(wanted, 0)) :])
                wanted -= len(piece)
        return found[0] if len(found) == 1 else torch.cat(found[::-1])


@dataclass
class Slot:
    """One place in the cache: its committed tokens, the pending tokens of the next pass, and the layout scored last."""

    tokens: list[int] = field(default_factory=list)
    length: int = 0  # cache entries of these tokens
    pending: list[int] = field(default_factory=list)
    layout: Layout | None = None
    scored: int = 0  # nodes of the layout that have run in a pass; a drafter may have added more since
    order: list[int] | None = None  # for each node to score, its place in the layout, if a resumed pass reordered it
    begun: PartialPass | None = None  # what an early-exit draft has run already
    context: Context = None
    taps: tuple[int, ...] = ()
    hidden: StateLog = field(default_factory=StateLog)  # hidden states of `tokens`
    provisional: Tensor | None = None  # [nodes of the layout, taps]
    busy: bool = False
    computed: int = 0  # tokens that passes have run for this text

    @property
    def end(self) -> int:
        """The number of its cache entries, with those of nodes that may still be kept."""
        nodes = 0 if self.layout is None else len(self.layout.tokens)
        return self.length + max(nodes, 0 if self.begun is None else len(self.begun.states))

    def take(self, segment: Segment, layout: Layout) -> None:
        """Record a pass that ran the pending tokens and then this layout; nobody reads its states."""
        self.tokens += segment.pending
        self.length, self.pending = segment.start + len(segment.pending), []
        self.forget_layout()
        self.layout, self.scored = layout, len(layout)

    def forget_layout(self) -> None:
        self.layout, self.scored, self.order, self.provisional, self.begun = None, 0, None, None, None


def log_states(slots: Seq[Slot], paths: Seq[list[int]]) -> None:
    """Move the states of kept nodes to the logs of their slots. Slots whose states are alike share one gather."""
    groups: dict[Any, list[tuple[Slot, Tensor, list[int]]]] = {}
    for slot, path in zip(slots, paths, strict=True):
        if (states := slot.provisional) is not None:
            slot.provisional = None
            groups.setdefault((states.shape[1], states.dtype), []).append((slot, states, path))
    for group in groups.values():
        sides = [states for _, states, _ in group]
        firsts = accumulate(map(len, sides), initial=0)
        rows = [first + node for first, (_, _, path) in zip(firsts, group, strict=False) for node in path]
        together = sides[0] if len(sides) == 1 else torch.cat(sides)
        if rows != list(range(len(together))):
            together = together.index_select(0, sent(rows, together.device))
        for (slot, _, _), kept in zip(group, together.split([len(path) for _, _, path in group]), strict=True):
            slot.hidden.append(kept)


@dataclass(frozen=True)
class SegmentOutput:
    """What a pass returns for one segment."""

    logits: Tensor | Logits | None  # [new nodes, vocab]
    hidden: dict[int, Tensor]  # tap -> [pending and new nodes, hidden]
    picked: Picked | None = None
    joined: Tensor | None = None  # all of `hidden` side by side, in its order, if they lie so in memory

    def states(self, taps: tuple[int, ...]) -> Tensor:  # [pending and new nodes, taps * hidden]
        """Return the hidden states of these taps side by side."""
        if self.joined is not None and tuple(self.hidden) == taps:
            return self.joined
        return torch.cat([self.hidden[tap] for tap in taps], dim=-1)


def common_prefix(a: Seq[int], b: Seq[int]) -> int:
    """Return the length of the common prefix of two token lists."""
    low, high = 0, min(len(a), len(b))
    if not high or a[0] != b[0]:
        return 0
    if a[:high] == b[:high]:
        return high
    while low < high:  # by bisection, because comparing slices is far faster than comparing tokens
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low
