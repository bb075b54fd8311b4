"""Log-probabilities of a token, as reported by requests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.sampling import native
from outpace.sampling.top_k import top_k

MOST_ON_DEVICE = 64  # likeliest tokens that a GPU reports with a choice; for more, the host reads the logits


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
    found = native.logprobs(logits, token, min(count, len(logits)))
    if found is not None:
        return Logprob(token, found.own, dict(zip(found.tokens, found.tops, strict=True)), found.entropy)
    best = top_k(logits[None], min(count, len(logits)))[0]  # [count]
    logs = logits.double().log_softmax(-1)  # [vocab]
    tops = dict(zip(best.tolist(), logs[best].tolist(), strict=True))
    return Logprob(token, logs[token].item(), tops, torch.special.entr(logs.exp()).sum().item())
