"""TranslatedLM: a draft model that takes and returns the target's tokens. Any method that takes a draft accepts it."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outpace.core.layout import Layout
from outpace.core.lm import LM, Context, DraftShape, DraftToken, Logits, Picks, Scores, SelfDraft, Weights
from outpace.core.tree import ROOT, Tree
from outpace.cross_tokenizer.alignment import Pair
from outpace.cross_tokenizer.follower import TokenFollower
from outpace.cross_tokenizer.vocabulary import Vocabulary
from outpace.errors import UsageError
from outpace.sampling.sampler import Pick

PADDING = 0.9  # smallest ratio of vocabulary sizes that padding can explain


@dataclass
class TranslatedSlot:
    """A slot: the target's tokens that it should hold, and the last scored tree in the draft's tokens."""

    follower: TokenFollower
    tokens: list[int] = field(default_factory=list)
    tree: Tree | None = None


class TranslatedLM(LM):
    """Converts the target's tokens to the draft's; the logits that it returns cover only the tokens that both have."""

    def __init__(self, lm: LM, pair: Pair):
        self.lm, self.pair, self.worker = lm, pair, lm.worker
        self.vocab = pair.ours.vocab
        self.max_length = sys.maxsize  # a follower keeps a sliding window of the text
        self.trees, self.asynchronous, self.lazy_logits = lm.trees, lm.asynchronous, lm.lazy_logits
        self.identity = lm.identity
        self.drafts: SelfDraft | None = None if lm.drafts is None else TranslatedDrafts(self, lm.drafts)
        self._held: dict[int, TranslatedSlot] = {}
        self._theirs = torch.tensor(list(pair.to_target), dtype=torch.long)
        self._ours = torch.tensor(list(pair.to_target.values()), dtype=torch.long)

    @property
    def weights(self) -> Weights | None:  # type: ignore[override]
        return self.lm.weights

    def acquire(self, tokens: list[int], *, context: Context = None, taps: tuple[int, ...] = ()) -> int:
        follower = TokenFollower(self.pair, self.lm.max_length)
        slot = self.lm.acquire(follower.follow(tokens)[:-1] if tokens else [], context=context, taps=taps)
        self._held[slot] = TranslatedSlot(follower, list(tokens))
        return slot

    def release(self, slot: int) -> None:
        del self._held[slot]
        self.lm.release(slot)

    def feed(
        self, tokens: Seq[list[int]], slots: Seq[int], limit: int | None = None, defer: bool = False
    ) -> list[bool]:
        """Only store the tokens: what the draft is fed depends on the token that follows."""
        for wanted, slot in zip(tokens, slots, strict=True):
            self._held[slot].tokens = list(wanted)
        return [True] * len(slots)

    def score(
        self, layouts: Seq[Layout], slots: Seq[int], since: Seq[int] | None = None, picks: Picks = None
    ) -> list[Scores]:
        since = [0] * len(slots) if since is None else since
        begun = [
            (slot, layout.tokens[ROOT]) for slot, layout, old in zip(slots, layouts, since, strict=True) if not old
        ]
        for (slot, _), last in zip(begun, self.read(begun), strict=True):
            self._held[slot].tree = Tree([last])
        trees = [self._converted(layout, slot) for layout, slot in zip(layouts, slots, strict=True)]
        return [Scores(Logits(self._fit(s.logits.all())), s.hidden) for s in self.lm.score(trees, slots, since)]

    def keep(self, paths: Seq[list[int]], slots: Seq[int]) -> None:
        self.lm.keep(paths, slots)

    def clear(self) -> None:
        self.lm.clear()

    def read(self, begun: list[tuple[int, int]]) -> list[int]:
        """Feed the draft each slot's tokens and root, except for the last of its own ids; return these last ids."""
        ids = [self._held[slot].follower.follow([*self._held[slot].tokens, root]) for slot, root in begun]
        self.lm.feed([known[:-1] for known in ids], [slot for slot, _ in begun])
        return [known[-1] for known in ids]

    def _converted(self, tree: Layout, slot: int) -> Tree:
        converted = self._held[slot].tree
        assert converted is not None and isinstance(tree, Tree), "a tree grows from its root"
        for node in range(len(converted), len(tree)):
            converted.add(tree.parents[node], self.pair.to_draft[tree.tokens[node]])
        assert len(converted) == len(tree), "only tokens that both models have can be scored"
        return converted

    def _fit(self, logits: Tensor) -> Tensor:  # [nodes, draft's vocab] -> [nodes, vocab]
        self._theirs, self._ours = self._theirs.to(logits.device), self._ours.to(logits.device)
        out = logits.new_full((len(logits), self.vocab), -torch.inf)
        return out.index_copy_(1, self._ours, logits.index_select(1, self._theirs))


class TranslatedDrafts:
    """Whole chains from the draft model, cut before the first token that the target does not have."""

    def __init__(self, lm: TranslatedLM, drafts: SelfDraft):
        self.lm, self.inner = lm, drafts

    def draft(
        self, slots: Seq[int], tokens: Seq[int], shapes: Seq[DraftShape], picks: Seq[Pick]
    ) -> list[list[DraftToken]] | None:
        """Draft greedy chains only: the noise is keyed by the target's tokens, which the draft does not know."""
        if shapes[0].width > 1 or any(pick.temperature for pick in picks):
            return None
        roots = self.lm.read(list(zip(slots, tokens, strict=True)))
        chains = self.inner.draft(slots, roots, shapes, picks)
        return None if chains is None else [self._known(chain) for chain in chains]

    def _known(self, chain: list[DraftToken]) -> list[DraftToken]:
        found, back = list[DraftToken](), self.lm.pair.to_target
        for drafted in chain:
            if drafted.token not in back:
                break
            found.append(drafted._replace(token=back[drafted.token]))
        return found


@dataclass(frozen=True)
class NamedModel:
    """A model with its tokenizer, and its name in messages."""

    lm: LM
    tokenizer: Any
    name: str


def translated(target: NamedModel, draft: NamedModel) -> LM:
    """The draft in terms of the target's tokens, or the draft itself if both have the same vocabulary."""
    if target.tokenizer is None or draft.tokenizer is None:
        sizes = sorted((target.lm.vocab, draft.lm.vocab))
        if sizes[0] < PADDING * sizes[1]:
            raise UsageError(
                f"{draft.name!r} has {draft.lm.vocab} tokens and {target.name!r} has {target.lm.vocab}: a draft with "
                "another vocabulary needs both tokenizers; make both models with wrap(model, tokenizer)"
            )
        return draft.lm
    if target.tokenizer is draft.tokenizer or _vocabulary(target.tokenizer) == _vocabulary(draft.tokenizer):
        return draft.lm
    return TranslatedLM(
        draft.lm, Pair(Vocabulary(target.tokenizer, target.lm.vocab), Vocabulary(draft.tokenizer, draft.lm.vocab))
    )


def _vocabulary(tokenizer: Any) -> Any:
    return tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else len(tokenizer)
