"""Headed: base of methods that draft with a trained head, which reads the hidden states of the target."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from outpace.growth import SelfDrafting
from outpace.heads import store
from outpace.heads.recursive import Recursive
from outpace.models.base import LM
from outpace.models.fast import FastLM
from outpace.models.fed import Fed, fed
from outpace.sequence import Sequence
from outpace.tree import Budget, Tree


class Headed(SelfDrafting):
    """A drafter whose model is a recursive head: a subclass brings the option `head` and those of a tree."""

    head: str | Recursive | None

    def open(self, seq: Sequence) -> None:
        super().open(seq)
        self.taps = self._head.spec.taps

    def make(self, target: LM, tokens: list[int]) -> LM:
        head = store.resolve(self.name, self.head, target)
        assert isinstance(head, Recursive)
        self._head = head
        return fed(head, compiled=isinstance(target, FastLM))  # type: ignore[return-value]

    def propose_batch(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> list[Tree]:
        """Rows whose states are not all there yet, because their prompt rides on this very pass, wait for the next."""
        trees = {seq.id: Tree([seq.tokens[-1]]) for seq in seqs}
        ready = [(seq, budget) for seq, budget in zip(seqs, budgets, strict=True) if self._feed(seq)]
        if ready:
            drafted = super().propose_batch([seq for seq, _ in ready], [budget for _, budget in ready])
            trees |= {seq.id: tree for (seq, _), tree in zip(ready, drafted, strict=True)}
        return [trees[seq.id] for seq in seqs]

    @torch.no_grad()
    def _feed(self, seq: Sequence) -> bool:
        """Hand the head the target's states of the text that it has not read; False while they are not there."""
        assert seq.target is not None and seq.row is not None
        hidden = seq.target.hidden(seq.row)  # [tokens in the cache, taps]
        if hidden is None or len(hidden) < len(seq.tokens) - 1 or len(seq.tokens) < 2:
            return False
        lm, row = self.lm(seq), self.row(seq)
        assert isinstance(lm, Fed)
        first = lm.known(row, seq.tokens[:-1])
        entrance = self._head.model
        lm.feed(row, first, entrance.fuse(hidden[first : len(seq.tokens) - 1].to(entrance.norm.weight.dtype)))
        return True
