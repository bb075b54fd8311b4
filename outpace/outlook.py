"""Outlook: what a draft expects behind a guess, in the order in which the target will choose there."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.sequence import Sequence
from outpace.tree import Signal

TOP = 10  # draft probabilities that policies see


class Outlook(NamedTuple):
    """What could follow: the likeliest first or, where the target samples, what the noise puts first."""

    tokens: list[int]
    chances: list[float]  # that the target chooses each of them
    entropy: float
    top: tuple[float, ...]
    law: Tensor | None  # [vocab]: that the tokens were drawn from, for a verifier that asks for it

    def signal(self, rank: int) -> Signal:
        return Signal(self.chances[rank], self.entropy, self.top)


def outlooks(seq: Sequence, logits: Tensor, prefixes: Seq[list[int]], width: int) -> list[Outlook]:
    """Of several places at once, at most `width` tokens each."""  # [places, vocab]
    sampler, shared = seq.sampler, seq.verifier.shares_noise
    shaped = sampler.shapes(logits, prefixes)
    law = shaped.double().softmax(-1)
    positions, salt = [len(prefix) for prefix in prefixes], 0 if shared else seq.stats.passes + 1
    if min(positions) == max(positions):
        noised = sampler.noised(shaped, positions[0], salt)
    else:
        noised = torch.stack([sampler.noised(row, at, salt) for row, at in zip(shaped, positions, strict=True)])
    # With shared noise, how far a token leads after the noise tells how likely the target chooses it too.
    chance = noised.double().softmax(-1) if shared and not sampler.greedy else law
    first = noised.topk(min(width, noised.shape[-1])).indices
    drawn = not shared and not sampler.greedy
    columns = (
        first.tolist(),
        chance.gather(-1, first).tolist(),
        (law > 0).sum(-1).tolist(),
        torch.special.entr(law).sum(-1).tolist(),
        law.topk(min(TOP, law.shape[-1])).values.tolist(),
        law if drawn else [None] * len(law),
    )
    return [
        Outlook(tokens[:possible], chances[:possible], entropy, tuple(top), own)
        for tokens, chances, possible, entropy, top, own in zip(*columns, strict=True)
    ]


def fitted(logits: Tensor, vocab: int) -> Tensor:
    """Logits over the target's vocabulary: models of one family pad it to different sizes."""  # [places, vocab]
    if logits.shape[-1] >= vocab:
        return logits[:, :vocab]
    return torch.nn.functional.pad(logits, (0, vocab - logits.shape[-1]), value=-torch.inf)
