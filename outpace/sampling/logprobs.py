"""Log-probabilities of a token, as reported by requests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Logprob:
    """Log-probabilities under the model's own distribution, before any sampling setting, or under the distribution that
    was sampled."""

    token: int
    logprob: float
    top: dict[int, float]
    entropy: float  # of that distribution, in nats


def logprob_of(token: int, distribution: Tensor, count: int) -> Logprob:  # [vocab], logarithms
    top = torch.topk(distribution, min(count, distribution.numel()))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return Logprob(token, distribution[token].item(), dict(pairs), torch.special.entr(distribution.exp()).sum().item())
