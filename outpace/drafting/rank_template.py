"""Rank template: which ranks of a table of successors, or of a slot, a tree takes, the likeliest first."""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq
from typing import NamedTuple

RANKS, DEPTH = 8, 8  # of the template: the width and depth that did best in the paper's ablation


def likely_ranks(depth: int = DEPTH, ranks: int = RANKS) -> tuple[tuple[float, ...], ...]:
    """Probabilities of each rank at each depth before anything was counted: half of the mass is on the first."""
    return ((*(0.5 / (rank + 1) ** 1.5 for rank in range(ranks)),),) * depth


class TemplateNode(NamedTuple):
    """A place of the template: the rank it takes of its parent's successors."""

    parent: int  # in the template; -1: the root
    rank: int
    depth: int
    prob: float


def template(ranks: Seq[Seq[float]], count: int, depth: int) -> list[TemplateNode]:
    """The likeliest rank paths from the root, parents before their children; beyond the last depth it repeats."""
    found: list[TemplateNode] = []

    def level(at: int) -> Seq[float]:
        return ranks[min(at, len(ranks)) - 1]

    frontier = [(-level(1)[0], 1, -1, 0, 1.0)]  # minus the probability of the path, depth, parent, rank, the parent's
    while frontier and len(found) < count:
        cost, at, parent, rank, reach = heapq.heappop(frontier)
        found.append(TemplateNode(parent, rank, at, level(at)[rank]))
        if rank + 1 < len(level(at)):
            heapq.heappush(frontier, (-reach * level(at)[rank + 1], at, parent, rank + 1, reach))
        if at < depth:
            heapq.heappush(frontier, (cost * level(at + 1)[0], at + 1, len(found) - 1, 0, -cost))
    return found
