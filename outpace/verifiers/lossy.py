"""Rules of acceptance that change the distribution, for speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from outpace.core.sequence import Sequence, Step
from outpace.core.tree import Tree
from outpace.core.verifier import Verifier, descend

if TYPE_CHECKING:
    from outpace.core.lm import Scores


@dataclass(frozen=True)
class Typical(Verifier):
    """Accept a drafted token that is likely enough for the distribution's entropy (Medusa). Lossy."""

    lossless: ClassVar[bool] = False
    epsilon: float = 0.09
    delta: float = 0.3

    def verify(self, seq: Sequence, tree: Tree, scores: Scores) -> Step:
        def choose(node: int) -> int:
            distribution = warm_distribution(seq, scores.logits[node])
            entropy = torch.special.entr(distribution).sum()
            floor = min(self.epsilon, self.delta * float(torch.exp(-entropy)))
            likely = [(float(distribution[tree.tokens[c]]), tree.tokens[c]) for c in tree.children(node)]
            prob, token = max(likely, default=(0.0, -1))
            return token if prob > floor else seq.sampler.choose(scores.logits[node], seq.tokens)

        return descend(seq, tree, scores.logits, choose)


@dataclass(frozen=True)
class Tiered(Verifier):
    """Take what the method vouches for unasked; the target chooses where it does not (VIA-SD). Lossy."""

    lossless: ClassVar[bool] = False

    def verify(self, seq: Sequence, tree: Tree, scores: Scores) -> Step:
        def choose(node: int) -> int:
            vouched = next((child for child in tree.children(node) if child in tree.trusted), None)
            if vouched is not None:
                return tree.tokens[vouched]
            return seq.sampler.choose(scores.logits[node], seq.tokens)

        return descend(seq, tree, scores.logits, choose)


def warm_distribution(seq: Sequence, logits: Tensor) -> Tensor:
    """The distribution under the sampling settings; under greedy decoding, the distribution the model itself gives."""
    processed = seq.sampler.process(logits, seq.tokens)
    return processed.double().softmax(-1)
