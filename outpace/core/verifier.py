"""Verifiers: which nodes of a tree are accepted, and what is emitted.

root      node 0: the last committed token, not yet in the cache
node      a guessed token; its parent is the token before it
choice    what the target picks at a node, after the tokens on the way to it
path      the accepted nodes, root first: each is its parent's choice
accepted  choices that were found in the tree
next      the choice at the last accepted node: it is emitted too and becomes the new root
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from outpace.core.layout import Layout
from outpace.core.sequence import Sequence, Step
from outpace.core.tree import ROOT, Tree
from outpace.errors import RequestFailed
from outpace.sampling.sampler import Pick

if TYPE_CHECKING:
    from outpace.core.lm import Logits, Scores


class Verifier:
    """Base of all verifiers: what most of them leave as it is."""

    lossless: ClassVar[bool] = True
    shares_noise: ClassVar[bool] = True  # a drafter may draw with the target's own noise
    needs_trees: ClassVar[bool] = False
    taps: ClassVar[tuple[int, ...]] = ()  # hidden states it reads, as indices of Transformers' `hidden_states`

    def prepare(self, seq: Sequence, layout: Layout) -> Layout:
        """The layout to score: the drafted one, with whatever this rule needs to see."""
        return layout

    def pick(self, seq: Sequence) -> Pick | None:
        """A choice that the model may make itself at every node; None when this rule wants to see the logits."""
        return None

    def verify(self, seq: Sequence, tree: Any, scores: Scores) -> Step:
        """Commit tokens to `seq` and say which nodes they were. A rule for other layouts than trees says so itself."""
        raise NotImplementedError


@dataclass(frozen=True)
class Match(Verifier):
    """The target makes its own choice at a node; descend while the choice is in the tree."""

    def pick(self, seq: Sequence) -> Pick | None:
        return seq.sampler.pick

    def verify(self, seq: Sequence, tree: Tree, scores: Scores) -> Step:
        logits = scores.logits
        if scores.picked is not None:
            return descend(seq, tree, logits, _made(seq, scores.picked.tokens, scores.picked.best))
        if seq.sampler.plain:
            best = logits.all().max(-1)
            return descend(seq, tree, logits, _made(seq, best.indices.tolist(), best.values.tolist()))
        return descend(seq, tree, logits, lambda node: seq.sampler.choose(logits[node], seq.tokens))


def _made(seq: Sequence, tokens: Seq[int], values: list[float]) -> Callable[[int], int]:
    """Choices that were made at all nodes at once."""

    def choose(node: int) -> int:
        if not abs(values[node]) < float("inf"):  # false for NaN too
            raise RequestFailed(f"the model gave non-finite logits at position {len(seq.tokens)}")
        return tokens[node]

    return choose


def descend(seq: Sequence, tree: Tree, logits: Logits, choose: Callable[[int], int]) -> Step:
    start, path = len(seq.tokens), [ROOT]
    while True:
        node = path[-1]
        token = choose(node)
        child = tree.child(node, token)
        if child is not None:
            path.append(child)
        if seq.push(token, logits, node) or child is None:
            return Step(tree, path, seq.tokens[start:], path)
