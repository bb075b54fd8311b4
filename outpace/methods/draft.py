"""Assisted generation: a smaller model drafts.

A draft model with another tokenizer (universal assisted generation) drafts in shared tokens, or in text.
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
UNSETTLED = 4  # tokens at the end of a re-encoded text that may still change when text is added


@dataclass(eq=False)
class Draft(ModelDrafter):
    """A smaller model drafts; its tokenizer may differ from the target's."""

    draft: LM
    depth: int = 5
    nodes: int = 0  # 0: depth * width
    width: int = 1
    align: str = "auto"  # with another tokenizer: draft in shared "tokens" or in "text"; "auto" chooses
    _text_drafter: TextDrafter | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.align not in ALIGN:
            raise unknown("align", self.align, ALIGN)
        if isinstance(self.draft, TranslatedLM):
            lm = self.draft.lm
            # A model that cannot be rolled back must not be fed tokens that may still change.
            inner = (Draft if lm.trees else LateDraft)(lm, self.depth, self.nodes, self.width)
            self._text_drafter = TextDrafter(inner, self.draft.pair, lm.max_length)
        elif self.draft is not None and self.align != "auto":
            raise UsageError(
                f"align={self.align!r} needs a draft with another tokenizer than the target's, but this one has the "
                "same, or none is known; make both models with their tokenizers: wrap(model, tokenizer)"
            )

    def models(self) -> list[LM]:
        return [self.draft]

    def lm(self, seq: Sequence) -> LM:
        return self.draft

    def propose_batch(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> list[Tree]:
        if self._text_drafter is None:
            return super().propose_batch(seqs, budgets)
        trees: dict[int, Tree] = {}
        for draft, in_text in ((self._text_drafter.propose_batch, True), (super().propose_batch, False)):
            some = [i for i, seq in enumerate(seqs) if self._by_text(seq) == in_text]
            if some:
                drafted = draft([seqs[i] for i in some], [budgets[i] for i in some])
                trees |= dict(zip(some, drafted, strict=True))
        return [trees[i] for i in range(len(seqs))]

    def _by_text(self, seq: Sequence) -> bool:
        if self.align == "auto" and isinstance(self.draft, TranslatedLM):
            return self.draft.pair.by_text(seq.sampler.greedy)
        return self.align == "text"

    def close(self, seq: Sequence) -> None:
        if self._text_drafter is not None:
            self._text_drafter.close(seq)
        super().close(seq)


class LateDraft(Draft):
    """Reads the last tokens of a text again in every pass, as they may still change."""

    unsettled_tokens = UNSETTLED
