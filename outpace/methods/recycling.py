"""Token Recycling: what the target last thought could follow each token, as one static tree of guesses."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.drafter import Drafter
from outpace.models.base import Scores
from outpace.sequence import Sequence, Step
from outpace.tree import ROOT, Budget, Tree

EMPTY = -1
BLOCK = 256  # tokens

Rows = dict[int, list[int]]  # token -> its successors when the last tree was read


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
        rows, table = seq.memory(self, lambda: self._learn_prompt(seq)), self._successors(seq)
        rows.clear()
        weights = [m / o for m, o in zip(self._matched, self._offered, strict=True)]
        tree, ranks = Tree([seq.tokens[-1]]), min(self.k, budget.width)
        # The likeliest comes first: minus its chance, its parent, its rank there, the parent's chance, its depth.
        frontier = [(-weights[0], ROOT, 0, 1.0, 1)]
        while frontier and len(tree) <= budget.nodes:
            cost, parent, rank, reach, depth = heapq.heappop(frontier)
            row = rows.get(tree.tokens[parent])
            if row is None:
                row = rows[tree.tokens[parent]] = table[tree.tokens[parent]].tolist()
            if row[rank] == EMPTY:
                continue
            node = tree.add(parent, row[rank], chance=weights[rank])
            if rank + 1 < ranks:
                heapq.heappush(frontier, (-reach * weights[rank + 1], parent, rank + 1, reach, depth))
            if depth < budget.depth:
                heapq.heappush(frontier, (cost * weights[0], node, 0, -cost, depth + 1))
        return tree

    def observe(self, seq: Sequence, step: Step, scores: Scores) -> None:
        rows, table = seq.memory(self, lambda: self._learn_prompt(seq)), self._successors(seq)
        # By the table, not by the tree: others may have put nodes into it, or taken some out.
        for node, choice in zip(step.path, step.tokens, strict=False):
            for rank, token in enumerate(rows.get(step.tree.tokens[node], ())):
                if token != EMPTY:
                    self._offered[rank] += 1
                    self._matched[rank] += token == choice
        rows.clear()
        last = {token: node for node, token in enumerate(step.tree.tokens)}  # a token that stands twice: the last wins
        successors = likeliest(scores.logits, self.k).to(table)  # [nodes, k]
        table[list(last)] = successors[list(last.values())]

    def _successors(self, seq: Sequence) -> Tensor:
        if self._table is None:
            self._table = torch.full((seq.vocab, self.k), EMPTY)
        return self._table

    def _learn_prompt(self, seq: Sequence) -> Rows:
        """A prompt that is new teaches what follows a token that the target was never asked about."""
        table, tokens = self._successors(seq), torch.tensor(seq.tokens)
        new = table[tokens[:-1], 0] == EMPTY
        table[tokens[:-1][new], 0] = tokens[1:][new]
        return Rows()


def likeliest(logits: Tensor, k: int) -> Tensor:  # [nodes, vocab] -> [nodes, k]
    """The k best tokens in order. On a CPU by blocks: the best lie in the k blocks with the highest tops."""
    nodes, vocab = logits.shape
    if logits.is_cuda or vocab < k * BLOCK:
        return logits.topk(k).indices
    if vocab % BLOCK:
        logits = torch.nn.functional.pad(logits, (0, -vocab % BLOCK), value=-torch.inf)
    blocks = logits.view(nodes, -1, BLOCK)
    best = blocks.amax(-1).topk(k).indices  # [nodes, k]
    found = blocks.gather(1, best[:, :, None].expand(-1, -1, BLOCK)).flatten(1).topk(k).indices
    return best.gather(1, found // BLOCK) * BLOCK + found % BLOCK
