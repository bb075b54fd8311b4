"""Log-probabilities of a token, as reported by requests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.sampling import native
from outpace.sampling.top_k import top_k


@dataclass(frozen=True)
class Logprob:
    """Log-probabilities under the model's own distribution, before any sampling setting, or under the distribution that
    was sampled."""

    token: int
    logprob: float
    top: dict[int, float]
    entropy: float  # of that distribution, in nats


def logprob_of(token: int, logits: Tensor, count: int) -> Logprob:  # [vocab]
    """Return the log-probability of a token under softmax(logits), in float64, and the likeliest `count` tokens."""
    found = native.log_sum(logits)
    best = top_k(logits[None], min(count, len(logits)))[0]  # [count]
    if found is None:
        logs = logits.double().log_softmax(-1)  # [vocab]
        own, tops = logs[token].item(), logs[best].tolist()
        entropy = torch.special.entr(logs.exp()).sum().item()
    else:
        largest, log_sum, entropy = found
        own, *tops = [logit - largest - log_sum for logit in logits[[token, *best.tolist()]].tolist()]
    return Logprob(token, own, dict(zip(best.tolist(), tops, strict=True)), entropy)
