"""EarlyExitGraphLM: an early-exit draft whose chains are drafted on the device, with CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import torch

from outpace.core.lm import DraftShape, DraftToken
from outpace.core.tree import Tree
from outpace.models.compiled import packing
from outpace.models.compiled.drafts.draft_chain import MOST_STEPS, ChainStart, DraftChains
from outpace.models.early_exit import EarlyExitLM
from outpace.models.hf.stages import LayerSpan
from outpace.models.segment import PartialPass, Segment
from outpace.sampling.noise import words
from outpace.sampling.sampler import Pick

if TYPE_CHECKING:
    from outpace.models.compiled.cuda_graph import GraphRunner


class EarlyExitGraphLM(EarlyExitLM):
    """The first layers of a model that runs as CUDA graphs, as a draft."""

    def __init__(self, runner: GraphRunner, count: int):
        super().__init__(runner.lm, count, runner.lm.layers.first_layers)
        self.runner = runner
        self.drafts = self  # type: ignore[assignment]
        self._chains = DraftChains(runner, LayerSpan(0, count))

    def draft(
        self, slots: Seq[int], tokens: Seq[int], shapes: Seq[DraftShape], picks: Seq[Pick]
    ) -> list[list[DraftToken]] | None:
        lm, device = self.runner.lm, self.runner.lm.device
        if shapes[0].width > 1 or not self.runner.most_tokens or len(slots) > packing.MOST_SEGMENTS:
            return None  # a tree, compiled passes were given up, or too many slots for one pass
        steps = min(max(shape.depth for shape in shapes), MOST_STEPS)
        lm.reserve([self._segment(slot, Tree.chain([0] * steps)) for slot in slots])  # before anything runs
        scores = self.score([Tree([token]) for token in tokens], slots)  # also feeds the pending tokens
        lengths = [self._segment(slot, None).end + 1 for slot in slots]  # including the root
        noise = torch.cat([words(p.seed, torch.tensor([n])) for p, n in zip(picks, lengths, strict=True)])
        temperatures = torch.tensor([pick.temperature for pick in picks], device=device)
        logits = torch.cat([score.logits.all() for score in scores])
        chosen, _, probs, _ = torch.ops.outpace.choose(logits, noise.to(device), temperatures).tolist()
        found = [[DraftToken(int(token), prob)] for token, prob in zip(chosen, probs, strict=True)]
        if steps == 1:
            return found
        starts = [
            ChainStart(slot, drafted[0].token, length, pick)
            for drafted, slot, length, pick in zip(found, slots, lengths, picks, strict=True)
        ]
        chains = self._chains.run(starts, steps - 1)
        for slot, root, drafted, more in zip(slots, tokens, found, chains, strict=True):
            drafted += more.tokens
            begun = lm.slots[slot].begun
            assert begun is not None and more.states is not None
            fed = Tree.chain([root, *(token.token for token in drafted[:-1])])  # the last draft token was not fed
            lm.slots[slot].begun = PartialPass(fed, self.count, torch.cat([begun.states, more.states]))
        return found

    def _segment(self, slot: int, tree: Tree | None) -> Segment:
        held = self.runner.lm.slots[slot]
        return Segment(slot, held.length, held.pending, tree)
