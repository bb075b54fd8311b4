"""The verifier "residual": traversal verification, which keeps the distribution but not the output of a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import Tensor

from outpace.core.sequence import Sequence, Step
from outpace.core.tree import ROOT, Tree
from outpace.core.verifier import Verifier

if TYPE_CHECKING:
    from outpace.core.lm import Scores


class RandomSource(Protocol):
    """The source of randomness for residual verification; tests enumerate every outcome instead."""

    def flip(self, prob: float) -> bool: ...

    def draw(self, weights: Tensor) -> int: ...  # [vocab]


@dataclass(frozen=True)
class KeyedRandom:
    """Random numbers from the request's seed, new in every pass."""

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
    """Traversal verification (block verification on a chain): keeps the distribution, not the seed; accepts more.

    The children of a node in `tree.proposals` must have been sampled from that distribution, in order, without
    replacement. Other children count as proposed with probability 1.
    """

    shares_noise: ClassVar[bool] = False

    def verify(self, seq: Sequence, tree: Tree, scores: Scores) -> Step:
        def distribution(node: int) -> Tensor:
            prefix = seq.tokens + [tree.tokens[n] for n in tree.path(node)[1:]]
            return seq.sampler.distribution(scores.logits[node], prefix)

        accepted, next_token = traverse(tree, distribution, KeyedRandom(seq, [0]))
        start, path = len(seq.tokens), [ROOT]
        for child in accepted[1:]:
            path.append(child)
            if seq.push(tree.tokens[child], scores, tree.parents[child]):
                return Step(tree, path, seq.tokens[start:], path)
        seq.push(next_token, scores, path[-1])
        return Step(tree, path, seq.tokens[start:], path)


def traverse(tree: Tree, distribution: Callable[[int], Tensor], random: RandomSource) -> tuple[list[int], int]:
    """Return the accepted path and the next token. Leaves are tried first; each rejection leaves the residual
    distribution to the remaining candidates."""
    stack = [Visit.begin(tree, ROOT, 1.0, distribution)]
    while True:
        visit = stack[-1]
        child = next(visit.children, None)
        if child is not None:
            reach = visit.offer(tree.tokens[child])
            if reach > 0:  # otherwise it cannot be accepted, and its distribution may not even exist
                stack.append(Visit.begin(tree, child, reach, distribution))
            else:
                visit.reject(tree.tokens[child])
        elif random.flip(visit.reach) or visit.node == ROOT:  # only rounding could reject the root
            return tree.path(visit.node), random.draw(visit.p)
        else:
            stack.pop()
            stack[-1].reject(tree.tokens[visit.node])


@dataclass
class Visit:
    """A node under traversal: its probability of acceptance, and the residuals of the two distributions there."""

    node: int
    reach: float
    children: Iterator[int]
    p: Tensor  # [vocab]
    q: Tensor | None  # [vocab]; None if its children count as proposed with probability 1

    @classmethod
    def begin(cls, tree: Tree, node: int, reach: float, distribution: Callable[[int], Tensor]) -> Visit:
        p, q = distribution(node), tree.proposals.get(node)
        return cls(node, reach, iter(tree.children(node)), p, None if q is None else q.to(p))

    def offer(self, token: int) -> float:
        """Return the probability of accepting the child with this token, if nothing below it is accepted."""
        proposed = 1.0 if self.q is None else max(float(self.q[token]), 1e-300)
        return min(1.0, self.reach * float(self.p[token]) / proposed)

    def reject(self, token: int) -> None:
        at = torch.tensor(token, device=self.p.device)
        proposed = torch.zeros_like(self.p).index_fill_(0, at, 1.0) if self.q is None else self.q
        rest = (self.reach * self.p - proposed).clamp(min=0)
        mass = float(rest.sum())
        self.reach = mass / (mass + (1 - self.reach)) if mass + (1 - self.reach) > 0 else 1.0
        self.p = rest / mass if mass > 0 else self.p  # only rounding can leave no mass: keep the distribution
        if self.q is not None:
            left = self.q.index_fill(0, at, 0.0)
            self.q = left / left.sum().clamp(min=1e-300)
