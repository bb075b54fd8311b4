"""Noise rules: how a token is drawn from a distribution with the noise of its position.

A rule gives every token a score, and the token with the largest score is the draw. So drafts can rank their candidates
as the target will, whatever the rule is.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from outpace.sampling.noise import gumbel, uniform

KEPT = 16  # positions whose noise is kept


class NoiseRule(Protocol):
    """Draws from softmax(logits) with noise that depends on the seed and the position alone."""

    def scores(self, logits: Tensor, seed: int, position: int, salt: int = 0) -> Tensor:
        """A score for each token, whose largest is the draw; tokens that cannot be drawn have -inf."""
        # [..., vocab] -> [..., vocab]


class GumbelRule:
    """The largest logit after Gumbel noise: the order of the scores is a draw without replacement."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, int, int, torch.device], Tensor] = {}  # noise of a position, [vocab]

    def scores(self, logits: Tensor, seed: int, position: int, salt: int = 0) -> Tensor:
        if logits.amin() > -torch.inf:
            return logits.double() + self._noise(logits, seed, position, salt)
        # Noise is keyed by token id, so tokens that were filtered out need none.
        alive = torch.nonzero((logits > -torch.inf).reshape(-1, logits.shape[-1]).any(0)).flatten()
        scores = torch.full_like(logits, -torch.inf, dtype=torch.float64)
        noise = gumbel(alive, seed, position, salt)
        return scores.index_copy_(-1, alive, logits[..., alive].double() + noise)

    def _noise(self, logits: Tensor, seed: int, position: int, salt: int) -> Tensor:  # [vocab]
        """Drafts and the target ask for the noise of a position again and again, so it is kept for a while."""
        vocab, device = logits.shape[-1], logits.device
        key = seed, position, salt, vocab, device
        if key not in self._kept:
            while len(self._kept) >= KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[key] = gumbel(torch.arange(vocab, device=device), seed, position, salt)
        return self._kept[key]


class InverseCDFRule:
    """The token whose part of the cumulated probabilities holds one uniform number, as push-forward models learn it.

    The scores of all others fall with the distance of their parts from that number.
    """

    def scores(self, logits: Tensor, seed: int, position: int, salt: int = 0) -> Tensor:
        probs = logits.double().softmax(-1)
        high = probs.cumsum(-1)
        wanted = uniform(seed, position, salt) * high[..., -1:]
        distance = torch.maximum(high - probs - wanted, wanted - high).clamp(min=0)
        return (-distance).masked_fill(probs == 0, -torch.inf)


GUMBEL = "gumbel"
RULES: dict[str, type[NoiseRule]] = {GUMBEL: GumbelRule, "inverse_cdf": InverseCDFRule}
