"""Lossy verifiers: they accept more draft tokens but change the distribution."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from outpace.core.sequence import Sequence, Step
from outpace.core.tree import Tree
from outpace.core.verifier import Verifier, descend
from outpace.errors import check_ranges

if TYPE_CHECKING:
    from outpace.core.lm import Scores


@dataclass(frozen=True)
class Typical(Verifier):
    """Accept a draft token that is likely enough given the entropy of the distribution (Medusa). Lossy."""

    lossless: ClassVar[bool] = False
    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        check_ranges(self, epsilon=(0, 1), delta=(0, math.inf))

    def verify(self, seq: Sequence, tree: Tree, scores: Scores) -> Step:
        def choose(node: int) -> int:
            distribution = warm_distribution(seq, scores.logits[node])
            entropy = torch.special.entr(distribution).sum()
            floor = min(self.epsilon, self.delta * float(torch.exp(-entropy)))
            likely = [(float(distribution[tree.tokens[c]]), tree.tokens[c]) for c in tree.children(node)]
            prob, token = max(likely, default=(0.0, -1))
            return token if prob > floor else seq.sampler.choose(scores.logits[node], seq.tokens)

        return descend(seq, tree, scores, choose)


@dataclass(frozen=True)
class Tiered(Verifier):
    """Accept draft tokens that the method trusts; the target chooses at all other nodes (VIA-SD). Lossy."""

    lossless: ClassVar[bool] = False

    def verify(self, seq: Sequence, tree: Tree, scores: Scores) -> Step:
        def choose(node: int) -> int:
            trusted = next((child for child in tree.children(node) if child in tree.trusted), None)
            if trusted is not None:
                return tree.tokens[trusted]
            return seq.sampler.choose(scores.logits[node], seq.tokens)

        return descend(seq, tree, scores, choose)


def warm_distribution(seq: Sequence, logits: Tensor) -> Tensor:
    """Return the distribution under the sampling settings; under greedy decoding, the softmax at temperature 1."""
    processed = seq.sampler.process(logits, seq.tokens)
    return processed.double().softmax(-1)
