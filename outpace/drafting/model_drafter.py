"""Growth: a model guesses, as a chain or as a best-first tree. Base of all methods that draft with a model.

When the target samples, the draft draws with the target's own noise, so that the two mostly choose alike. Under a
verifier that needs the draft's distribution (`residual`) it draws with noise of its own and leaves the distribution in
the tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from torch import Tensor

from outpace.core.lm import LM, DraftShape, DraftToken
from outpace.core.sequence import Sequence
from outpace.core.tree import ROOT, Budget, Signal, Tree
from outpace.drafting.candidates import fitted, ranked_candidates
from outpace.drafting.sized import SizedDrafter
from outpace.errors import RequestFailed, UnsupportedModel
from outpace.sampling.noise_rule import GUMBEL
from outpace.sampling.sampler import Pick

TEXT = 64  # last tokens of the first prompt, on which a target's layers are chosen


@dataclass(frozen=True)
class Candidate:
    """A token that the draft would put under `parent`, a node of the tree it has scored."""

    parent: int
    token: int
    reach: float  # log of the probability that it is accepted
    signal: Signal


@dataclass
class TreeGrowth:
    """A tree on its way: what the draft scored, and all it would add to it."""

    seq: Sequence
    budget: Budget
    scored: Tree
    reach: dict[int, float]
    candidates: list[Candidate] = field(default_factory=list)
    since: int = 0  # nodes before this one have been scored
    depth: int = 0
    root: int = ROOT  # of the guesses; nodes before it are committed tokens

    @classmethod
    def begin(cls, seq: Sequence, budget: Budget, unsettled: int) -> TreeGrowth:
        scored = Tree.chain(seq.tokens[-unsettled:])
        return cls(seq, budget, scored, {len(scored) - 1: 0.0}, root=len(scored) - 1)

    @property
    def settled(self) -> list[int]:
        """What the draft reads before its tree."""
        return self.seq.tokens[: len(self.seq.tokens) - 1 - self.root]

    def path(self, node: int) -> list[int]:
        """Guesses on the way to a node."""
        return [self.scored.tokens[n] for n in self.scored.path(node)[self.root + 1 :]]


class DraftSlot(NamedTuple):
    """The slot of a draft model that a request has."""

    lm: LM
    slot: int


class ModelDrafter(SizedDrafter):
    """A drafter that asks a model: a subclass says which one, and brings the options of a tree."""

    model_source: str | None = ""  # all of its nodes, which have no other name than the drafter's
    unsettled: ClassVar[int] = 1  # tokens at the end of the text that the next pass may see changed

    def lm(self, seq: Sequence) -> LM:
        """The model that drafts for this request; the same one for all requests of a target."""
        raise NotImplementedError

    def slot(self, seq: Sequence) -> int:
        """The slot of `lm` that this request has."""
        lm = self.lm(seq)
        return seq.state(self, lambda: DraftSlot(lm, lm.acquire(seq.tokens[:-1], context=seq.context))).slot

    def close(self, seq: Sequence) -> None:
        held: DraftSlot | None = seq.forget(self)
        if held is not None:
            held.lm.release(held.slot)

    def propose(self, seq: Sequence, budget: Budget) -> Tree:
        return self.propose_batch([seq], [budget])[0]

    def propose_batch(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> list[Tree]:
        lm = self.lm(seqs[0])
        able = [budget.within(budget.depth, lm.trees) for budget in budgets]
        growths = [TreeGrowth.begin(seq, budget, self.unsettled) for seq, budget in zip(seqs, able, strict=True)]
        active = [growth for growth in growths if _can(growth, lm)]
        lm.feed([growth.settled for growth in active], [self.slot(growth.seq) for growth in active])
        drafted = self._by_itself(lm, active)
        if drafted is not None:
            return [drafted.get(id(growth), Tree([growth.seq.tokens[-1]])) for growth in growths]
        while active:
            slots, since = [self.slot(growth.seq) for growth in active], [growth.since for growth in active]
            scores = lm.score([growth.scored for growth in active], slots, since)
            active = [growth for growth, s in zip(active, scores, strict=True) if self._grow(growth, s.logits.all())]
        return [_final(growth) for growth in growths]

    def _by_itself(self, lm: LM, growths: Seq[TreeGrowth]) -> dict[int, Tree] | None:
        """What the model drafts without a look from outside at each level; None where it cannot, or where a policy
        wants to look."""
        if lm.drafts is None:
            return None
        picks = [pick for growth in growths if (pick := _own_pick(growth)) is not None]
        budgets = [growth.budget for growth in growths]
        shapes = [DraftShape(min(budget.levels, budget.nodes), budget.width, budget.nodes) for budget in budgets]
        if len({shape.width for shape in shapes}) != 1 or len(picks) < len(growths) or self.unsettled > 1:
            return None
        deepest = max(shape.depth for shape in shapes)
        if any(len(growth.seq.tokens) + deepest > lm.max_length for growth in growths):
            return None
        slots, roots = [self.slot(growth.seq) for growth in growths], [growth.seq.tokens[-1] for growth in growths]
        found = lm.drafts.draft(slots, roots, shapes, picks)
        if found is None:
            return None
        drafts = zip(growths, found, shapes, strict=True)
        return {id(growth): _planted(growth, tokens, shape.depth) for growth, tokens, shape in drafts}

    def _grow(self, growth: TreeGrowth, logits: Tensor) -> bool:
        """Add one level; True when there is more to draft."""  # [new nodes, vocab]
        tree, seq, budget = growth.scored, growth.seq, growth.budget
        first = max(growth.since, growth.root)
        try:
            new = fitted(logits[first - growth.since :], seq.vocab)
            level = self._children(growth, range(first, len(tree)), new)
        except RequestFailed:  # no token that the draft knows is allowed here; other rows go on
            return False
        growth.candidates += level
        growth.since, growth.depth = len(tree), growth.depth + 1
        # Under a distribution of the draft's own, which draws grow on must not depend on what they are: the first does.
        frontier = level[:1]
        if seq.verifier.shares_noise:
            frontier = sorted(level, key=lambda c: -c.reach)[: budget.width]
        if growth.depth >= min(budget.levels, budget.nodes):
            return False
        if budget.stop is not None and budget.stop(growth.depth, math.exp(frontier[0].reach)):
            return False
        if not seq.policy.keep_drafting(seq, frontier[0].signal, growth.depth):
            return False
        for candidate in frontier:
            node = tree.add(candidate.parent, candidate.token, candidate.signal)
            growth.reach[node] = candidate.reach
        return True

    def _children(self, growth: TreeGrowth, nodes: Seq[int], logits: Tensor) -> list[Candidate]:
        """What the draft would put under these nodes, which are of one depth."""  # [nodes, vocab]
        seq, found = growth.seq, list[Candidate]()
        prefixes = [seq.tokens + growth.path(node) for node in nodes]
        for node, seen in zip(nodes, ranked_candidates(seq, logits, prefixes, growth.budget.width), strict=True):
            if seen.distribution is not None:
                growth.scored.proposals[node] = seen.distribution
            for rank, (token, prob) in enumerate(zip(seen.tokens, seen.probs, strict=True)):
                reach = growth.reach[node] + math.log(max(prob, 1e-300))
                found.append(Candidate(node, token, reach, seen.signal(rank)))
        return found


class SelfDrafting(ModelDrafter):
    """A drafter whose model is made of the target's own layers, when the first request names the target."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._target: LM | None = None
        self._lm: LM | None = None
        self._version = 0  # of the target's weights

    def make(self, target: LM, tokens: list[int]) -> LM:
        """The draft of this target; `tokens` are the first prompt, on which layers may be chosen."""
        raise NotImplementedError

    def open(self, seq: Sequence) -> None:
        lm = self.lm(seq)
        assert seq.target is not None
        if self._version != _version(seq.target):
            self._version = _version(seq.target)
            if lm.weights is not None:
                lm.weights.changed()

    def lm(self, seq: Sequence) -> LM:
        if self._lm is None or self._target is not seq.target:
            assert seq.target is not None, "the engine names the target"
            if seq.target.layers is None or seq.target.layers.count < 2:
                raise UnsupportedModel(
                    f"{self.name} needs a model's layers and hidden states, and this one hands none out"
                )
            self._lm, self._target = self.make(seq.target, seq.tokens[-TEXT:]), seq.target
            self._version = _version(seq.target)
        return self._lm


def _version(lm: LM) -> int:
    return 0 if lm.weights is None else lm.weights.version


def _can(growth: TreeGrowth, lm: LM) -> bool:
    """The target may use ids, or write a text, beyond what a smaller draft has; then it cannot follow."""
    tokens, asked = growth.seq.tokens, growth.budget.levels
    return asked > 0 and max(tokens) < lm.vocab and len(tokens) + asked <= lm.max_length


def _final(growth: TreeGrowth) -> Tree:
    """The tree to verify: the candidates that are likeliest to be accepted; a likely node's parents are likelier."""
    order = growth.candidates
    if growth.seq.verifier.shares_noise:
        order = sorted(order, key=lambda c: -c.reach)[: growth.budget.nodes]
    tree, place = Tree([growth.seq.tokens[-1]]), {growth.root: ROOT}
    for c in order:
        if c.parent in place:
            node = tree.add(place[c.parent], c.token, c.signal)
            grown = growth.scored.child(c.parent, c.token)
            if grown is not None:
                place[grown] = node
    tree.proposals = {
        place[node]: distribution for node, distribution in growth.scored.proposals.items() if node in place
    }
    return tree


def _planted(growth: TreeGrowth, guesses: Seq[DraftToken], depth: int) -> Tree:
    """The tree of a draft's own guesses, parents first, as far as this request may go."""
    tree, depths, places = Tree([growth.seq.tokens[-1]]), [0], list[int | None]()
    for guess in guesses:
        parent = ROOT if guess.parent < 0 else places[guess.parent]
        possible = guess.token < growth.seq.vocab and len(tree) <= growth.budget.nodes  # the draft may know more tokens
        if parent is None or not possible or depths[parent] >= depth:
            places.append(None)
            continue
        places.append(tree.add(parent, guess.token, Signal(guess.prob, 0.0)))
        depths.append(depths[parent] + 1)
    return tree


def _own_pick(growth: TreeGrowth) -> Pick | None:
    """How the draft may choose by itself: with the target's noise, where nobody looks."""
    seq, pick = growth.seq, growth.seq.sampler.pick
    watched = growth.budget.stop is not None or seq.policy.watches_draft
    if watched or not seq.verifier.shares_noise or pick is None or pick.filters or pick.rule != GUMBEL:
        return None
    return pick
