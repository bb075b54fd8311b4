"""Translated: a draft as the target's tokens see it. Any method that takes a draft takes one of these."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outpace.core.lm import LM, DraftShape, DraftToken, Embeddings, MemoryNeed, Picks, Reference, Scores
from outpace.core.tree import ROOT, Tree
from outpace.cross_tokenizer.alignment import Pair
from outpace.cross_tokenizer.follower import TokenFollower
from outpace.cross_tokenizer.vocabulary import Vocabulary
from outpace.errors import UnsupportedModel, UsageError
from outpace.sampling.sampler import Pick

PADDING = 0.9  # vocabularies of one tokenizer differ by less


@dataclass
class TranslatedSlot:
    """A row: the target's tokens that it should hold, and the tree scored last in the draft's tokens."""

    follower: TokenFollower
    tokens: list[int] = field(default_factory=list)
    tree: Tree | None = None


class TranslatedLM:
    """Tokens become the draft's on the way in; on the way out its logits are those of the tokens that both have."""

    stack = 0  # it drafts, and is not taken apart
    ends: Embeddings | None = None

    def __init__(self, lm: LM, pair: Pair):
        self.lm, self.pair, self.worker = lm, pair, lm.worker
        self.vocab = pair.ours.vocab
        self.context = sys.maxsize  # what a follower holds slides
        self.trees, self.asynchronous, self.handy = lm.trees, lm.asynchronous, lm.handy
        self._held: dict[int, TranslatedSlot] = {}
        self._theirs = torch.tensor(list(pair.to_target), dtype=torch.long)
        self._ours = torch.tensor(list(pair.to_target.values()), dtype=torch.long)

    def acquire(self, tokens: list[int], taps: tuple[int, ...] = ()) -> int:
        follower = TokenFollower(self.pair, self.lm.context)
        row = self.lm.acquire(follower.follow(tokens)[:-1] if tokens else [], taps)
        self._held[row] = TranslatedSlot(follower, list(tokens))
        return row

    def release(self, row: int) -> None:
        del self._held[row]
        self.lm.release(row)

    def sync(self, tokens: Seq[list[int]], rows: Seq[int]) -> None:
        """Noted; what the draft is fed depends on the token that follows."""
        for wanted, row in zip(tokens, rows, strict=True):
            self._held[row].tokens = list(wanted)

    def score(
        self, trees: Seq[Tree], rows: Seq[int], since: Seq[int] | None = None, picks: Picks = None
    ) -> list[Scores]:
        since = [0] * len(rows) if since is None else since
        begun = [(row, tree.tokens[ROOT]) for row, tree, old in zip(rows, trees, since, strict=True) if not old]
        for (row, _), last in zip(begun, self._feed(begun), strict=True):
            self._held[row].tree = Tree([last])
        told = [self._told(tree, row) for tree, row in zip(trees, rows, strict=True)]
        return [Scores(self._fit(s.logits), s.hidden) for s in self.lm.score(told, rows, since)]

    def ahead(self, rows: Seq[int], picks: Seq[Pick | None]) -> bool:
        return False

    def guess(
        self, rows: Seq[int], tokens: Seq[int], shapes: Seq[DraftShape], picks: Seq[Pick]
    ) -> list[list[DraftToken]] | None:
        """Noise is keyed by the target's tokens, which the draft does not know: it goes by itself only without."""
        if shapes[0].width > 1 or any(pick.temperature for pick in picks):
            return None
        roots = self._feed(list(zip(rows, tokens, strict=True)))
        chains = self.lm.guess(rows, roots, shapes, picks)
        return None if chains is None else [self._known(chain) for chain in chains]

    def keep(self, paths: Seq[list[int]], rows: Seq[int]) -> None:
        self.lm.keep(paths, rows)

    def clear(self) -> None:
        self.lm.clear()

    @property
    def version(self) -> int:
        return self.lm.version

    def refresh(self) -> None:
        self.lm.refresh()

    def hidden(self, row: int) -> Tensor | None:
        return self.lm.hidden(row)

    def reference(self) -> Reference:
        return self.lm.reference()

    def memory(self, tokens: int) -> MemoryNeed | None:
        return self.lm.memory(tokens)

    def slice(self, layers: Seq[int], eager: bool = False) -> LM:
        raise UnsupportedModel("a draft with another tokenizer cannot be run without some of its layers")

    def early(self, layers: int) -> LM | None:
        return None

    def share(self, layers: int) -> float:
        return 1.0

    def _feed(self, begun: list[tuple[int, int]]) -> list[int]:
        """Have the draft read all but its last token of what each row holds and of its root; gives those."""
        ids = [self._held[row].follower.follow([*self._held[row].tokens, root]) for row, root in begun]
        self.lm.sync([known[:-1] for known in ids], [row for row, _ in begun])
        return [known[-1] for known in ids]

    def _told(self, tree: Tree, row: int) -> Tree:
        told = self._held[row].tree
        assert told is not None, "a tree grows from its root"
        for node in range(len(told), len(tree)):
            told.add(tree.parents[node], self.pair.to_draft[tree.tokens[node]])
        assert len(told) == len(tree), "only tokens that both have can be scored"
        return told

    def _known(self, chain: list[DraftToken]) -> list[DraftToken]:
        found = []
        for guess in chain:
            if guess.token not in self.pair.to_target:
                break
            found.append(guess._replace(token=self.pair.to_target[guess.token]))
        return found

    def _fit(self, logits: Tensor) -> Tensor:  # [nodes, draft's vocab] -> [nodes, vocab]
        self._theirs, self._ours = self._theirs.to(logits.device), self._ours.to(logits.device)
        out = logits.new_full((len(logits), self.vocab), -torch.inf)
        return out.index_copy_(1, self._ours, logits.index_select(1, self._theirs))


@dataclass(frozen=True)
class NamedModel:
    """A model with its tokenizer, and what to call it."""

    lm: LM
    tokenizer: Any
    name: str


def translated(target: NamedModel, draft: NamedModel) -> LM:
    """The draft as the target's tokens see it: as it is if the two have one vocabulary."""
    if target.tokenizer is None or draft.tokenizer is None:
        sizes = sorted((target.lm.vocab, draft.lm.vocab))
        if sizes[0] < PADDING * sizes[1]:
            raise UsageError(
                f"{draft.name!r} has {draft.lm.vocab} tokens and {target.name!r} has {target.lm.vocab}: a draft with "
                "another vocabulary needs the tokenizers of both, wrap(model, tokenizer)"
            )
        return draft.lm
    if target.tokenizer is draft.tokenizer or _vocabulary(target.tokenizer) == _vocabulary(draft.tokenizer):
        return draft.lm
    return TranslatedLM(
        draft.lm, Pair(Vocabulary(target.tokenizer, target.lm.vocab), Vocabulary(draft.tokenizer, draft.lm.vocab))
    )


def _vocabulary(tokenizer: Any) -> Any:
    return tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else len(tokenizer)
