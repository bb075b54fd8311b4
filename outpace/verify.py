"""Verifiers: which nodes of a tree are accepted, and what is emitted.

root      node 0: the last committed token, not yet in the cache
node      a guessed token; its parent is the token before it
choice    what the target picks at a node, after the tokens on the way to it
path      the accepted nodes, root first: each is its parent's choice
accepted  choices that were found in the tree
next      the choice at the last accepted node: it is emitted too and becomes the new root
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import Tensor

from outpace.errors import RequestFailed, UsageError
from outpace.sample import Pick
from outpace.sequence import Sequence, Step
from outpace.tree import ROOT, Tree

if TYPE_CHECKING:
    from outpace.models.base import Scores


class Verifier:
    """Base of all verifiers: what most of them leave as it is."""

    lossless: ClassVar[bool] = True
    shares_noise: ClassVar[bool] = True  # a drafter may draw with the target's own noise
    needs_trees: ClassVar[bool] = False
    taps: ClassVar[tuple[int, ...]] = ()  # hidden states it reads, as indices of Transformers' `hidden_states`

    def prepare(self, seq: Sequence, tree: Tree) -> Tree:
        """The tree to score: the drafted one, with whatever this rule needs to see."""
        return tree

    def pick(self, seq: Sequence) -> Pick | None:
        """A choice that the model may make itself at every node; None when this rule wants to see the logits."""
        return None

    def verify(self, seq: Sequence, tree: Tree, scores: Scores) -> Step:
        """Commit tokens to `seq` and say which nodes they were."""
        raise NotImplementedError


@dataclass(frozen=True)
class Match(Verifier):
    """The target makes its own choice at a node; descend while the choice is in the tree."""

    def pick(self, seq: Sequence) -> Pick | None:
        return seq.sampler.pick

    def verify(self, seq: Sequence, tree: Tree, scores: Scores) -> Step:
        logits = scores.logits  # [nodes, vocab]
        if scores.chosen is not None:
            return _descend(seq, tree, logits, _made(seq, scores.chosen.tokens, scores.chosen.best))
        if seq.sampler.plain:
            best = logits.max(-1)
            return _descend(seq, tree, logits, _made(seq, best.indices.tolist(), best.values.tolist()))
        return _descend(seq, tree, logits, lambda node: seq.sampler.choose(logits[node], seq.tokens))


@dataclass(frozen=True)
class Typical(Verifier):
    """Accept a drafted token that is likely enough for the law's entropy (Medusa). Lossy."""

    lossless: ClassVar[bool] = False
    epsilon: float = 0.09
    delta: float = 0.3

    def verify(self, seq: Sequence, tree: Tree, scores: Scores) -> Step:
        def choose(node: int) -> int:
            law = _warm_law(seq, scores.logits[node])
            entropy = torch.special.entr(law).sum()
            floor = min(self.epsilon, self.delta * float(torch.exp(-entropy)))
            likely = [(float(law[tree.tokens[c]]), tree.tokens[c]) for c in tree.children(node)]
            prob, token = max(likely, default=(0.0, -1))
            return token if prob > floor else seq.sampler.choose(scores.logits[node], seq.tokens)

        return _descend(seq, tree, scores.logits, choose)


@dataclass(frozen=True)
class Tiered(Verifier):
    """Take what the method vouches for unasked; the target chooses where it does not (VIA-SD). Lossy."""

    lossless: ClassVar[bool] = False

    def verify(self, seq: Sequence, tree: Tree, scores: Scores) -> Step:
        def choose(node: int) -> int:
            vouched = next((child for child in tree.children(node) if child in tree.trusted), None)
            if vouched is not None:
                return tree.tokens[vouched]
            return seq.sampler.choose(scores.logits[node], seq.tokens)

        return _descend(seq, tree, scores.logits, choose)


def _warm_law(seq: Sequence, logits: Tensor) -> Tensor:
    """The law under the sampling settings; under greedy decoding, the law the model itself gives."""
    shaped = seq.sampler.shape(logits, seq.tokens)
    return shaped.double().softmax(-1)


def _made(seq: Sequence, tokens: Seq[int], values: list[float]) -> Callable[[int], int]:
    """Choices that were made at all nodes at once."""

    def choose(node: int) -> int:
        if not abs(values[node]) < float("inf"):  # false for NaN too
            raise RequestFailed(f"the model gave non-finite logits at position {len(seq.tokens)}")
        return tokens[node]

    return choose


def _descend(seq: Sequence, tree: Tree, logits: Tensor, choose: Callable[[int], int]) -> Step:
    start, path = len(seq.tokens), [ROOT]
    while True:
        node = path[-1]
        token = choose(node)
        child = tree.child(node, token)
        if child is not None:
            path.append(child)
        if seq.push(token, logits, node) or child is None:
            return Step(tree, path, seq.tokens[start:], path)


class Chance(Protocol):
    """Where the residual rule gets its randomness; tests enumerate every outcome instead."""

    def flip(self, prob: float) -> bool: ...

    def draw(self, weights: Tensor) -> int: ...  # [vocab]


@dataclass(frozen=True)
class Keyed:
    """Chance from the request's seed, fresh in every pass."""

    seq: Sequence
    counter: list[int]

    def flip(self, prob: float) -> bool:
        return self._uniform() < prob

    def draw(self, weights: Tensor) -> int:
        total = weights.cumsum(-1)
        index = torch.searchsorted(total, total[-1:] * self._uniform(), right=True)
        return int(index.clamp(max=weights.numel() - 1))

    def _uniform(self) -> float:
        self.counter[0] += 1
        return self.seq.sampler.uniform(self.seq.stats.passes, self.counter[0], 2)


@dataclass(frozen=True)
class Residual(Verifier):
    """Traversal verification; on a chain it is block verification. Keeps the law, not the seed, and accepts more.

    Children of a node in `tree.probs` must have been drawn from that law, in order, without replacement; others count
    as certain guesses.
    """

    shares_noise: ClassVar[bool] = False

    def verify(self, seq: Sequence, tree: Tree, scores: Scores) -> Step:
        def law(node: int) -> Tensor:
            prefix = seq.tokens + [tree.tokens[n] for n in tree.path(node)[1:]]
            return seq.sampler.law(scores.logits[node], prefix)

        accepted, next_token = traverse(tree, law, Keyed(seq, [0]))
        start, path = len(seq.tokens), [ROOT]
        for child in accepted[1:]:
            path.append(child)
            if seq.push(tree.tokens[child], scores.logits, tree.parents[child]):
                return Step(tree, path, seq.tokens[start:], path)
        seq.push(next_token, scores.logits, path[-1])
        return Step(tree, path, seq.tokens[start:], path)


def traverse(tree: Tree, law: Callable[[int], Tensor], chance: Chance) -> tuple[list[int], int]:
    """Accepted path and next token: leaves first, each rejection moving what is left of the law to the rest."""
    stack = [Visit.of(tree, ROOT, 1.0, law)]
    while True:
        visit = stack[-1]
        child = next(visit.children, None)
        if child is not None:
            reach = visit.offer(tree.tokens[child])
            if reach > 0:  # else it cannot be accepted, and its law need not even exist
                stack.append(Visit.of(tree, child, reach, law))
            else:
                visit.reject(tree.tokens[child])
        elif chance.flip(visit.reach) or visit.node == ROOT:  # by rounding alone the root could miss
            return tree.path(visit.node), chance.draw(visit.p)
        else:
            stack.pop()
            stack[-1].reject(tree.tokens[visit.node])


@dataclass
class Visit:
    """A node that is being looked at: its chance of acceptance, and what is left of the two laws at it."""

    node: int
    reach: float
    children: Iterator[int]
    p: Tensor  # [vocab]
    q: Tensor | None  # [vocab]; None when its children are certain guesses

    @classmethod
    def of(cls, tree: Tree, node: int, reach: float, law: Callable[[int], Tensor]) -> Visit:
        p, q = law(node), tree.probs.get(node)
        return cls(node, reach, iter(tree.children(node)), p, None if q is None else q.to(p))

    def offer(self, token: int) -> float:
        """The chance that the child with this token is accepted, if nothing below it is."""
        guess = 1.0 if self.q is None else max(float(self.q[token]), 1e-300)
        return min(1.0, self.reach * float(self.p[token]) / guess)

    def reject(self, token: int) -> None:
        at = torch.tensor(token, device=self.p.device)
        guess = torch.zeros_like(self.p).index_fill_(0, at, 1.0) if self.q is None else self.q
        rest = (self.reach * self.p - guess).clamp(min=0)
        mass = float(rest.sum())
        self.reach = mass / (mass + (1 - self.reach)) if mass + (1 - self.reach) > 0 else 1.0
        self.p = rest / mass if mass > 0 else self.p  # no mass is left by rounding only: keep the law
        if self.q is not None:
            left = self.q.index_fill(0, at, 0.0)
            self.q = left / left.sum().clamp(min=1e-300)


@dataclass(frozen=True)
class Contrastive(Verifier):
    """Contrastive search: among the `k` likeliest tokens, the one least like what was said. Changes the rule.

    The choice at a node needs the hidden states of its k candidates, so they must be in the tree: those of the root
    are added from what the pass before said of it. A node whose candidates are missing ends the walk undecided.
    """

    needs_trees: ClassVar[bool] = True
    taps: ClassVar[tuple[int, ...]] = (-1,)
    alpha: float = 0.6
    k: int = 4

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1 or self.k < 1:
            raise UsageError(f"contrastive search needs 0 <= alpha <= 1 and k >= 1, got {self.alpha} and {self.k}")

    def prepare(self, seq: Sequence, tree: Tree) -> Tree:
        for token in seq.memory(self, list[int]):
            tree.add(ROOT, token, source="contrastive")
        return tree

    def verify(self, seq: Sequence, tree: Tree, scores: Scores) -> Step:
        assert scores.hidden is not None, "contrastive search reads hidden states"
        start, path = len(seq.tokens), [ROOT]
        past = [] if seq.hidden is None else [seq.hidden]
        candidates = seq.memory(self, list[int])
        while True:
            node = path[-1]
            past.append(scores.hidden[node : node + 1])
            law = _warm_law(seq, scores.logits[node])
            candidates[:] = torch.topk(law, min(self.k, law.numel())).indices.tolist()
            children = [tree.child(node, token) for token in candidates]
            if None in children:
                break
            child = self._best(law[candidates], torch.cat(past), scores.hidden[children], children)
            path.append(child)
            if seq.push(tree.tokens[child], scores.logits, node):
                break
        return Step(tree, path, seq.tokens[start:], path[:-1])

    def _best(self, law: Tensor, past: Tensor, candidates: Tensor, children: Seq[int | None]) -> int:
        past, candidates = (torch.nn.functional.normalize(x.double(), dim=-1) for x in (past, candidates))
        alike = (candidates @ past.T).max(-1).values  # [k]
        child = children[int(((1 - self.alpha) * law - self.alpha * alike).argmax())]
        assert child is not None
        return child
