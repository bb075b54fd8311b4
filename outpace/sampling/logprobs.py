"""Log-probabilities of a token, as requests report them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Logprob:
    """Log-probabilities under the model's own law, before any sampling setting, or under the law that was sampled."""

    token: int
    logprob: float
    top: dict[int, float]
    entropy: float  # of that law, in nats


def logprob_of(token: int, law: Tensor, count: int) -> Logprob:  # [vocab], logarithms
    top = torch.topk(law, min(count, law.numel()))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return Logprob(token, law[token].item(), dict(pairs), torch.special.entr(law.exp()).sum().item())
