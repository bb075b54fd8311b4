"""Logits processors, such as penalties and banned sequences. Each is a pure function of (prefix, logits)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.errors import UsageError
from outpace.sampling.sampler import Processor
from outpace.sampling.settings import Sampling


@dataclass(frozen=True)
class LogitBias:
    bias: dict[int, float]

    def __call__(self, prefix: list[int], logits: Tensor) -> Tensor:
        index = torch.tensor(list(self.bias), device=logits.device)
        values = torch.tensor(list(self.bias.values()), dtype=logits.dtype, device=logits.device)
        return logits.index_add(0, index, values)


@dataclass(frozen=True)
class RepetitionPenalty:
    """Lower the logits of every token of the prompt and the output, as Transformers does."""

    penalty: float

    def __call__(self, prefix: list[int], logits: Tensor) -> Tensor:
        seen = torch.tensor(sorted(set(prefix)), device=logits.device)
        values = logits[seen]
        scaled = torch.where(values < 0, values * self.penalty, values / self.penalty)
        return logits.index_copy(0, seen, scaled)


@dataclass(frozen=True)
class CountPenalty:
    """Apply presence and frequency penalties over the output, as in OpenAI's API."""

    presence: float
    frequency: float
    start: int  # index at which the output begins

    def __call__(self, prefix: list[int], logits: Tensor) -> Tensor:
        counts = Counter(prefix[self.start :])
        if not counts:
            return logits
        index = torch.tensor(list(counts), device=logits.device)
        costs = [self.presence + self.frequency * count for count in counts.values()]
        return logits.index_add(0, index, -torch.tensor(costs, dtype=logits.dtype, device=logits.device))


@dataclass(frozen=True)
class MinTokens:
    """Forbid stop tokens until the output has `count` tokens."""

    count: int
    start: int
    stops: tuple[int, ...]

    def __call__(self, prefix: list[int], logits: Tensor) -> Tensor:
        if len(prefix) - self.start >= self.count:
            return logits
        return logits.index_fill(0, torch.tensor(self.stops, device=logits.device), -torch.inf)


@dataclass(frozen=True)
class Banned:
    """Forbid the last token of each banned sequence wherever the sequence would be completed."""

    sequences: tuple[tuple[int, ...], ...]

    def __call__(self, prefix: list[int], logits: Tensor) -> Tensor:
        ends = [s[-1] for s in self.sequences if len(s) == 1 or tuple(prefix[1 - len(s) :]) == s[:-1]]
        if not ends:
            return logits
        return logits.index_fill(0, torch.tensor(ends, device=logits.device), -torch.inf)


@dataclass(frozen=True)
class CustomProcessor:
    """Call a Transformers `LogitsProcessor`, or any function of (input_ids [1, n], scores [1, vocab])."""

    function: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, prefix: list[int], logits: Tensor) -> Tensor:
        ids = torch.tensor([prefix], device=logits.device)
        return self.function(ids, logits[None].clone())[0]


@dataclass(frozen=True)
class Constraints:
    """Constraints of one request besides its `Sampling`, already in token ids."""

    min_tokens: int = 0
    stops: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    custom: tuple[Callable[[Tensor, Tensor], Tensor], ...] = ()
    grammar: Processor | None = None


def build(sampling: Sampling, rules: Constraints, start: int, vocab: int) -> list[Processor]:
    """Build the processors of a request whose output begins at `start`; the grammar comes last, so it prevails."""
    _check_ids("logit_bias", sampling.logit_bias, vocab)
    _check_ids("bad_words", [token for sequence in rules.bad_words for token in sequence], vocab)
    _check_ids("stop_token_ids", rules.stops, vocab)
    if not all(rules.bad_words):
        raise UsageError("bad_words: a sequence is empty")
    out: list[Processor] = []
    if sampling.repetition_penalty != 1:
        out.append(RepetitionPenalty(sampling.repetition_penalty))
    if sampling.presence_penalty or sampling.frequency_penalty:
        out.append(CountPenalty(sampling.presence_penalty, sampling.frequency_penalty, start))
    if sampling.logit_bias:
        out.append(LogitBias(dict(sampling.logit_bias)))
    if rules.bad_words:
        out.append(Banned(rules.bad_words))
    if rules.min_tokens and rules.stops:
        out.append(MinTokens(rules.min_tokens, start, rules.stops))
    out.extend(CustomProcessor(function) for function in rules.custom)
    if rules.grammar is not None:
        out.append(rules.grammar)
    return out


def _check_ids(name: str, ids: Sequence[int] | dict[int, float], vocab: int) -> None:
    wrong = [token for token in ids if not 0 <= token < vocab]
    if wrong:
        raise UsageError(f"{name}: token {wrong[0]} is not in the vocabulary of {vocab} tokens")
