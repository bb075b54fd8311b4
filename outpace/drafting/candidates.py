"""The draft's top candidates for the next token, ranked as the target will choose (with the shared Gumbel noise when
sampling)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.core.sequence import Sequence
from outpace.core.tree import Signal

TOP = 10  # how many of the draft's largest probabilities policies see


class RankedCandidates(NamedTuple):
    """Candidates for the next token, likeliest first; where the target samples, in the order of the noised logits."""

    tokens: list[int]
    probs: list[float]  # probability that the target chooses each token
    entropy: float
    top: tuple[float, ...]
    distribution: Tensor | None  # [vocab]: what the tokens were drawn from, for a verifier that needs it

    def signal(self, rank: int) -> Signal:
        return Signal(self.probs[rank], self.entropy, self.top)


def ranked_candidates(seq: Sequence, logits: Tensor, prefixes: Seq[list[int]], width: int) -> list[RankedCandidates]:
    """Rank the candidates at several positions at once, at most `width` at each."""  # [positions, vocab]
    sampler, shared = seq.sampler, seq.verifier.shares_noise
    processed, drawn = sampler.process_batch(logits, prefixes), not shared and not sampler.greedy
    # Tokens are drawn in double precision; single is enough for estimates.
    precise = processed.double() if drawn else processed.float()
    distribution, vocab = precise.softmax(-1), processed.shape[-1]
    leading = processed.topk(min(max(width, TOP), vocab)).indices
    first, prob = leading[:, :width], distribution
    if not sampler.greedy:
        noised = _noised(seq, processed, prefixes)
        first = noised.topk(min(width, vocab)).indices
        # With shared noise, a token's lead after the noise tells how likely the target is to choose it too.
        prob = noised.float().softmax(-1) if shared else distribution
    top = distribution.gather(-1, leading[:, :TOP])
    possible = (distribution.gather(-1, first) > 0).sum(-1)  # the others have probability 0
    entropy = _entropy(precise, distribution, top[:, 0])
    columns = [first, prob.gather(-1, first), top, possible[:, None], entropy[:, None]]
    read = torch.cat([column.double() for column in columns], dim=-1).tolist()  # a single transfer from the device
    own, count = distribution if drawn else [None] * len(distribution), first.shape[-1]
    return [_unpacked(numbers, count, one) for numbers, one in zip(read, own, strict=True)]


def _unpacked(numbers: list[float], count: int, distribution: Tensor | None) -> RankedCandidates:
    """One position's candidates from its numbers: tokens, probabilities, top probabilities, a count and the entropy."""
    possible = int(numbers[-2])
    tokens = [int(token) for token in numbers[:count][:possible]]
    return RankedCandidates(
        tokens, numbers[count : 2 * count][:possible], numbers[-1], tuple(numbers[2 * count : -2]), distribution
    )


def _noised(seq: Sequence, processed: Tensor, prefixes: Seq[list[int]]) -> Tensor:
    """Add the target's own noise of each position, or separate noise where the draft must not know the target's."""
    positions = [len(prefix) for prefix in prefixes]
    salt = 0 if seq.verifier.shares_noise else seq.stats.passes + 1
    if min(positions) == max(positions):
        return seq.sampler.noised(processed, positions[0], salt)
    pairs = zip(processed, positions, strict=True)
    return torch.stack([seq.sampler.noised(logits, position, salt) for logits, position in pairs])


def _entropy(processed: Tensor, distribution: Tensor, best: Tensor) -> Tensor:
    """Entropy from the largest logit and its probability, without a logarithm per token."""  # [positions, vocab]
    # After the clamp, impossible tokens add nothing.
    mean = (distribution * processed.clamp(min=torch.finfo(processed.dtype).min)).sum(-1)
    return (processed.amax(-1) - best.log() - mean).clamp(min=0.0)


def fitted(logits: Tensor, vocab: int) -> Tensor:
    """Fit logits to the target's vocabulary: models of one family pad it to different sizes."""  # [nodes, vocab]
    if logits.shape[-1] >= vocab:
        return logits[:, :vocab]
    return torch.nn.functional.pad(logits, (0, vocab - logits.shape[-1]), value=-torch.inf)
