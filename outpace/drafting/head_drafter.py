"""Bases of methods that draft with a trained head, which reads the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from outpace.core.lm import LM, DraftShape
from outpace.core.sequence import Sequence
from outpace.core.tree import Budget, Tree
from outpace.drafting import parallel_trees
from outpace.drafting.candidates import fitted
from outpace.drafting.linked_heads import LinkedDistributions, LinkedLM
from outpace.drafting.model_drafter import DraftSlot, ModelDrafter, SelfDrafting, own_pick, planted
from outpace.drafting.slot_graphs import SlotGraphs, SlotRequest
from outpace.errors import HeadNotFound
from outpace.heads import store
from outpace.heads.parallel import Parallel, Text
from outpace.heads.recursive import Recursive
from outpace.models.hf.head_lm import HeadLM


def states(seq: Sequence, first: int = 0) -> Tensor | None:
    """The target's hidden states of the text from token `first` on, without its last token. None while some are
    missing, because the prompt is still being prefilled in this pass."""  # [tokens - 1 - first, taps * hidden]
    assert seq.target is not None and seq.target.states is not None and seq.slot is not None
    hidden, count = seq.target.states.read(seq.slot, first), len(seq.tokens) - 1 - first
    return None if hidden is None or not 0 < count <= len(hidden) else hidden[:count]


def trained(kind: str, target: LM) -> bool:
    """Whether a head of this kind for this model is on this machine. Only a request that uses a head downloads it."""
    try:
        return store.local(kind, target) is not None
    except HeadNotFound:
        return False


class GraphSlot(NamedTuple):
    """A request's slot in the captured drafts of a head."""

    graphs: SlotGraphs
    slot: int


class HeadDrafter(SelfDrafting):
    """A drafter that uses a recursive head as its model; a subclass declares `head` and the tree options."""

    remembers: ClassVar[bool] = False
    has_head: ClassVar[bool] = True
    kind: ClassVar[str]  # the kind of its head
    head: str | Recursive | None

    @classmethod
    def fits(cls, target: LM) -> bool:
        return trained(cls.kind, target)

    def open(self, seq: Sequence) -> None:
        super().open(seq)
        self.taps = self._head.spec.taps

    def make(self, target: LM, tokens: list[int]) -> LM:
        head = store.resolve(self.kind, self.head, target)
        assert isinstance(head, Recursive)
        self._head = head
        assert target.states is not None, "a model without states has no head"
        return target.states.attach(head)

    def propose_batch(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> list[Tree]:
        """Draft where the hidden states are complete; the other requests wait for the next pass."""
        trees = {seq.id: Tree([seq.tokens[-1]]) for seq in seqs}
        ready = [(seq, budget) for seq, budget in zip(seqs, budgets, strict=True) if self._feed(seq)]
        if ready:
            drafted = super().propose_batch([seq for seq, _ in ready], [budget for _, budget in ready])
            trees |= {seq.id: tree for (seq, _), tree in zip(ready, drafted, strict=True)}
        return [trees[seq.id] for seq in seqs]

    def _feed(self, seq: Sequence) -> bool:
        """Give the head the target's states that it has not read yet; return False while they are missing."""
        lm, slot = self.lm(seq), self.slot(seq)
        assert isinstance(lm, HeadLM)
        first = lm.known(slot, seq.tokens[:-1])
        hidden = states(seq, first)
        if hidden is not None:
            lm.take_states(slot, first, hidden)
        return hidden is not None


class ParallelDrafter(ModelDrafter):
    """A drafter with a head that predicts several tokens at once; a subclass declares `head` and the tree options."""

    has_head: ClassVar[bool] = True
    kind: ClassVar[str]  # the kind of its head
    model_source: str | None = None  # the head runs once; the further levels of a tree cost little
    head: str | Parallel | None
    ranks: Seq[parallel_trees.Ranks] = ()  # of a static tree; empty: the likeliest tree of each pass

    @classmethod
    def fits(cls, target: LM) -> bool:
        return trained(cls.kind, target)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._target: LM | None = None
        self._linked: LinkedLM | None = None  # grows the trees of a linked head
        self._graphs: SlotGraphs | None = None  # drafts in captured graphs, beside a target that runs in graphs

    def open(self, seq: Sequence) -> None:
        assert seq.target is not None, "the engine names the target"
        if self._target is not seq.target:
            head = store.resolve(self.kind, self.head, seq.target)
            assert isinstance(head, Parallel)
            assert seq.target.states is not None, "a model without states has no head"
            self._head, self._target = seq.target.states.prepare_head(head), seq.target
            self._vocab = store.embeddings_or_error(seq.target).vocab
            self._linked = LinkedLM(self._head, self._vocab) if head.spec.linked else None
            self._graphs = SlotGraphs(self._head) if seq.target.states.captures and not self.ranks else None
        self.taps = self._head.spec.taps

    def lm(self, seq: Sequence) -> LM:
        assert self._linked is not None
        return self._linked

    def slot(self, seq: Sequence) -> int:
        kept, lm = seq.state(self, Text).cached, self.lm(seq)
        if "slot" not in kept:
            kept["slot"] = DraftSlot(lm, lm.acquire([]))
        return kept["slot"].slot

    @torch.no_grad()
    def propose_batch(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> list[Tree]:
        """Run the head once for all requests with complete hidden states; the others wait for the next pass."""
        asked = list(zip(seqs, budgets, strict=True))
        trees = {seq.id: Tree([seq.tokens[-1]]) for seq in seqs} | self._captured(asked)
        ready = [(seq, budget) for seq, budget in asked if len(trees[seq.id]) == 1 and self._read(seq)]
        if ready:
            deepest = max(budget.depth for _, budget in ready)
            made = self._head.slots([seq.state(self, Text) for seq, _ in ready], deepest)  # [batch, slots, hidden]
            grown = (
                self._independent(ready, made) if self._linked is None else self._dependent(self._linked, ready, made)
            )
            trees |= {seq.id: tree for (seq, _), tree in zip(ready, grown, strict=True)}
        return [trees[seq.id] for seq in seqs]

    def _captured(self, asked: Seq[tuple[Sequence, Budget]]) -> dict[int, Tree]:
        """Draft in a graph where nothing but the head has a say: no processor, no policy that watches, no filter."""
        graphs, requests = self._graphs, dict[int, SlotRequest]()
        for seq, budget in asked if graphs is not None and graphs.on else ():
            pick = own_pick(seq, budget)
            if graphs is None or pick is None:
                continue
            slot, count = self._graph_slot(graphs, seq), len(seq.tokens) - 1
            first = graphs.first(slot, count)
            hidden, depth = states(seq, first), min(budget.depth, budget.nodes, self._head.spec.steps)
            if hidden is not None:
                shape = DraftShape(depth, budget.width, budget.nodes)
                requests[seq.id] = SlotRequest(slot, first, hidden, seq.tokens[-1], shape, pick)
        found = None if graphs is None or not requests else graphs.draft(list(requests.values()))
        drafted = dict(zip(requests, found or [], strict=found is not None))
        return {seq.id: planted(seq, drafted[seq.id], requests[seq.id].shape) for seq, _ in asked if seq.id in drafted}

    def _graph_slot(self, graphs: SlotGraphs, seq: Sequence) -> int:
        kept = seq.state(self, Text).cached
        if "graphs" not in kept:
            kept["graphs"] = GraphSlot(graphs, graphs.acquire())
        return kept["graphs"].slot

    def _independent(self, ready: Seq[tuple[Sequence, Budget]], made: Tensor) -> list[Tree]:
        """Trees from slots that do not depend on the draft tokens before them."""  # [batch, slots, hidden]
        found = []
        for (seq, budget), distribution in zip(ready, self._head.logits(made), strict=True):
            known = fitted(self._head.spread(distribution[: budget.depth], self._vocab), seq.vocab)
            found.append(parallel_trees.tree_from_logits(seq, known, budget, self.ranks))
        return found

    def _dependent(self, lm: LinkedLM, ready: Seq[tuple[Sequence, Budget]], made: Tensor) -> list[Tree]:
        """Trees from linked slots, which depend on the draft tokens before them."""  # [batch, slots, hidden]
        if self.ranks:
            pairs = zip(ready, made, strict=True)
            distributions = [
                (LinkedDistributions(lm, seq, own[: budget.depth], budget.width), budget)
                for (seq, budget), own in pairs
            ]
            return [
                parallel_trees.build_tree(distribution, budget, self.ranks) for distribution, budget in distributions
            ]
        for (seq, _), own in zip(ready, made, strict=True):
            lm.place(self.slot(seq), own)
        within = [budget.within(made.shape[1], trees=True) for _, budget in ready]
        return super().propose_batch([seq for seq, _ in ready], within)

    def _read(self, seq: Sequence) -> bool:
        text = seq.state(self, Text)
        text.token, text.hidden = seq.tokens[-1], states(seq)
        return text.hidden is not None

    def close(self, seq: Sequence) -> None:
        text: Text | None = seq.forget(self)
        if text is not None and "slot" in text.cached:
            text.cached["slot"].lm.release(text.cached["slot"].slot)
        if text is not None and "graphs" in text.cached:
            text.cached["graphs"].graphs.release(text.cached["graphs"].slot)
