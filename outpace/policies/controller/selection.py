"""Selection: ranks the draft tokens of all requests in a pass by probability, and chooses how many to verify."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from outpace.core.sequence import Sequence
from outpace.core.tree import ROOT, Budget, Decision, Tree

MIN_PROBABILITY = 0.005  # draft tokens below this probability are ignored
PAUSED = Decision(0, 0, 1.0, 1.0, "paused: drafting cost more than it saved")


class RankedNode(NamedTuple):
    """A candidate for verification."""

    reach: float  # probability that it is accepted
    plan: int  # index of its request's plan
    node: int


@dataclass
class RequestPlan:
    """The plan of one request for a pass."""

    seq: Sequence
    tree: Tree
    budget: Budget
    depths: list[int] = field(default_factory=lambda: [0])  # of each node
    reach: list[float] = field(default_factory=lambda: [1.0])  # probability of each node to be accepted
    alone: list[bool] = field(default_factory=lambda: [True])  # whether each node was proposed without the draft model
    kept: list[int] = field(default_factory=lambda: [ROOT])  # nodes to verify
    levels: int = 0  # levels drafted by a draft model
    fresh: bool = False  # its times are not typical, because the prompt is read first
    probing: bool = False  # it tries a draft model that did not pay before

    @property
    def expected(self) -> float:
        """Number of tokens that it is expected to commit."""
        return sum(self.reach[node] for node in self.kept)

    def verified(self, speedup: float) -> Tree:
        """Return the tree to score, with the reason for its size."""
        drafted, kept = len(self.tree) - 1, len(self.kept) - 1
        if self.probing:
            reason = "probing: testing whether the draft model pays now"
        elif not drafted:
            reason = "no draft token was proposed"
        else:
            reason = "on: these draft tokens pay" if kept else "off: no draft token is worth its cost"
        tree = self.tree.select(sorted(self.kept))
        tree.decision = Decision(drafted, kept, round(self.expected, 4), round(speedup, 4), reason)
        return tree


class Choice(NamedTuple):
    """How many of the likeliest draft tokens to verify, and the speed-up expected from it."""

    taken: int
    speedup: float  # over a pass without draft tokens and without the time of drafting


def likeliest(plans: list[RequestPlan]) -> list[RankedNode]:
    """Rank the draft tokens of all requests: likelier first, parents before children, each within its budget."""
    candidates = [
        (-reach, i, node)
        for i, plan in enumerate(plans)
        if not plan.tree.proposals
        for node, reach in enumerate(plan.reach)
        if node != ROOT and reach > MIN_PROBABILITY
    ]
    found, used, left = [], [{ROOT: 0} for _ in plans], [plan.budget.nodes for plan in plans]
    for negated, i, node in sorted(candidates):
        plan, children = plans[i], used[i]
        parent, width = plan.tree.parents[node], plan.budget.width
        if plan.depths[node] <= plan.budget.depth and left[i] > 0 and children.get(parent, width) < width:
            children[parent] += 1
            children[node] = 0
            left[i] -= 1
            found.append(RankedNode(-negated, i, node))
    return found


@dataclass(frozen=True)
class PassOffer:
    """The terms of a pass: its batch size, its cost by number of draft tokens, and the least gain that counts."""

    batch_size: int  # requests in the pass
    seconds: Callable[[int], float]  # number of draft tokens -> seconds of the pass
    margin: float  # relative gain that counts as none
    exposed: float = 0.0  # seconds of host work that overlap with the device only if the next pass waits for no draft

    def choose(self, order: list[RankedNode], spent: float, forced: Seq[float] = ()) -> Choice:
        """Choose how many of the likeliest draft tokens to verify, to maximize tokens per second.

        `spent` are the seconds already spent on drafting. Draft tokens with the probabilities `forced` are always in
        the pass.
        """
        tokens, waited = self.batch_size + sum(forced), spent + self.exposed
        taken, best = 0, tokens / (self.seconds(len(forced)) + (waited if forced else spent))
        least = best * (1 + self.margin)
        for count, candidate in enumerate(order, start=1):
            tokens += candidate.reach
            rate = tokens / (self.seconds(len(forced) + count) + waited)
            if rate > best and rate > least:
                taken, best = count, rate
        return Choice(taken, best * self.seconds(0) / self.batch_size)
