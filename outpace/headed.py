"""Headed: bases of methods that draft with a trained head, which reads the hidden states of the target."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import ClassVar

import torch
from torch import Tensor

from outpace import slots
from outpace.drafter import Shaped
from outpace.errors import Headless
from outpace.growth import SelfDrafting
from outpace.heads import store
from outpace.heads.parallel import Parallel, Text
from outpace.heads.recursive import Recursive
from outpace.models.base import LM
from outpace.models.compiled import shortened
from outpace.models.fast import FastLM
from outpace.models.fed import Fed, fed
from outpace.outlook import fitted
from outpace.sequence import Sequence
from outpace.tree import Budget, Tree


def states(seq: Sequence) -> Tensor | None:
    """The target's states of all the text but its last token; None while they are not all there, because the prompt
    rides on this very pass."""  # [tokens - 1, taps * hidden]
    assert seq.target is not None and seq.row is not None
    hidden, count = seq.target.hidden(seq.row), len(seq.tokens) - 1
    return None if hidden is None or not 0 < count <= len(hidden) else hidden[:count]


def trained(kind: str, target: LM) -> bool:
    """Whether there is a head of this kind for this model."""
    try:
        store.resolve(kind, None, target)
    except Headless:
        return False
    return True


class Headed(SelfDrafting):
    """A drafter whose model is a recursive head: a subclass brings the option `head` and those of a tree."""

    kind: ClassVar[str]  # of its head
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
        return fed(head, compiled=isinstance(target, FastLM))  # type: ignore[return-value]

    def propose_batch(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> list[Tree]:
        """Rows whose states are not all there yet wait for the next pass."""
        trees = {seq.id: Tree([seq.tokens[-1]]) for seq in seqs}
        ready = [(seq, budget) for seq, budget in zip(seqs, budgets, strict=True) if self._feed(seq)]
        if ready:
            drafted = super().propose_batch([seq for seq, _ in ready], [budget for _, budget in ready])
            trees |= {seq.id: tree for (seq, _), tree in zip(ready, drafted, strict=True)}
        return [trees[seq.id] for seq in seqs]

    @torch.no_grad()
    def _feed(self, seq: Sequence) -> bool:
        """Hand the head the target's states of the text that it has not read; False while they are not there."""
        hidden = states(seq)
        if hidden is None:
            return False
        lm, row = self.lm(seq), self.row(seq)
        assert isinstance(lm, Fed)
        first, entrance = lm.known(row, seq.tokens[:-1]), self._head.model
        lm.feed(row, first, entrance.fuse(hidden[first:].to(entrance.embed.weight.dtype)))
        return True


class Slotted(Shaped):
    """A drafter whose head guesses several tokens in one go: a subclass brings `head` and the options of a tree."""

    kind: ClassVar[str]  # of its head
    head: str | Parallel | None
    ranks: Seq[slots.Ranks] = ()  # of a static tree, if it is to be one

    @classmethod
    def fits(cls, target: LM) -> bool:
        return trained(cls.kind, target)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._target: LM | None = None

    def open(self, seq: Sequence) -> None:
        assert seq.target is not None, "the engine names the target"
        if self._target is not seq.target:
            head = store.resolve(self.kind, self.head, seq.target)
            assert isinstance(head, Parallel)
            slow = isinstance(seq.target, FastLM) and seq.target.device.type == "cpu"  # to read weights
            self._head, self._target = shortened(head) if slow else head, seq.target
        self.taps = self._head.spec.taps

    def propose(self, seq: Sequence, budget: Budget) -> Tree:
        return self.propose_batch([seq], [budget])[0]

    @torch.no_grad()
    def propose_batch(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> list[Tree]:
        """One pass of the head for all rows; those whose states are not all there yet wait for the next."""
        trees = {seq.id: Tree([seq.tokens[-1]]) for seq in seqs}
        ready = [given for given in zip(seqs, budgets, strict=True) if self._read(given[0])]
        if ready:
            deepest = max(budget.depth for _, budget in ready)
            laws = self._head.guess([seq.memory(self, Text) for seq, _ in ready], deepest)  # [rows, slots, draft vocab]
            for (seq, budget), law in zip(ready, laws, strict=True):
                known = fitted(self._head.spread(law[: budget.depth], self._vocab), seq.vocab)
                trees[seq.id] = slots.grow(seq, known, budget, self.ranks)
        return [trees[seq.id] for seq in seqs]

    def _read(self, seq: Sequence) -> bool:
        text = seq.memory(self, Text)
        text.token, text.hidden = seq.tokens[-1], states(seq)
        return text.hidden is not None

    @property
    def _vocab(self) -> int:
        assert self._target is not None
        return store.ends_of(self._target).vocab

    def close(self, seq: Sequence) -> None:
        seq.forget(self)
