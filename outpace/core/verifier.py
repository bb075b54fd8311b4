"""Verifiers: the rules that accept draft tokens and commit tokens after a pass.

root      node 0: the last committed token, not yet in the cache
node      a draft token; its parent is the token before it
choice    the token that the target picks at a node, after the tokens on the path to it
path      the accepted nodes, root first: each is the choice at its parent
accepted  choices that were found in the tree
next      the choice at the last accepted node: it is committed too and becomes the new root
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from outpace.core.layout import Layout
from outpace.core.sequence import Sequence, Step
from outpace.core.tree import ROOT, Tree
from outpace.errors import RequestFailed
from outpace.sampling.logprobs import MOST_ON_DEVICE
from outpace.sampling.sampler import Pick

if TYPE_CHECKING:
    from outpace.core.lm import Scores


class Verifier:
    """Base class of all verifiers, with the defaults that most of them keep."""

    lossless: ClassVar[bool] = True
    shares_noise: ClassVar[bool] = True  # a drafter may sample with the target's own noise
    needs_trees: ClassVar[bool] = False
    taps: ClassVar[tuple[int, ...]] = ()  # hidden states it reads, as indices into Transformers' `hidden_states`

    def prepare(self, seq: Sequence, layout: Layout) -> Layout:
        """Return the layout to score: the drafted one, plus any nodes that this rule needs."""
        return layout

    def pick(self, seq: Sequence) -> Pick | None:
        """Return the choice that the model may make itself at every node; None if this rule needs the logits."""
        return None

    def verify(self, seq: Sequence, tree: Any, scores: Scores) -> Step:
        """Commit tokens to `seq` and return their nodes; `tree` is a `Tree` unless a rule declares another layout."""
        raise NotImplementedError


@dataclass(frozen=True)
class Match(Verifier):
    """Let the target make its own choice at each node, and descend while that choice is in the tree."""

    def pick(self, seq: Sequence) -> Pick | None:
        if seq.target is None or not seq.target.late_choices:
            return seq.sampler.pick
        pick, count = seq.sampler.edited_pick, seq.limits.logprobs
        if pick is None or count is None or count > MOST_ON_DEVICE or seq.limits.processed:
            return pick
        return replace(pick, logprobs=count)

    def verify(self, seq: Sequence, tree: Tree, scores: Scores) -> Step:
        if scores.picked is not None:
            return descend(seq, tree, scores, _lookup(seq, scores, scores.picked.tokens, scores.picked.best))
        if seq.sampler.plain:
            best = scores.logits.likeliest()
            return descend(seq, tree, scores, _lookup(seq, scores, best.tokens, best.logits))
        return descend(seq, tree, scores, lambda node: seq.sampler.choose(scores.logits.peek(node), seq.tokens))


def _lookup(seq: Sequence, scores: Scores, tokens: Seq[int], values: list[float]) -> Callable[[int], int]:
    """Return a function that looks up choices already made for all nodes at once."""

    def choose(node: int) -> int:
        if not abs(values[node]) < float("inf"):  # false for NaN too
            seq.sampler.process(scores.logits[node], seq.tokens)  # raises an error that says why
            raise RequestFailed(f"the model returned non-finite logits at position {len(seq.tokens)}")
        return tokens[node]

    return choose


def descend(seq: Sequence, tree: Tree, scores: Scores, choose: Callable[[int], int]) -> Step:
    start, path = len(seq.tokens), [ROOT]
    while True:
        node = path[-1]
        token = choose(node)
        child = tree.child(node, token)
        if child is not None:
            path.append(child)
        if seq.push(token, scores, node) or child is None:
            return Step(tree, path, seq.tokens[start:], path)
