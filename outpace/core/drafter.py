"""Drafter: who guesses. A method is a subclass with dataclass fields for options and one function, `propose`."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, ClassVar

from outpace.core.layout import Layout
from outpace.core.sequence import Sequence, Step
from outpace.core.tree import Budget, Tree

if TYPE_CHECKING:
    from outpace.core.lm import LM, Scores


class Drafter:
    """Base of all methods: what most of them leave as it is. One object serves every sequence of a batch."""

    name: str = ""  # in the registry
    lossless: bool = True  # of a class: with its default options
    lossless_if: ClassVar[dict[str, object]] = {}  # options that make a lossy method lossless, if there are any
    policy: str = "fixed"  # that it runs under unless told otherwise
    verifier: str = "match"  # that judges its guesses unless told otherwise
    reads_logits: ClassVar[bool] = False  # whether it learns from all logits of every pass
    model_source: str | None = None  # source of the nodes that cost a pass of a model per level; None: there are none
    taps: tuple[int, ...] = ()  # hidden states of the target that it reads; known once a request was opened
    limit: Budget = Budget(depth=4, nodes=4)  # the most it drafts when no policy says less

    @classmethod
    def fits(cls, target: LM) -> bool:
        """Whether it can draft for this model without being told anything: a trained head may not be there."""
        return True

    def models(self) -> list[LM]:
        """Models of its own that it runs, beside the target: one thread serves them all."""
        return []

    def open(self, seq: Sequence) -> None:
        """A request was submitted: prepare for its `target`, or refuse it, before anything runs."""

    def root(self, seq: Sequence) -> Layout:
        """What is scored where nothing is drafted: the last token, whose key and value are not in the cache yet."""
        return Tree([seq.tokens[-1]])

    def propose(self, seq: Sequence, budget: Budget) -> Tree:
        """A tree whose root is the last token of `seq`; no larger than `budget`."""
        raise NotImplementedError

    def propose_batch(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> list[Any]:
        """Layouts, nearly always trees, for several sequences; a model that drafts does this in shared passes."""
        return [self.propose(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]

    def observe(self, seq: Sequence, step: Step, scores: Scores) -> None:
        """Learn from a pass."""

    def close(self, seq: Sequence) -> None:
        """The request ended; free what was held for it."""
