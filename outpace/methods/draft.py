"""Assisted generation: a smaller model guesses.

A draft with another tokenizer (universal assisted generation) guesses the tokens that both have, or text.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from outpace.core.lm import LM
from outpace.core.sequence import Sequence
from outpace.core.tree import Budget, Tree
from outpace.cross_tokenizer.by_text import TextDrafter
from outpace.cross_tokenizer.by_tokens import TranslatedLM
from outpace.drafting.model_drafter import ModelDrafter
from outpace.errors import UsageError, unknown

ALIGN = ("auto", "tokens", "text")
UNSETTLED = 4  # tokens at the end of a text told by another tokenizer that what follows may still change


@dataclass(eq=False)
class Draft(ModelDrafter):
    """A smaller model guesses what comes next; its tokenizer may be another one."""

    draft: LM
    depth: int = 5
    nodes: int = 0  # 0: as many as a chain, or a tree of this width, of this depth has
    width: int = 1
    align: str = "auto"  # with another tokenizer: guess shared "tokens", or "text"; "auto" chooses
    _retold: TextDrafter | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.align not in ALIGN:
            raise unknown("align", self.align, ALIGN)
        if isinstance(self.draft, TranslatedLM):
            lm = self.draft.lm
            # Where a model cannot be cut back, tokens that may still change stay out of its state.
            inner = (Draft if lm.trees else LateDraft)(lm, self.depth, self.nodes, self.width)
            self._retold = TextDrafter(inner, self.draft.pair, lm.max_length)
        elif self.draft is not None and self.align != "auto":
            raise UsageError(
                f"align={self.align!r} is for a draft with another tokenizer than the target's; this one has the "
                "same, or none is known: pass draft and target as models with their tokenizers, wrap(model, tokenizer)"
            )

    def models(self) -> list[LM]:
        return [self.draft]

    def lm(self, seq: Sequence) -> LM:
        return self.draft

    def propose_batch(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> list[Tree]:
        if self._retold is None:
            return super().propose_batch(seqs, budgets)
        trees: dict[int, Tree] = {}
        for draft, told in ((self._retold.propose_batch, True), (super().propose_batch, False)):
            some = [i for i, seq in enumerate(seqs) if self._by_text(seq) == told]
            if some:
                drafted = draft([seqs[i] for i in some], [budgets[i] for i in some])
                trees |= dict(zip(some, drafted, strict=True))
        return [trees[i] for i in range(len(seqs))]

    def _by_text(self, seq: Sequence) -> bool:
        if self.align == "auto" and isinstance(self.draft, TranslatedLM):
            return self.draft.pair.by_text(seq.sampler.greedy)
        return self.align == "text"

    def close(self, seq: Sequence) -> None:
        if self._retold is not None:
            self._retold.close(seq)
        super().close(seq)


class LateDraft(Draft):
    """Reads the last tokens of a text anew with every pass."""

    unsettled = UNSETTLED
