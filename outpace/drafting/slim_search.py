"""Which layers a slim verifier can do without: a search on calibration texts, by what the rest of it then says.

`search` compares the model without some layers with the whole one; `spread` leaves layers out evenly, unseen. Both keep
the first and the last layer, without which little is right.
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

Cost = Callable[[Tensor, Tensor], float]  # log-probabilities of a slim model and of the whole one, [tokens, vocab]
ACCEPT, RESIDUAL = 0.5, 0.3  # the a and b of the cost, as VIA-SD sets them
IDLE = 40  # proposals without a gain after which a search ends


def spread(count: int, skip: float) -> list[int]:
    """The layers that stay when a share of `count` layers is left out evenly between the first and the last."""
    inner, gone = max(0, count - 2), _gone(count, skip)
    left_out = {1 + (2 * i + 1) * inner // (2 * gone) for i in range(gone)}
    return [layer for layer in range(count) if layer not in left_out]


def _gone(count: int, skip: float) -> int:
    if not 0 <= skip < 1:
        raise UsageError(f"a share of layers to skip lies between 0 and 1, got {skip}")
    return min(round(skip * count), max(0, count - 2))


def tiered_cost(slim: Tensor, whole: Tensor) -> float:
    """How far a slim verifier that accepts by itself leads away (VIA-SD): what it holds too likely, by both
    distributions."""
    ratio = slim - whole
    over = (slim.exp() * (ratio + math.log(1 - ACCEPT)).clamp(min=0)).nan_to_num(0.0)
    under = (whole.exp() * (ratio + math.log(RESIDUAL)).clamp(min=0)).nan_to_num(0.0)
    return float((over + under).sum(-1).mean())


def divergence(slim: Tensor, whole: Tensor) -> float:
    """KL(whole || slim), in nats: what counts where the slim model only guesses."""
    return float((whole.exp() * (whole - slim)).nan_to_num(0.0).sum(-1).mean())


@dataclass(frozen=True)
class LayerChoice:
    """What a search ended with."""

    layers: list[int]  # that stay
    cost: float
    even: float  # the cost of leaving layers out evenly
    tried: int
    agreement: float  # share of the places of the texts at which the likeliest token is the whole model's


def search(
    layers: Layers, texts: Seq[list[int]], skip: float = 0.45, cost: Cost = tiered_cost, steps: int = 200, seed: int = 0
) -> LayerChoice:
    """The layers to keep of a model that skips a share of them: from an even choice on, one layer is exchanged for
    another while that makes what is left more like the whole, on these texts."""
    texts = [text for text in texts if len(text) > 1]
    if not texts:
        raise UsageError("a search for layers needs texts of two tokens or more")
    count, draw = layers.count, random.Random(seed)
    whole = layers.reference(range(count))
    wanted = [_said(whole, text) for text in texts]

    def price(kept: Seq[int]) -> float:
        slim = layers.reference(kept)
        return sum(
            cost(_said(slim, text), distribution) for text, distribution in zip(texts, wanted, strict=True)
        ) / len(texts)

    best = spread(count, skip)
    even = lowest = price(best)
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
        found = price(candidate)
        if found < lowest:
            best, lowest, idle = candidate, found, 0
    slim = layers.reference(best)
    alike = [
        _said(slim, text).argmax(-1) == distribution.argmax(-1)
        for text, distribution in zip(texts, wanted, strict=True)
    ]
    return LayerChoice(best, lowest, even, tried, float(torch.cat(alike).double().mean()))


def _said(model: Reference, text: list[int]) -> Tensor:
    """Log-probabilities after each token."""  # [tokens, vocab]
    return model.native(text, len(text)).double().log_softmax(-1)
