"""Noise rules: how a token is sampled from a distribution with the noise of its position.

A rule scores every token, and the token with the highest score is the sample. So with any rule, a drafter can rank its
candidates as the target will.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from outpace.sampling.noise import gumbel, uniform

KEPT = 16  # number of positions whose noise is cached


class NoiseRule(Protocol):
    """Samples from softmax(logits) with noise that depends only on the seed and the position."""

    def scores(self, logits: Tensor, seed: int, position: int, salt: int = 0) -> Tensor:
        """Return a score per token: the highest is the sample; tokens with probability 0 have -inf."""
        # [..., vocab] -> [..., vocab]


class GumbelRule:
    """Adds Gumbel noise to the logits: the order of the scores is a sample without replacement."""

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
        """Return the noise of a position, cached because drafts and the target use it several times."""
        vocab, device = logits.shape[-1], logits.device
        key = seed, position, salt, vocab, device
        if key not in self._kept:
            while len(self._kept) >= KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[key] = gumbel(torch.arange(vocab, device=device), seed, position, salt)
        return self._kept[key]


class InverseCDFRule:
    """Samples the token whose interval of the CDF contains one uniform number, as push-forward models learn it.

    The scores of the other tokens fall with the distance of their intervals from that number.
    """

    def scores(self, logits: Tensor, seed: int, position: int, salt: int = 0) -> Tensor:
        probs = logits.double().softmax(-1)
        high = probs.cumsum(-1)
        wanted = uniform(seed, position, salt) * high[..., -1:]
        distance = torch.maximum(high - probs - wanted, wanted - high).clamp(min=0)
        return (-distance).masked_fill(probs == 0, -torch.inf)


GUMBEL = "gumbel"
RULES: dict[str, type[NoiseRule]] = {GUMBEL: GumbelRule, "inverse_cdf": InverseCDFRule}
