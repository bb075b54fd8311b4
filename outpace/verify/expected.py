"""The distribution that sampling settings define, from Transformers' own processors: no code is shared with our
sampler."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from outpace.sampling.settings import Sampling


def expected_distribution(logits: Tensor, text: list[int], start: int, sampling: Sampling) -> Tensor:
    """Compute the next-token distribution with Transformers' processors, and with OpenAI's formula for the presence
    and frequency penalties, which Transformers lacks."""
    from transformers.generation import logits_process as theirs

    ids, scores = torch.tensor([text], device=logits.device), logits.double()[None].clone()  # [1, vocab]
    if sampling.repetition_penalty != 1:
        scores = theirs.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, scores)
    for token, count in Counter(text[start:]).items():
        scores[0, token] -= sampling.presence_penalty + sampling.frequency_penalty * count
    for token, bias in sampling.logit_bias.items():
        scores[0, token] += bias
    chain: list[theirs.LogitsProcessor] = []
    if sampling.temperature != 1:
        chain.append(theirs.TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        chain.append(theirs.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chain.append(theirs.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        chain.append(theirs.MinPLogitsWarper(sampling.min_p))
    if sampling.typical_p < 1:
        chain.append(theirs.TypicalLogitsWarper(sampling.typical_p))
    for process in chain:
        scores = process(ids, scores)
    return scores[0].softmax(-1)
