"""Outlook: what a draft expects behind a guess, in the order in which the target will choose there."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.core.sequence import Sequence
from outpace.core.tree import Signal

TOP = 10  # draft probabilities that policies see


class RankedCandidates(NamedTuple):
    """What could follow: the likeliest first or, where the target samples, what the noise puts first."""

    tokens: list[int]
    probs: list[float]  # that the target chooses each of them
    entropy: float
    top: tuple[float, ...]
    distribution: Tensor | None  # [vocab]: that the tokens were drawn from, for a verifier that asks for it

    def signal(self, rank: int) -> Signal:
        return Signal(self.probs[rank], self.entropy, self.top)


def ranked_candidates(seq: Sequence, logits: Tensor, prefixes: Seq[list[int]], width: int) -> list[RankedCandidates]:
    """Of several places at once, at most `width` tokens each."""  # [places, vocab]
    sampler, shared = seq.sampler, seq.verifier.shares_noise
    processed, drawn = sampler.process_batch(logits, prefixes), not shared and not sampler.greedy
    precise = (
        processed.double() if drawn else processed.float()
    )  # a distribution that is drawn from, or numbers to go by
    distribution, vocab = precise.softmax(-1), processed.shape[-1]
    leading = processed.topk(min(max(width, TOP), vocab)).indices
    first, prob = leading[:, :width], distribution
    if not sampler.greedy:
        noised = _noised(seq, processed, prefixes)
        first = noised.topk(min(width, vocab)).indices
        # With shared noise, how far a token leads after the noise tells how likely the target chooses it too.
        prob = noised.float().softmax(-1) if shared else distribution
    top = distribution.gather(-1, leading[:, :TOP])
    possible = (distribution.gather(-1, first) > 0).sum(-1)  # the others cannot follow
    entropy = _entropy(precise, distribution, top[:, 0])
    numbers = [first, prob.gather(-1, first), top, possible[:, None], entropy[:, None]]
    read = torch.cat([column.double() for column in numbers], dim=-1).tolist()  # in one look: a device is far away
    own, count = distribution if drawn else [None] * len(distribution), first.shape[-1]
    return [_outlook(row, count, one) for row, one in zip(read, own, strict=True)]


def _outlook(row: list[float], count: int, distribution: Tensor | None) -> RankedCandidates:
    """One place's candidates, from a row of numbers: tokens, probabilities, the largest ones, a count, entropy."""
    possible = int(row[-2])
    tokens = [int(token) for token in row[:count][:possible]]
    return RankedCandidates(
        tokens, row[count : 2 * count][:possible], row[-1], tuple(row[2 * count : -2]), distribution
    )


def _noised(seq: Sequence, processed: Tensor, prefixes: Seq[list[int]]) -> Tensor:
    """With the target's own noise of each position, or with other noise where the draft may not know that."""
    positions = [len(prefix) for prefix in prefixes]
    salt = 0 if seq.verifier.shares_noise else seq.stats.passes + 1
    if min(positions) == max(positions):
        return seq.sampler.noised(processed, positions[0], salt)
    rows = zip(processed, positions, strict=True)
    return torch.stack([seq.sampler.noised(row, position, salt) for row, position in rows])


def _entropy(processed: Tensor, distribution: Tensor, best: Tensor) -> Tensor:
    """By the largest logit and its probability, without a logarithm per token."""  # [places, vocab], [places]
    mean = (distribution * processed.clamp(min=torch.finfo(processed.dtype).min)).sum(
        -1
    )  # tokens that cannot be add nothing
    return (processed.amax(-1) - best.log() - mean).clamp(min=0.0)


def fitted(logits: Tensor, vocab: int) -> Tensor:
    """Logits over the target's vocabulary: models of one family pad it to different sizes."""  # [places, vocab]
    if logits.shape[-1] >= vocab:
        return logits[:, :vocab]
    return torch.nn.functional.pad(logits, (0, vocab - logits.shape[-1]), value=-torch.inf)
