"""Acceptance: estimates the probability that a draft token is accepted, from all requests and from its own request.

Estimates are kept by kind: source, the drafter's own probability, and depth. Kinds with few observations fall back on
similar kinds. Within one request, recent results shift the odds of all draft tokens of a source. They are soon
forgotten, so the estimates follow a change of the text.
"""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass, field

from outpace.core.tree import ROOT, Tree

Kind = tuple[str, int, int]  # source, bin of the drafter's own probability, bucket of the depth

EDGES = (0.03, 0.08, 0.17, 0.3, 0.45, 0.6, 0.75, 0.87, 0.95)  # edges of the bins
CAUTION = 0.85  # factor on a drafter's own probability, assumed to be a little too high until there are observations
PRIORS = [CAUTION * (low + high) / 2 for low, high in zip((0, *EDGES), (*EDGES, 1), strict=True)]
NO_PROBABILITY, UNKNOWN = -1, 0.2  # bin and prior of a draft token without a probability of its own
LEVELS = 12  # maximum depth of a draft model
LEVEL, DRAFTED = -2, 0.6  # bin and prior of "a draft model matches at this depth", at any probability
DEPTHS = (0, 1, 2, 3, 3, 4, 4, 4, 4, 5)  # bucket of each depth; all deeper ones are in the last
BUCKETS = LEVELS + 1
STRENGTH = 6.0  # weight of a prior, in judged draft tokens
KEPT = 0.995  # share of old observations kept at each new draft token of the same kind
LOCAL_KEPT = 0.5 ** (1 / 24)  # observations of a request lose half of their weight after 24 judged positions
LOCAL_STRENGTH = 2.0  # the same as STRENGTH, within one request
LEVEL_STRENGTH = 10.0  # of both, for levels: a draft model that no longer runs gives no new observations
BY_DEPTH = "by depth: "  # prefix of the name of a draft model, for the bias of its levels in a request


def kind(source: str, prob: float | None, depth: int) -> Kind:
    return source, NO_PROBABILITY if prob is None else bisect(EDGES, prob), DEPTHS[min(depth, len(DEPTHS) - 1)]


def level(source: str, depth: int) -> Kind:
    return source, LEVEL, depth


class AcceptanceModel:
    """The acceptance learned from all requests."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int] | Kind, list[float]] = {}  # judged, accepted
        self._known: dict[Kind, float] = {}  # estimates cached until the next observation

    def prob(self, kind: Kind) -> float:
        """Return the probability that a draft token of this kind is accepted, given that its parent is."""
        found = self._known.get(kind)
        if found is None:
            found = self._known[kind] = self._estimate(kind)
        return found

    def _estimate(self, kind: Kind) -> float:
        source, place, _ = kind
        prob = PRIORS[place] if place >= 0 else UNKNOWN if place == NO_PROBABILITY else DRAFTED
        strength = LEVEL_STRENGTH if place == LEVEL else STRENGTH
        for group in ((source, place), kind):  # from the general to the specific
            seen = self._seen.get(group)
            if seen is not None:
                prob = (seen[1] + strength * prob) / (seen[0] + strength)
        return prob

    def learn(self, kind: Kind, right: bool) -> None:
        source, place, _ = kind
        for group in ((source, place), kind):
            seen = self._seen.setdefault(group, [0.0, 0.0])
            seen[0] = KEPT * seen[0] + 1
            seen[1] = KEPT * seen[1] + right
        for bucket in range(BUCKETS):
            self._known.pop((source, place, bucket), None)


class RequestBias:
    """The bias of one source in one request: its judged, accepted and expected draft tokens."""

    __slots__ = ("accepted", "expected", "judged", "odds", "strength")

    def __init__(self, strength: float = LOCAL_STRENGTH) -> None:
        self.strength = strength  # weight of the prior, in draft tokens
        self.judged = self.accepted = self.expected = 0.0
        self.odds = 1.0  # odds of acceptance in this request relative to all requests

    def prob(self, elsewhere: float) -> float:
        return elsewhere * self.odds / (1 - elsewhere + elsewhere * self.odds)

    def learn(self, judged: int, accepted: int, expected: float) -> None:
        """Add the results at one position of the text."""
        self.judged = LOCAL_KEPT * self.judged + judged
        self.accepted = LOCAL_KEPT * self.accepted + accepted
        self.expected = LOCAL_KEPT * self.expected + expected
        good = (self.accepted + self.strength) / (self.expected + self.strength)
        bad = (self.judged - self.accepted + self.strength) / (self.judged - self.expected + self.strength)
        self.odds = good / bad


@dataclass
class Proposal:
    """A tree as it was proposed, and the node that the text has reached in it since."""

    tree: Tree
    kinds: list[Kind]  # of each node; the entry of the root is not used
    probs: list[float]  # of each node given its parent, learned from all requests
    node: int = ROOT
    depth: int = 0


@dataclass
class RequestHistory:
    """The history of one request: the bias of each source, and the last proposals, which coming tokens will judge."""

    local: dict[str, RequestBias] = field(default_factory=dict)
    proposals: list[Proposal] = field(default_factory=list)

    def bias(self, source: str) -> RequestBias:
        found = self.local.get(source)
        if found is None:
            found = self.local[source] = RequestBias(LEVEL_STRENGTH if source.startswith(BY_DEPTH) else LOCAL_STRENGTH)
        return found

    def add(self, proposal: Proposal, most: int) -> None:
        if len(proposal.tree) > 1:
            self.proposals = [*self.proposals[1 - most :], proposal]

    def judge(self, token: int, acceptance: AcceptanceModel, model: str | None) -> None:
        """Judge all draft tokens at this position, verified or not, by the next token of the text."""
        alive = []
        for proposal in self.proposals:
            chosen = proposal.tree.child(proposal.node, token)
            self._judge(proposal, chosen, acceptance)
            if model is not None:
                self._judge_level(proposal, chosen, acceptance, model)
            if chosen is not None:
                proposal.node, proposal.depth = chosen, proposal.depth + 1
                alive.append(proposal)
        self.proposals = alive

    def _judge(self, proposal: Proposal, chosen: int | None, acceptance: AcceptanceModel) -> None:
        counts: dict[str, list[float]] = {}
        for child in proposal.tree.children(proposal.node):
            if child >= len(proposal.kinds):
                break  # added by a verifier
            kind = proposal.kinds[child]
            acceptance.learn(kind, child == chosen)
            count = counts.setdefault(kind[0], [0, 0, 0.0])
            count[0] += 1
            count[1] += child == chosen
            count[2] += proposal.probs[child]
        for source, (judged, right, expected) in counts.items():
            self.bias(source).learn(int(judged), int(right), expected)

    def _judge_level(self, proposal: Proposal, chosen: int | None, acceptance: AcceptanceModel, model: str) -> None:
        """Learn whether any token of the draft model matched at this depth."""
        tree = proposal.tree
        if any(child in tree.signals for child in tree.children(proposal.node)):
            at = level(model, proposal.depth + 1)
            right = chosen is not None and chosen in tree.signals
            self.bias(BY_DEPTH + model).learn(1, int(right), acceptance.prob(at))
            acceptance.learn(at, right)

    def level(self, acceptance: AcceptanceModel, model: str, depth: int) -> float:
        """Return the probability that the draft model matches at this depth, if it matched at all lower depths."""
        return self.bias(BY_DEPTH + model).prob(acceptance.prob(level(model, depth)))
