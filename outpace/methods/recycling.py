"""Token Recycling: what the target last thought could follow each token, as one static tree of guesses."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.drafter import Drafter
from outpace.models.base import Scores
from outpace.sequence import Sequence, Step
from outpace.tree import ROOT, Budget, Tree

EMPTY = -1


class Guess(NamedTuple):
    """A child that could be added next; the smallest comes first."""

    cost: float  # minus the chance that it is accepted
    parent: int
    rank: int
    reach: float  # chance that the parent is accepted
    depth: int


@dataclass(eq=False)
class Recycling(Drafter):
    """Every scored node, accepted or not, leaves the target's `k` likeliest successors of its token in a table."""

    k: int = 8
    depth: int = 6
    nodes: int = 48
    _table: Tensor | None = field(default=None, init=False, repr=False)  # [vocab, k], kept across requests
    _offered: list[float] = field(init=False, repr=False)  # how often rank r was guessed under an accepted node
    _matched: list[float] = field(init=False, repr=False)  # and how often it was right

    def __post_init__(self) -> None:
        # A prior in the shape that Token Recycling's published template implies: half of the mass on rank 0.
        self._offered = [8.0] * self.k
        self._matched = [4.0 / (rank + 1) ** 1.5 for rank in range(self.k)]

    @property
    def shape(self) -> Budget:  # type: ignore[override]
        return Budget(self.depth, self.nodes, self.k)

    def propose(self, seq: Sequence, budget: Budget) -> Tree:
        """Grow best-first by the chance of each rank, learned from what was accepted."""
        table = self._learn_prompt(seq)
        weights = [m / o for m, o in zip(self._matched, self._offered, strict=True)]
        tree = Tree([seq.tokens[-1]])
        frontier = [Guess(-weights[0], ROOT, 0, 1.0, 1)]
        while frontier and len(tree) <= budget.nodes:
            guess = heapq.heappop(frontier)
            token = int(table[tree.tokens[guess.parent], guess.rank])
            if token == EMPTY:
                continue
            node, chance = tree.add(guess.parent, token), guess.reach * weights[guess.rank]
            if guess.rank + 1 < min(self.k, budget.width):
                sibling = -guess.reach * weights[guess.rank + 1]
                heapq.heappush(frontier, Guess(sibling, guess.parent, guess.rank + 1, guess.reach, guess.depth))
            if guess.depth < budget.depth:
                heapq.heappush(frontier, Guess(-chance * weights[0], node, 0, chance, guess.depth + 1))
        return tree

    def observe(self, seq: Sequence, step: Step, scores: Scores) -> None:
        table = self._learn_prompt(seq)
        for node in step.path:
            for rank, child in enumerate(step.tree.children(node)[: self.k]):
                self._offered[rank] += 1
                self._matched[rank] += child in step.path
        last = {token: node for node, token in enumerate(step.tree.tokens)}  # a token that stands twice: the last wins
        successors = scores.logits.topk(self.k).indices.to(table)  # [nodes, k]
        table[list(last)] = successors[list(last.values())]

    def _learn_prompt(self, seq: Sequence) -> Tensor:
        """The table; a prompt that is new to it teaches what follows a token that the target was never asked about."""
        if self._table is None:
            self._table = torch.full((seq.vocab, self.k), EMPTY)
        learned = seq.memory(self, list[bool])
        if not learned:
            learned.append(True)
            tokens = torch.tensor(seq.tokens)
            new = self._table[tokens[:-1], 0] == EMPTY
            self._table[tokens[:-1][new], 0] = tokens[1:][new]
        return self._table
