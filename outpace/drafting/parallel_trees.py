"""Slots: trees from distributions of several tokens ahead that were all guessed at once.

Such a distribution knows its place, not what was guessed before it, so a path is as likely as its tokens are, each in
its slot. The likeliest tree of so many nodes is found best-first over ranks (DDTree), or its ranks are given, as Medusa
does.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence as Seq
from typing import Protocol

from torch import Tensor

from outpace.core.sequence import Sequence
from outpace.core.tree import ROOT, Budget, Tree
from outpace.drafting.candidates import RankedCandidates, ranked_candidates
from outpace.drafting.rank_template import template
from outpace.errors import RequestFailed, UsageError

Ranks = tuple[int, ...]  # a path of a tree: the first slot's token of this rank, the second's of that, and so on


class PathDistributions(Protocol):
    """What one request's next tokens could be."""

    seq: Sequence

    def behind(self, path: list[int]) -> RankedCandidates | None:
        """What could follow these guesses; None where there is no slot, or no token that is allowed."""


class SlotDistributions:
    """The distributions of one request's next tokens, as its sampler sees them."""

    def __init__(self, seq: Sequence, logits: Tensor, width: int):  # [slots, vocab]
        self.seq, self.logits, self.width = seq, logits, width
        self._seen: dict[Ranks, list[RankedCandidates]] = {}

    def behind(self, path: list[int]) -> RankedCandidates | None:
        if len(path) >= len(self.logits):
            return None
        # Processors look at the guesses: with them a slot has another distribution behind each path, else all are seen
        # at once.
        alone = bool(self.seq.sampler.processors)
        key, at = (tuple(path), 0) if alone else ((), len(path))
        if key not in self._seen:
            self._seen[key] = self._look(path, 1) if alone else self._look([], len(self.logits))
        return self._seen[key][at] if at < len(self._seen[key]) else None

    def _look(self, path: list[int], count: int) -> list[RankedCandidates]:
        first, tokens = len(path), self.seq.tokens + path
        prefixes = [tokens + [0] * ahead for ahead in range(count)]  # of which only the length is looked at
        try:
            return ranked_candidates(self.seq, self.logits[first : first + count], prefixes, self.width)
        except RequestFailed:
            return []


def grow(seq: Sequence, logits: Tensor, budget: Budget, ranks: Seq[Ranks] = ()) -> Tree:
    """From distributions that do not depend on what comes before them."""  # [slots, vocab]
    return grown(SlotDistributions(seq, logits[: budget.depth], budget.width), budget, ranks)


def grown(slots: PathDistributions, budget: Budget, ranks: Seq[Ranks] = ()) -> Tree:
    """A tree within the budget: by `ranks` if there are any, else the best; a chain where it has to be drawn."""
    seq = slots.seq
    if not seq.verifier.shares_noise and not seq.sampler.greedy:
        return drawn(slots, budget)
    return static(slots, budget, ranks) if ranks else best_first(slots, budget)


def best_first(slots: PathDistributions, budget: Budget) -> Tree:
    """The nodes that are likeliest to be accepted; a parent is likelier than its children, so they hang together."""
    tree, paths = Tree([slots.seq.tokens[-1]]), [list[int]()]
    frontier: list[tuple[float, int, int, float]] = []  # minus its log probability, parent, rank there, the parent's

    def push(parent: int, rank: int, cost: float) -> None:
        seen = slots.behind(paths[parent])
        if seen is not None and rank < len(seen.tokens):
            own = cost - math.log(max(seen.probs[rank], 1e-300))
            heapq.heappush(frontier, (own, parent, rank, cost))

    push(ROOT, 0, 0.0)
    while frontier and len(tree) <= budget.nodes:
        own, parent, rank, cost = heapq.heappop(frontier)
        seen = slots.behind(paths[parent])
        assert seen is not None
        node = tree.add(parent, seen.tokens[rank], seen.signal(rank))
        paths.append([*paths[parent], seen.tokens[rank]])
        push(parent, rank + 1, cost)
        push(node, 0, own)
    return tree


def static(slots: PathDistributions, budget: Budget, ranks: Seq[Ranks]) -> Tree:
    """The same ranks in every tree, as far as the budget goes."""
    tree, paths, place = Tree([slots.seq.tokens[-1]]), [list[int]()], dict[Ranks, int]()
    place[()] = ROOT
    for path in ranks:
        parent = place.get(path[:-1])
        if parent is None or len(tree) > budget.nodes:
            continue
        seen = slots.behind(paths[parent])
        if seen is not None and path[-1] < len(seen.tokens):
            place[path] = tree.add(parent, seen.tokens[path[-1]], seen.signal(path[-1]))
            paths.append([*paths[parent], seen.tokens[path[-1]]])
    return tree


def drawn(slots: PathDistributions, budget: Budget) -> Tree:
    """A chain, each token drawn from its slot's distribution, which is left in the tree: what was drawn may not be
    chosen."""
    seq, path = slots.seq, list[int]()
    tree = Tree([seq.tokens[-1]])
    while len(path) < budget.nodes and (seen := slots.behind(path)) is not None:
        assert seen.distribution is not None
        tree.proposals[len(path)] = seen.distribution
        tree.add(len(path), seen.tokens[0], seen.signal(0))
        path.append(seen.tokens[0])
        if not seq.policy.keep_drafting(seq, seen.signal(0), len(path)):
            break
    return tree


def parse(text: str) -> list[Ranks]:
    """Paths of a static tree from "0+1+0-0+0-1": the best token of the first slot, the second best of it, and so on."""
    try:
        found = [tuple(int(rank) for rank in path.split("-")) for path in text.split("+") if path.strip()]
    except ValueError as error:
        raise UsageError(f"a template is written as 0+1+0-0+0-1, got {text!r}") from error
    for i, path in enumerate(found):
        if path[:-1] and path[:-1] not in found[:i]:
            raise UsageError(f"the template has {_spelled(path)!r} without, or before, {_spelled(path[:-1])!r}")
    return list(dict.fromkeys(found))


def spell(accepted: Seq[Seq[float]], nodes: int) -> str:
    """The template of the likeliest paths, where `accepted[slot][rank]` is how often this rank was right."""
    found: list[Ranks] = []
    for slot in template(accepted, nodes, len(accepted)):
        found.append((*(found[slot.parent] if slot.parent >= 0 else ()), slot.rank))
    return "+".join(map(_spelled, found))


def _spelled(path: Ranks) -> str:
    return "-".join(map(str, path))
