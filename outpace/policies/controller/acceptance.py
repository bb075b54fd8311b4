"""Calibration: how often guesses of a kind turn out right, over all requests and in one of them.

A kind is who guessed, how sure it was, and how deep. Kinds that were seldom seen take after their like. What one
request shows shifts the odds of all guesses of a source in it, and is soon forgotten: a change of text is followed.
"""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass, field

from outpace.core.tree import ROOT, Tree

Kind = tuple[str, int, int]  # source, bin of the drafter's own probability, bucket of the depth

EDGES = (0.03, 0.08, 0.17, 0.3, 0.45, 0.6, 0.75, 0.87, 0.95)  # of the bins
CAUTION = 0.85  # a drafter's own probability is taken to be a little too high until it is known
PRIORS = [CAUTION * (low + high) / 2 for low, high in zip((0, *EDGES), (*EDGES, 1), strict=True)]
UNSAID, UNKNOWN = -1, 0.2  # bin and prior of a guess whose drafter says nothing about its probability
LEVELS = 12  # the deepest that a draft model is asked for
LEVEL, DRAFTED = -2, 0.6  # bin and prior of "a draft model is right at this depth", however sure it was
DEPTHS = (0, 1, 2, 3, 3, 4, 4, 4, 4, 5)  # bucket of each depth; all deeper ones are in the last
BUCKETS = LEVELS + 1
STRENGTH = 6.0  # judged guesses that a prior counts for
KEPT = 0.995  # of what is known, at each new guess of the same kind
LOCAL_KEPT = 0.5 ** (1 / 24)  # half of what a request showed is forgotten after 24 judged places
LOCAL_STRENGTH = 2.0
LEVEL_STRENGTH = 10.0  # of both kinds, for levels: a draft model that was given up shows nothing more
BY_DEPTH = "by depth: "  # before the name of a draft model: what a request showed of its levels


def kind(source: str, prob: float | None, depth: int) -> Kind:
    return source, UNSAID if prob is None else bisect(EDGES, prob), DEPTHS[min(depth, len(DEPTHS) - 1)]


def level(source: str, depth: int) -> Kind:
    return source, LEVEL, depth


class AcceptanceModel:
    """What was learned from all requests."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int] | Kind, list[float]] = {}  # judged, right
        self._known: dict[Kind, float] = {}  # probabilities that were asked for since something was learned of them

    def prob(self, kind: Kind) -> float:
        """That a guess of this kind is right, given that its parent is."""
        found = self._known.get(kind)
        if found is None:
            found = self._known[kind] = self._estimate(kind)
        return found

    def _estimate(self, kind: Kind) -> float:
        source, place, _ = kind
        prob = PRIORS[place] if place >= 0 else UNKNOWN if place == UNSAID else DRAFTED
        strength = LEVEL_STRENGTH if place == LEVEL else STRENGTH
        for group in ((source, place), kind):  # from the common to the particular
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
    """What one request showed of one source: guesses judged, right, and right ones expected."""

    __slots__ = ("expected", "judged", "odds", "right", "strength")

    def __init__(self, strength: float = LOCAL_STRENGTH) -> None:
        self.strength = strength  # guesses that it takes to be believed
        self.judged = self.right = self.expected = 0.0
        self.odds = 1.0  # by how much the odds of a guess are better here than elsewhere

    def prob(self, elsewhere: float) -> float:
        return elsewhere * self.odds / (1 - elsewhere + elsewhere * self.odds)

    def learn(self, judged: int, right: int, expected: float) -> None:
        """What one place of the text said."""
        self.judged = LOCAL_KEPT * self.judged + judged
        self.right = LOCAL_KEPT * self.right + right
        self.expected = LOCAL_KEPT * self.expected + expected
        good = (self.right + self.strength) / (self.expected + self.strength)
        bad = (self.judged - self.right + self.strength) / (self.judged - self.expected + self.strength)
        self.odds = good / bad


@dataclass
class Proposal:
    """A tree as it was proposed, and how far down the text has followed it since."""

    tree: Tree
    kinds: list[Kind]  # of each node; nobody asks for that of the root
    probs: list[float]  # of each node, by all requests, given its parent
    node: int = ROOT
    depth: int = 0


@dataclass
class RequestHistory:
    """One request: what it showed of each source, and its last proposals, which the coming tokens will judge."""

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

    def judge(self, token: int, calibrator: AcceptanceModel, model: str | None) -> None:
        """The text went on with `token`: every guess at this place was right or wrong, verified or not."""
        alive = []
        for proposal in self.proposals:
            chosen = proposal.tree.child(proposal.node, token)
            self._judge(proposal, chosen, calibrator)
            if model is not None:
                self._judge_level(proposal, chosen, calibrator, model)
            if chosen is not None:
                proposal.node, proposal.depth = chosen, proposal.depth + 1
                alive.append(proposal)
        self.proposals = alive

    def _judge(self, proposal: Proposal, chosen: int | None, calibrator: AcceptanceModel) -> None:
        counts: dict[str, list[float]] = {}
        for child in proposal.tree.children(proposal.node):
            if child >= len(proposal.kinds):
                break  # a verifier put it there
            kind = proposal.kinds[child]
            calibrator.learn(kind, child == chosen)
            count = counts.setdefault(kind[0], [0, 0, 0.0])
            count[0] += 1
            count[1] += child == chosen
            count[2] += proposal.probs[child]
        for source, (judged, right, expected) in counts.items():
            self.bias(source).learn(int(judged), int(right), expected)

    def _judge_level(self, proposal: Proposal, chosen: int | None, calibrator: AcceptanceModel, model: str) -> None:
        """Whether the draft model was right at this depth, by any of its guesses."""
        tree = proposal.tree
        if any(child in tree.signals for child in tree.children(proposal.node)):
            at = level(model, proposal.depth + 1)
            right = chosen is not None and chosen in tree.signals
            self.bias(BY_DEPTH + model).learn(1, int(right), calibrator.prob(at))
            calibrator.learn(at, right)

    def level(self, calibrator: AcceptanceModel, model: str, depth: int) -> float:
        """The probability that the draft model is right at this depth, if it was right before it."""
        return self.bias(BY_DEPTH + model).prob(calibrator.prob(level(model, depth)))
