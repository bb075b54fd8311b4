"""Rank template: the ranks, in a successor table or in a head's slots, that a tree takes, likeliest first."""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq
from typing import NamedTuple

RANKS, DEPTH = 8, 8  # size of the template: the best width and depth in the paper's ablation


def likely_ranks(depth: int = DEPTH, ranks: int = RANKS) -> tuple[tuple[float, ...], ...]:
    """Prior probabilities of each rank at each depth, before any counts: half of the mass is on the first rank."""
    return ((*(0.5 / (rank + 1) ** 1.5 for rank in range(ranks)),),) * depth


class TemplateNode(NamedTuple):
    """A node of the template: the rank of its token among its parent's successors."""

    parent: int  # in the template; -1: the root
    rank: int
    depth: int
    prob: float


def template(ranks: Seq[Seq[float]], count: int, depth: int) -> list[TemplateNode]:
    """The `count` likeliest rank paths, parents before children. Depths beyond the last of `ranks` repeat it."""
    found: list[TemplateNode] = []

    def level(at: int) -> Seq[float]:
        return ranks[min(at, len(ranks)) - 1]

    frontier = [(-level(1)[0], 1, -1, 0, 1.0)]  # minus the path's probability, depth, parent, rank, parent's
    while frontier and len(found) < count:
        cost, at, parent, rank, reach = heapq.heappop(frontier)
        found.append(TemplateNode(parent, rank, at, level(at)[rank]))
        if rank + 1 < len(level(at)):
            heapq.heappush(frontier, (-reach * level(at)[rank + 1], at, parent, rank + 1, reach))
        if at < depth:
            heapq.heappush(frontier, (cost * level(at + 1)[0], at + 1, len(found) - 1, 0, -cost))
    return found
