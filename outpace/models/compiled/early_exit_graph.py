"""EarlyGraphLM: a model's first layers as a draft whose chains stay on the device."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import torch

from outpace.core.lm import DraftShape, DraftToken
from outpace.core.tree import Tree
from outpace.models.compiled import packing
from outpace.models.compiled.draft_chain import MOST_STEPS, ChainStart, DraftChains
from outpace.models.early_exit import EarlyLM
from outpace.models.hf.stages import LayerSpan
from outpace.models.segment import PartialPass, Segment
from outpace.sampling.noise import words
from outpace.sampling.sampler import Pick

if TYPE_CHECKING:
    from outpace.models.compiled.cuda_graph import GraphLM


class EarlyGraphLM(EarlyLM):
    """The first layers of a model that runs as graphs."""

    whole: GraphLM

    def __init__(self, whole: GraphLM, layers: int):
        super().__init__(whole, layers)
        self._chains = DraftChains(whole, LayerSpan(0, layers))

    def guess(
        self, rows: Seq[int], tokens: Seq[int], shapes: Seq[DraftShape], picks: Seq[Pick]
    ) -> list[list[DraftToken]] | None:
        whole = self.whole
        if shapes[0].width > 1 or not whole.most_tokens or len(rows) > packing.MOST_JOBS:
            return None  # a tree, given up, or too many for a compiled pass
        steps = min(max(shape.depth for shape in shapes), MOST_STEPS)
        whole.reserve([self._job(row, Tree.chain([0] * steps)) for row in rows])  # before anything is begun
        scores = self.score([Tree([token]) for token in tokens], rows)  # with what the rows have pending
        lengths = [self._job(row, None).end + 1 for row in rows]  # with the root
        noise = torch.cat([words(p.seed, torch.tensor([n])) for p, n in zip(picks, lengths, strict=True)])
        heat = torch.tensor([pick.temperature for pick in picks], device=whole.device)
        logits = torch.cat([score.logits for score in scores])
        chosen, _, probs, _ = torch.ops.outpace.choose(logits, noise.to(whole.device), heat).tolist()
        found = [[DraftToken(int(token), prob)] for token, prob in zip(chosen, probs, strict=True)]
        if steps == 1:
            return found
        links = [
            ChainStart(guesses[0].token, whole.cache.base(row), length, pick)
            for guesses, row, length, pick in zip(found, rows, lengths, picks, strict=True)
        ]
        drawn = self._chains.run(links, steps - 1)
        for row, root, guesses, more in zip(rows, tokens, found, drawn, strict=True):
            guesses += more.guesses
            begun = whole.rows[row].begun
            assert begun is not None and more.states is not None
            fed = Tree.chain([root, *(guess.token for guess in guesses[:-1])])  # the last guess was not fed
            whole.rows[row].begun = PartialPass(fed, self.stack, torch.cat([begun.states, more.states]))
        return found

    def _job(self, row: int, tree: Tree | None) -> Segment:
        held = self.whole.rows[row]
        return Segment(row, len(held.tokens), held.pending, tree)
