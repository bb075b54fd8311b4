"""Drafting with a model, as a chain or as a best-first tree: the base of all methods that draft with a model.

When the target samples, the draft samples with the target's own noise, so both mostly choose the same token. Under a
verifier that needs the draft's distribution (`residual`), it samples with separate noise and stores the distribution
in the tree.
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

TEXT = 64  # the target's layers are chosen on this many last tokens of the first prompt


@dataclass(frozen=True)
class Candidate:
    """A token that the draft may add under `parent`, a node of the tree that it has scored."""

    parent: int
    token: int
    reach: float  # log of the probability that the token and all before it are accepted
    signal: Signal


@dataclass
class TreeGrowth:
    """A tree under construction: the part that the draft has scored, and all candidates so far."""

    seq: Sequence
    budget: Budget
    scored: Tree
    reach: dict[int, float]
    candidates: list[Candidate] = field(default_factory=list)
    since: int = 0  # nodes before this one have been scored
    depth: int = 0
    root: int = ROOT  # node of the last committed token; the nodes before it are committed too

    @classmethod
    def begin(cls, seq: Sequence, budget: Budget, unsettled: int) -> TreeGrowth:
        scored = Tree.chain(seq.tokens[-unsettled:])
        return cls(seq, budget, scored, {len(scored) - 1: 0.0}, root=len(scored) - 1)

    @property
    def fed_tokens(self) -> list[int]:
        """The tokens that the draft is fed before its tree."""
        return self.seq.tokens[: len(self.seq.tokens) - 1 - self.root]

    def path(self, node: int) -> list[int]:
        """The draft tokens on the path to a node."""
        return [self.scored.tokens[n] for n in self.scored.path(node)[self.root + 1 :]]


class DraftSlot(NamedTuple):
    """A request's slot in the cache of a draft model."""

    lm: LM
    slot: int


class ModelDrafter(SizedDrafter):
    """A drafter that runs a model; a subclass chooses the model and declares the tree options."""

    remembers: ClassVar[bool] = False
    model_source: str | None = ""  # "": all of its nodes, which carry no source name of their own
    unsettled_tokens: ClassVar[int] = 1  # tokens at the end of the text that may change before the next pass

    def lm(self, seq: Sequence) -> LM:
        """The model that drafts for this request; all requests of one target share it."""
        raise NotImplementedError

    def slot(self, seq: Sequence) -> int:
        """This request's slot in the cache of `lm`."""
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
        growths = [TreeGrowth.begin(seq, budget, self.unsettled_tokens) for seq, budget in zip(seqs, able, strict=True)]
        active = [growth for growth in growths if _can(growth, lm)]
        lm.feed([growth.fed_tokens for growth in active], [self.slot(growth.seq) for growth in active])
        drafted = self._drafted_whole(lm, active)
        active = [growth for growth in active if id(growth) not in drafted]
        while active:
            slots, since = [self.slot(growth.seq) for growth in active], [growth.since for growth in active]
            scores = lm.score([growth.scored for growth in active], slots, since)
            active = [growth for growth, s in zip(active, scores, strict=True) if self._grow(growth, s.logits.all())]
        return [drafted.get(id(growth)) or _final(growth) for growth in growths]

    def _drafted_whole(self, lm: LM, growths: Seq[TreeGrowth]) -> dict[int, Tree]:
        """Let the model draft whole trees, without reading each level back; not where a policy must see every level."""
        able = [(growth, pick) for growth in growths if (pick := own_pick(growth.seq, growth.budget)) is not None]
        budgets = [growth.budget for growth, _ in able]
        shapes = [DraftShape(min(budget.levels, budget.nodes), budget.width, budget.nodes) for budget in budgets]
        if lm.drafts is None or len({shape.width for shape in shapes}) != 1 or self.unsettled_tokens > 1:
            return {}
        deepest = max(shape.depth for shape in shapes)
        if any(len(growth.seq.tokens) + deepest > lm.max_length for growth, _ in able):
            return {}
        slots, roots = [self.slot(growth.seq) for growth, _ in able], [growth.seq.tokens[-1] for growth, _ in able]
        found = lm.drafts.draft(slots, roots, shapes, [pick for _, pick in able])
        if found is None:
            return {}
        drafts = zip(able, found, shapes, strict=True)
        return {id(growth): planted(growth.seq, tokens, shape) for (growth, _), tokens, shape in drafts}

    def _grow(self, growth: TreeGrowth, logits: Tensor) -> bool:
        """Add one level; return True if there is more to draft."""  # [new nodes, vocab]
        tree, seq, budget = growth.scored, growth.seq, growth.budget
        first = max(growth.since, growth.root)
        try:
            new = fitted(logits[first - growth.since :], seq.vocab)
            level = self._children(growth, range(first, len(tree)), new)
        except RequestFailed:  # none of the draft's tokens is allowed here; other requests continue
            return False
        growth.candidates += level
        growth.since, growth.depth = len(tree), growth.depth + 1
        # If the draft samples from its own distribution, the draw to extend must not be chosen by its value: it is
        # always the first.
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
        """The draft's candidates under these nodes, which all have the same depth."""  # [nodes, vocab]
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
    """A drafter that makes its model from the target itself, once the first request names the target."""

    remembers: ClassVar[bool] = True  # some choose the layers by the first prompt

    def __post_init__(self) -> None:
        super().__post_init__()
        self._target: LM | None = None
        self._lm: LM | None = None
        self._version = 0  # of the target's weights

    def make(self, target: LM, tokens: list[int]) -> LM:
        """Make the draft model of this target; `tokens`, from the first prompt, may be used to choose layers."""
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
                    f"{self.name} needs a model's layers and hidden states, which this model does not provide"
                )
            self._lm, self._target = self.make(seq.target, seq.tokens[-TEXT:]), seq.target
            self._version = _version(seq.target)
        return self._lm


def _version(lm: LM) -> int:
    return 0 if lm.weights is None else lm.weights.version


def _can(growth: TreeGrowth, lm: LM) -> bool:
    """Whether the draft can follow: the target's text may exceed its vocabulary or its context."""
    tokens, levels = growth.seq.tokens, growth.budget.levels
    return levels > 0 and max(tokens) < lm.vocab and len(tokens) + levels <= lm.max_length


def _final(growth: TreeGrowth) -> Tree:
    """The tree to verify: the candidates most likely to be accepted; parents are likelier than their children."""
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


def planted(seq: Sequence, drafted: Seq[DraftToken], shape: DraftShape) -> Tree:
    """Build the tree of a model's own draft tokens, parents first, within this request's budget."""
    tree, depths, places = Tree([seq.tokens[-1]]), [0], list[int | None]()
    for item in drafted:
        parent = ROOT if item.parent < 0 else places[item.parent]
        possible = item.token < seq.vocab and len(tree) <= shape.nodes  # its vocabulary may be larger
        if parent is None or not possible or depths[parent] >= shape.depth:
            places.append(None)
            continue
        places.append(tree.add(parent, item.token, Signal(item.prob, 0.0)))
        depths.append(depths[parent] + 1)
    return tree


def own_pick(seq: Sequence, budget: Budget) -> Pick | None:
    """The sampling rule with which a model may draft whole trees; None where it cannot, or where levels are watched."""
    pick, watched = seq.sampler.pick, budget.stop is not None or seq.policy.watches_draft
    if watched or not seq.verifier.shares_noise or pick is None or pick.filters or pick.rule != GUMBEL:
        return None
    return pick
