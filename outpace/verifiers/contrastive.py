"""The verifier "contrastive": contrastive search, with its candidates verified as nodes of a tree."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from outpace.core.layout import Layout
from outpace.core.sequence import Sequence, Step
from outpace.core.tree import ROOT, Tree
from outpace.core.verifier import Verifier
from outpace.errors import UsageError
from outpace.verifiers.lossy import warm_distribution

if TYPE_CHECKING:
    from outpace.core.lm import Scores


@dataclass(frozen=True)
class Contrastive(Verifier):
    """Contrastive search: choose the one of the `k` likeliest tokens that is least similar to the text. Not sampling.

    The choice at a node needs the hidden states of its k candidates, so they must be in the tree. The candidates of
    the root come from the previous pass. At a node with missing candidates the walk stops without a choice.
    """

    needs_trees: ClassVar[bool] = True
    taps: ClassVar[tuple[int, ...]] = (-1,)
    alpha: float = 0.6
    k: int = 4

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1 or self.k < 1:
            raise UsageError(f"contrastive search needs 0 <= alpha <= 1 and k >= 1, got {self.alpha} and {self.k}")

    def prepare(self, seq: Sequence, layout: Layout) -> Layout:
        tree = layout
        assert isinstance(tree, Tree), "candidates are children of a tree's root"
        for token in seq.state(self, list[int]):
            tree.add(ROOT, token, source="contrastive")
        return tree

    def verify(self, seq: Sequence, tree: Tree, scores: Scores) -> Step:
        assert scores.hidden is not None, "contrastive search reads hidden states"
        start, path = len(seq.tokens), [ROOT]
        past = [] if seq.hidden is None else [seq.hidden]
        candidates = seq.state(self, list[int])
        while True:
            node = path[-1]
            past.append(scores.hidden[node : node + 1])
            distribution = warm_distribution(seq, scores.logits[node])
            candidates[:] = torch.topk(distribution, min(self.k, distribution.numel())).indices.tolist()
            children = [tree.child(node, token) for token in candidates]
            if None in children:
                break
            child = self._best(distribution[candidates], torch.cat(past), scores.hidden[children], children)
            path.append(child)
            if seq.push(tree.tokens[child], scores, node):
                break
        return Step(tree, path, seq.tokens[start:], path[:-1])

    def _best(self, distribution: Tensor, past: Tensor, candidates: Tensor, children: Seq[int | None]) -> int:
        past, candidates = (torch.nn.functional.normalize(x.double(), dim=-1) for x in (past, candidates))
        alike = (candidates @ past.T).max(-1).values  # [k]
        child = children[int(((1 - self.alpha) * distribution - self.alpha * alike).argmax())]
        assert child is not None
        return child
