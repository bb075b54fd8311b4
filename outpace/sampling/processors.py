"""Logits processors, such as penalties and banned sequences. Each is a pure function of (prefix, logits).

What a processor keeps is only a cache: of the text that it saw last, which usually is the one it sees next, but longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from outpace.errors import UsageError
from outpace.sampling.edits import Array, Edit, EditKind
from outpace.sampling.sampler import LogitEdit, Processor
from outpace.sampling.settings import Sampling


class TokenTable:
    """The tokens of a text from `start` on, each once, with a value that depends on how often each occurs.

    A longer text only adds what is new.
    """

    def __init__(self, start: int = 0, value: Callable[[int], float] = float) -> None:
        self._start, self._value = start, value
        self._forget()

    def _forget(self) -> None:
        self._text: list[int] = []
        self._places: dict[int, int] = {}
        self._counts: list[int] = []
        self._tokens, self._values = np.zeros(256, dtype=np.int64), np.zeros(256)  # with room for more

    def read(self, text: list[int]) -> tuple[Array, Array]:
        """Return the tokens of this text and their values in float64."""  # [n], [n]
        if text[: len(self._text)] != self._text:
            self._forget()
        for token in text[max(len(self._text), self._start) :]:
            place = self._places.setdefault(token, len(self._counts))
            if place == len(self._counts):
                self._add(token)
            self._counts[place] += 1
            self._values[place] = self._value(self._counts[place])
        self._text += text[len(self._text) :]
        n = len(self._counts)
        return self._tokens[:n], self._values[:n]

    def _add(self, token: int) -> None:
        place = len(self._counts)
        if place == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, self._tokens])
            self._values = np.concatenate([self._values, self._values])
        self._tokens[place] = token
        self._counts.append(0)


@dataclass(frozen=True)
class LogitBias(LogitEdit):
    bias: dict[int, float]

    def edit(self, prefix: list[int]) -> Edit:
        return self._edit

    @cached_property
    def _edit(self) -> Edit:
        return Edit(EditKind.ADD, np.array(list(self.bias), dtype=np.int64), np.array(list(self.bias.values())))


@dataclass(frozen=True)
class RepetitionPenalty(LogitEdit):
    """Lower the logits of every token of the prompt and the output, as Transformers does."""

    penalty: float

    def edit(self, prefix: list[int]) -> Edit:
        return Edit(EditKind.PENALIZE, self._known.read(prefix)[0], self._penalty)

    @cached_property
    def _known(self) -> TokenTable:
        return TokenTable()

    @cached_property
    def _penalty(self) -> Array:
        return np.array([self.penalty])


@dataclass(frozen=True)
class CountPenalty(LogitEdit):
    """Apply presence and frequency penalties over the output, as in OpenAI's API."""

    presence: float
    frequency: float
    start: int  # index at which the output begins

    def edit(self, prefix: list[int]) -> Edit:
        return Edit(EditKind.ADD, *self._known.read(prefix))

    @cached_property
    def _known(self) -> TokenTable:
        return TokenTable(self.start, lambda count: -(self.presence + self.frequency * count))


@dataclass(frozen=True)
class MinTokens(LogitEdit):
    """Forbid stop tokens until the output has `count` tokens."""

    count: int
    start: int
    stops: tuple[int, ...]

    def edit(self, prefix: list[int]) -> Edit:
        return _forbid(self.stops if len(prefix) - self.start < self.count else ())


@dataclass(frozen=True)
class Banned(LogitEdit):
    """Forbid the last token of each banned sequence wherever the sequence would be completed."""

    sequences: tuple[tuple[int, ...], ...]

    def edit(self, prefix: list[int]) -> Edit:
        return _forbid({s[-1] for s in self.sequences if len(s) == 1 or tuple(prefix[1 - len(s) :]) == s[:-1]})


def _forbid(tokens: Iterable[int]) -> Edit:
    return Edit(EditKind.FORBID, np.array([*tokens], dtype=np.int64))


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
