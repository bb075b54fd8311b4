"""Token Recycling: drafts a tree from the target's latest predictions of what follows each token."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import ClassVar

from outpace.core.drafter import Drafter
from outpace.core.lm import Scores
from outpace.core.sequence import Sequence, Step
from outpace.core.tree import ROOT, Budget, Tree
from outpace.drafting.successor_table import EMPTY, Successors
from outpace.errors import UsageError

MEMORY = 256  # drafted tokens of a rank after which all earlier ones count half
Rows = dict[int, list[int]]  # token -> its successors when the last tree was drafted


@dataclass(eq=False)
class Recycling(Drafter):
    """Token Recycling: drafts likely successors seen in earlier passes.

    A draft token is left out if it is likelier to cost time than to save it. On a GPU it costs next to nothing.
    """

    reads_logits: ClassVar[bool] = True
    k: int = 8
    depth: int = 6
    nodes: int = 48
    price: float | None = None  # least probability of a draft token; None: what a token costs on the target
    _known: Successors = field(init=False, repr=False)
    _offered: list[float] = field(init=False, repr=False)  # how often rank r was drafted under an accepted node
    _matched: list[float] = field(init=False, repr=False)  # how often it was accepted there

    def __post_init__(self) -> None:
        if self.k < 1 or self.depth < 0 or self.nodes < 0 or (self.price is not None and self.price < 0):
            raise UsageError(f"recycling needs k >= 1, depth >= 0, nodes >= 0 and price >= 0, got {self}")
        self._known = Successors(self.k)
        # A prior with the shape that Token Recycling's published template implies: half of the mass is on rank 0.
        self._offered = [8.0] * self.k
        self._matched = [4.0 / (rank + 1) ** 1.5 for rank in range(self.k)]

    @property
    def limit(self) -> Budget:  # type: ignore[override]
        return Budget(self.depth, self.nodes, self.k)

    def propose(self, seq: Sequence, budget: Budget) -> Tree:
        """Grow the tree best-first by the probability of each rank, learned from accepted tokens."""
        rows = seq.state(self, lambda: self._learn_prompt(seq))
        rows.clear()
        weights = [m / o for m, o in zip(self._matched, self._offered, strict=True)]
        tree, ranks = Tree([seq.tokens[-1]]), min(self.k, budget.width)
        root = tree.tokens[ROOT]
        rows[root] = self._known.row(root)  # the text judges it even if nothing is drafted
        least = self.price if self.price is not None else 0.0 if seq.target is None else seq.target.token_price
        # The likeliest path comes first: minus its probability, parent, rank, the parent's probability, depth.
        frontier = [(-weights[0], ROOT, 0, 1.0, 1)]
        while frontier and len(tree) <= budget.nodes and -frontier[0][0] >= least:
            cost, parent, rank, reach, depth = heapq.heappop(frontier)
            row = rows.get(tree.tokens[parent])
            if row is None:
                row = rows[tree.tokens[parent]] = self._known.row(tree.tokens[parent])
            if row[rank] == EMPTY:
                continue
            node = tree.add(parent, row[rank], prob=weights[rank])
            if rank + 1 < ranks:
                heapq.heappush(frontier, (-reach * weights[rank + 1], parent, rank + 1, reach, depth))
            if depth < budget.depth:
                heapq.heappush(frontier, (cost * weights[0], node, 0, -cost, depth + 1))
        return tree

    def observe(self, seq: Sequence, step: Step, scores: Scores) -> None:
        rows = seq.state(self, lambda: self._learn_prompt(seq))
        if self._offered[0] > MEMORY:
            self._offered, self._matched = (
                [count / 2 for count in counts] for counts in (self._offered, self._matched)
            )
        # Count by the table, not by the tree: other methods may have added nodes to it, or a policy removed some.
        for node, choice in zip(step.path, step.tokens, strict=False):
            for rank, token in enumerate(rows.get(step.tree.tokens[node], ())):
                if token != EMPTY:
                    self._offered[rank] += 1
                    self._matched[rank] += token == choice
        rows.clear()
        self._known.learn(step.tree, scores.logits)

    def _learn_prompt(self, seq: Sequence) -> Rows:
        self._known.sized(seq.vocab)
        self._known.learn_text(seq.tokens)
        return Rows()
