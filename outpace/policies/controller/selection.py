"""Pool: the guesses of all requests of a pass, in the order in which they are worth verifying, and how many to take."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from outpace.core.sequence import Sequence
from outpace.core.tree import ROOT, Budget, Decision, Tree

HOPELESS = 0.005  # probability of a guess that is not worth a thought
RESTING = Decision(0, 0, 1.0, 1.0, "resting: asking cost more than it saved")


class RankedNode(NamedTuple):
    """A node that could be verified."""

    reach: float  # probability that it is accepted
    plan: int
    node: int


@dataclass
class RequestPlan:
    """One request's part in a pass."""

    seq: Sequence
    tree: Tree
    budget: Budget
    depths: list[int] = field(default_factory=lambda: [0])  # of each node
    reach: list[float] = field(default_factory=lambda: [1.0])  # probability of each node that it is accepted
    alone: list[bool] = field(default_factory=lambda: [True])  # whether it is there without the draft model
    kept: list[int] = field(default_factory=lambda: [ROOT])  # nodes that are verified
    levels: int = 0  # that a draft model drafted
    fresh: bool = False  # what it takes is not what it takes later: something reads the prompt first
    probing: bool = False  # a draft model is tried that did not pay

    @property
    def expected(self) -> float:
        """Tokens that it will commit."""
        return sum(self.reach[node] for node in self.kept)

    def verified(self, speedup: float) -> Tree:
        """The tree that is scored, and why."""
        drafted, kept = len(self.tree) - 1, len(self.kept) - 1
        if self.probing:
            reason = "probing: does the draft model pay by now?"
        elif not drafted:
            reason = "nobody had a guess"
        else:
            reason = "on: these guesses pay" if kept else "off: no guess is worth its row"
        tree = self.tree.select(sorted(self.kept))
        tree.decision = Decision(drafted, kept, round(self.expected, 4), round(speedup, 4), reason)
        return tree


class Choice(NamedTuple):
    """How many of the likeliest guesses to take, and what that gives."""

    taken: int
    speedup: float  # over a pass without guesses, and without the time they took to make


def likeliest(plans: list[RequestPlan]) -> list[RankedNode]:
    """Guesses in the order in which they are taken: likelier first, parents before children, each within its budget."""
    guesses = [
        (-reach, i, node)
        for i, plan in enumerate(plans)
        if not plan.tree.proposals
        for node, reach in enumerate(plan.reach)
        if node != ROOT and reach > HOPELESS
    ]
    found, used, left = [], [{ROOT: 0} for _ in plans], [plan.budget.nodes for plan in plans]
    for cost, i, node in sorted(guesses):
        plan, children = plans[i], used[i]
        parent, width = plan.tree.parents[node], plan.budget.width
        if plan.depths[node] <= plan.budget.depth and left[i] > 0 and children.get(parent, width) < width:
            children[parent] += 1
            children[node] = 0
            left[i] -= 1
            found.append(RankedNode(-cost, i, node))
    return found


@dataclass(frozen=True)
class PassOffer:
    """What the pass offers: who shares it, what it costs by the guesses in it, and how little gain is none."""

    rows: int
    seconds: Callable[[int], float]
    margin: float
    exposed: float = 0.0  # seconds of the host that are hidden only where the next pass waits for no guesses

    def choose(self, order: list[RankedNode], spent: float, forced: Seq[float] = ()) -> Choice:
        """So many of the likeliest guesses that tokens per second are most.

        `spent` was spent on guessing already; guesses with the probabilities `forced` are in the pass in any case.
        """
        tokens, waited = self.rows + sum(forced), spent + self.exposed
        taken, best = 0, tokens / (self.seconds(len(forced)) + (waited if forced else spent))
        least = best * (1 + self.margin)
        for count, guess in enumerate(order, start=1):
            tokens += guess.reach
            rate = tokens / (self.seconds(len(forced) + count) + waited)
            if rate > best and rate > least:
                taken, best = count, rate
        return Choice(taken, best * self.seconds(0) / self.rows)
