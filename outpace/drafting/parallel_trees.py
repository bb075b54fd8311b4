"""Trees from the distributions of several next tokens, which a parallel head predicts all at once.

Each slot of the head has one distribution. It depends on the position, not on the draft tokens before it (unless the
head is linked), so a path's probability is the product over its slots. The likeliest tree of a given size is found
best-first over ranks (DDTree), or its ranks are fixed, as in Medusa.
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

Ranks = tuple[int, ...]  # a path of a tree: the rank of its token in the first slot, in the second, and so on


class PathDistributions(Protocol):
    """The candidates for one request's next tokens."""

    seq: Sequence

    def candidates_after(self, path: list[int]) -> RankedCandidates | None:
        """The candidates after these draft tokens; None where there is no slot or no allowed token."""


class SlotDistributions:
    """The candidates for one request's next tokens, from independent slots and after its sampler's processing."""

    def __init__(self, seq: Sequence, logits: Tensor, width: int):  # [slots, vocab]
        self.seq, self.logits, self.width = seq, logits, width
        self._seen: dict[Ranks, list[RankedCandidates]] = {}

    def candidates_after(self, path: list[int]) -> RankedCandidates | None:
        if len(path) >= len(self.logits):
            return None
        # Logits processors depend on the draft tokens: with them, a slot has another distribution after each path.
        # Without them, all slots are ranked at once.
        alone = bool(self.seq.sampler.processors)
        key, at = (tuple(path), 0) if alone else ((), len(path))
        if key not in self._seen:
            self._seen[key] = self._ranked(path, 1) if alone else self._ranked([], len(self.logits))
        return self._seen[key][at] if at < len(self._seen[key]) else None

    def _ranked(self, path: list[int], count: int) -> list[RankedCandidates]:
        first, tokens = len(path), self.seq.tokens + path
        prefixes = [tokens + [0] * ahead for ahead in range(count)]  # only their lengths matter
        try:
            return ranked_candidates(self.seq, self.logits[first : first + count], prefixes, self.width)
        except RequestFailed:
            return []


def tree_from_logits(seq: Sequence, logits: Tensor, budget: Budget, ranks: Seq[Ranks] = ()) -> Tree:
    """Build a tree from slots that do not depend on the draft tokens before them."""  # [slots, vocab]
    return build_tree(SlotDistributions(seq, logits[: budget.depth], budget.width), budget, ranks)


def build_tree(slots: PathDistributions, budget: Budget, ranks: Seq[Ranks] = ()) -> Tree:
    """Build a tree within the budget: a drawn chain if the verifier needs one, else by `ranks`, else the likeliest."""
    seq = slots.seq
    if not seq.verifier.shares_noise and not seq.sampler.greedy:
        return drawn(slots, budget)
    return static(slots, budget, ranks) if ranks else best_first(slots, budget)


def best_first(slots: PathDistributions, budget: Budget) -> Tree:
    """The nodes most likely to be accepted. A parent is likelier than its children, so these nodes form a tree."""
    tree, paths = Tree([slots.seq.tokens[-1]]), [list[int]()]
    frontier: list[tuple[float, int, int, float]] = []  # the path's -log(probability), parent, rank, the parent's

    def push(parent: int, rank: int, cost: float) -> None:
        seen = slots.candidates_after(paths[parent])
        if seen is not None and rank < len(seen.tokens):
            own = cost - math.log(max(seen.probs[rank], 1e-300))
            heapq.heappush(frontier, (own, parent, rank, cost))

    push(ROOT, 0, 0.0)
    while frontier and len(tree) <= budget.nodes:
        own, parent, rank, cost = heapq.heappop(frontier)
        seen = slots.candidates_after(paths[parent])
        assert seen is not None
        node = tree.add(parent, seen.tokens[rank], seen.signal(rank))
        paths.append([*paths[parent], seen.tokens[rank]])
        push(parent, rank + 1, cost)
        push(node, 0, own)
    return tree


def static(slots: PathDistributions, budget: Budget, ranks: Seq[Ranks]) -> Tree:
    """A tree with fixed ranks, up to the limit of the budget."""
    tree, paths, place = Tree([slots.seq.tokens[-1]]), [list[int]()], dict[Ranks, int]()
    place[()] = ROOT
    for path in ranks:
        parent = place.get(path[:-1])
        if parent is None or len(tree) > budget.nodes:
            continue
        seen = slots.candidates_after(paths[parent])
        if seen is not None and path[-1] < len(seen.tokens):
            place[path] = tree.add(parent, seen.tokens[path[-1]], seen.signal(path[-1]))
            paths.append([*paths[parent], seen.tokens[path[-1]]])
    return tree


def drawn(slots: PathDistributions, budget: Budget) -> Tree:
    """A chain of tokens drawn from the slots' distributions, which are stored in the tree. A drawn token always stays:
    it must not be selected by its value."""
    seq, path = slots.seq, list[int]()
    tree = Tree([seq.tokens[-1]])
    while len(path) < budget.nodes and (seen := slots.candidates_after(path)) is not None:
        assert seen.distribution is not None
        tree.proposals[len(path)] = seen.distribution
        tree.add(len(path), seen.tokens[0], seen.signal(0))
        path.append(seen.tokens[0])
        if not seq.policy.keep_drafting(seq, seen.signal(0), len(path)):
            break
    return tree


def parse(text: str) -> list[Ranks]:
    """Read the paths of a static tree from "0+1+0-0+0-1": the first slot's best token, its second best, and so on."""
    try:
        found = [tuple(int(rank) for rank in path.split("-")) for path in text.split("+") if path.strip()]
    except ValueError as error:
        raise UsageError(f"{text!r} is no template; write one as 0+1+0-0+0-1") from error
    for i, path in enumerate(found):
        if path[:-1] and path[:-1] not in found[:i]:
            raise UsageError(
                f"the template has {_spelled(path)!r}, but not its parent {_spelled(path[:-1])!r} before it"
            )
    return list(dict.fromkeys(found))


def spell(accepted: Seq[Seq[float]], nodes: int) -> str:
    """Write the template of the likeliest paths; `accepted[slot][rank]` says how often this rank was accepted."""
    found: list[Ranks] = []
    for slot in template(accepted, nodes, len(accepted)):
        found.append((*(found[slot.parent] if slot.parent >= 0 else ()), slot.rank))
    return "+".join(map(_spelled, found))


def _spelled(path: Ranks) -> str:
    return "-".join(map(str, path))
