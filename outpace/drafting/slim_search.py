"""Choose the layers that VIA-SD's slim verifier leaves out.

`search` compares models without some layers to the full model on calibration texts. `spread` leaves layers out evenly,
without any text. Both keep the first and the last layer, without which the output is mostly wrong.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.core.lm import Layers, Reference
from outpace.errors import UsageError

Cost = Callable[[Tensor, Tensor], float]  # log-probabilities of the slim and the full model, [tokens, vocab] each
ACCEPT, RESIDUAL = 0.5, 0.3  # a and b of the cost, with VIA-SD's values
IDLE = 40  # candidates without an improvement after which a search ends


def spread(count: int, skip: float) -> list[int]:
    """The layers that stay when a share of `count` layers is left out, evenly between the first and the last."""
    inner, gone = max(0, count - 2), _gone(count, skip)
    left_out = {1 + (2 * i + 1) * inner // (2 * gone) for i in range(gone)}
    return [layer for layer in range(count) if layer not in left_out]


def _gone(count: int, skip: float) -> int:
    if not 0 <= skip < 1:
        raise UsageError(f"the share of layers to skip must be at least 0 and less than 1, got {skip}")
    return min(round(skip * count), max(0, count - 2))


def tiered_cost(slim: Tensor, whole: Tensor) -> float:
    """VIA-SD's cost of a slim verifier that accepts tokens alone: the probability that it gives in excess, weighted by
    both distributions."""
    ratio = slim - whole
    over = (slim.exp() * (ratio + math.log(1 - ACCEPT)).clamp(min=0)).nan_to_num(0.0)
    under = (whole.exp() * (ratio + math.log(RESIDUAL)).clamp(min=0)).nan_to_num(0.0)
    return float((over + under).sum(-1).mean())


def divergence(slim: Tensor, whole: Tensor) -> float:
    """KL(whole || slim), in nats: the cost of a slim model that only drafts."""
    return float((whole.exp() * (whole - slim)).nan_to_num(0.0).sum(-1).mean())


@dataclass(frozen=True)
class LayerChoice:
    """The result of a search."""

    layers: list[int]  # the layers that stay
    cost: float
    even: float  # the cost of leaving layers out evenly
    tried: int
    agreement: float  # share of the texts' positions where the likeliest token is the full model's


def search(
    layers: Layers, texts: Seq[list[int]], skip: float = 0.45, cost: Cost = tiered_cost, steps: int = 200, seed: int = 0
) -> LayerChoice:
    """The layers to keep when a share `skip` is left out. The search starts from an even choice and exchanges one layer
    at a time; it keeps an exchange that lowers the cost on these texts."""
    texts = [text for text in texts if len(text) > 1]
    if not texts:
        raise UsageError("the layer search needs texts of at least two tokens")
    count, draw = layers.count, random.Random(seed)
    whole = layers.reference(range(count))
    wanted = [_log_probs(whole, text) for text in texts]

    def mean_cost(kept: Seq[int]) -> float:
        slim = layers.reference(kept)
        return sum(
            cost(_log_probs(slim, text), distribution) for text, distribution in zip(texts, wanted, strict=True)
        ) / len(texts)

    best = spread(count, skip)
    even = lowest = mean_cost(best)
    tried, idle, seen = 1, 0, {tuple(best)}
    while tried < steps and idle < IDLE:
        inner = best[1:-1]
        gone = [layer for layer in range(count) if layer not in best]
        if not inner or not gone:
            break
        idle += 1
        out, back = draw.choice(inner), draw.choice(gone)
        candidate = sorted({*best, back} - {out})
        if tuple(candidate) in seen:
            continue
        seen.add(tuple(candidate))
        tried += 1
        found = mean_cost(candidate)
        if found < lowest:
            best, lowest, idle = candidate, found, 0
    slim = layers.reference(best)
    alike = [
        _log_probs(slim, text).argmax(-1) == distribution.argmax(-1)
        for text, distribution in zip(texts, wanted, strict=True)
    ]
    return LayerChoice(best, lowest, even, tried, float(torch.cat(alike).double().mean()))


def _log_probs(model: Reference, text: list[int]) -> Tensor:
    """Log-probabilities after each token."""  # [tokens, vocab]
    return model.native(text, len(text)).double().log_softmax(-1)
