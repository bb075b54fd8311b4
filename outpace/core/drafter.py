"""Drafter: proposes draft tokens. A method is a subclass with dataclass fields as options and a `propose` method."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, ClassVar

from outpace.core.layout import Layout
from outpace.core.sequence import Sequence, Step
from outpace.core.tree import Budget, Tree

if TYPE_CHECKING:
    from outpace.core.lm import LM, Scores


class Drafter:
    """Base class of all methods, with the defaults that most keep. One object serves every sequence of a batch."""

    name: str = ""  # in the registry
    lossless: bool = True  # on a class: with its default options
    lossless_if: ClassVar[dict[str, object]] = {}  # options that make a lossy method lossless, if any exist
    policy: str = "fixed"  # its default policy
    verifier: str = "match"  # the default verifier of its draft tokens
    remembers: ClassVar[bool] = True  # whether it may keep text of a request for others; False shares it among owners
    reads_logits: ClassVar[bool] = False  # whether it learns from all logits of every pass
    has_head: ClassVar[bool] = False  # whether it drafts with a trained head
    model_source: str | None = None  # source name of nodes that take a draft model pass per level; None: it has none
    taps: tuple[int, ...] = ()  # hidden states of the target that it reads; known once a request is open
    limit: Budget = Budget(depth=4, nodes=4)  # the largest draft, unless a policy sets a lower limit

    @classmethod
    def fits(cls, target: LM) -> bool:
        """Return whether it can draft for this model with default options; a trained head may be missing."""
        return True

    def models(self) -> list[LM]:
        """Return the models that it runs besides the target; one thread serves them all."""
        return []

    def open(self, seq: Sequence) -> None:
        """Prepare for a submitted request and its `target`, or refuse it, before anything runs."""

    def root(self, seq: Sequence) -> Layout:
        """Return the layout without draft tokens: the last token, whose key and value are not in the cache yet."""
        return Tree([seq.tokens[-1]])

    def propose(self, seq: Sequence, budget: Budget) -> Tree:
        """Return a tree within `budget` whose root is the last token of `seq`."""
        raise NotImplementedError

    def propose_batch(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> list[Any]:
        """Return layouts (nearly always trees) for several sequences; draft models batch their passes here."""
        return [self.propose(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]

    def observe(self, seq: Sequence, step: Step, scores: Scores) -> None:
        """Learn from a pass."""

    def close(self, seq: Sequence) -> None:
        """Free what was held for a request that has ended."""
