"""Sampler: computes the distribution of the next token from logits, and samples from it with keyed noise.

A processor is a pure function of the prefix and the logits, so it can run at any node of a tree. The choice at a node
is `argmax(logits)`, or `argmax(logits + gumbel(seed, position, token))`, which is a sample of softmax(logits).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outpace.errors import RequestFailed
from outpace.sampling import native
from outpace.sampling.edits import Edit
from outpace.sampling.noise import uniform
from outpace.sampling.noise_rule import GUMBEL, RULES, GumbelRule, NoiseRule
from outpace.sampling.settings import Sampling


class Processor(Protocol):
    """Changes the logits of the token after `prefix`."""

    def __call__(self, prefix: list[int], logits: Tensor) -> Tensor: ...  # [vocab] -> [vocab]


class LogitEdit(ABC):
    """A processor whose change is an `Edit`, which compiled code makes together with the choice."""

    @abstractmethod
    def edit(self, prefix: list[int]) -> Edit:
        """Return the change of the logits of the token after `prefix`."""

    def __call__(self, prefix: list[int], logits: Tensor) -> Tensor:  # [vocab] -> [vocab]
        logits = logits.clone()
        self.edit(prefix).apply(logits)
        return logits


@dataclass(frozen=True)
class Pick:
    """A choice that a model can make on its device, at every node of a tree unless it has edits.

    Edits depend on the text before the choice. Only a model with `late_choices` is given them, and log-probabilities.
    """

    seed: int
    temperature: float  # 0 is greedy
    filters: tuple[Filter, ...] = ()
    rule: str = GUMBEL  # name of the noise rule; a model that does not support it leaves the choice to the host
    edits: tuple[LogitEdit, ...] = ()
    logprobs: int | None = None  # number of likeliest tokens to report with the choice; None reports nothing


class Sampler:
    """Makes the choices of one request: processors, then temperature and filters, then noise."""

    def __init__(self, sampling: Sampling, processors: Sequence[Processor] = (), stream: int = 0, rule: str = GUMBEL):
        self.sampling = sampling
        self.rule = rule
        self.processors = tuple(processors)
        others = [i for i, process in enumerate(self.processors) if not isinstance(process, LogitEdit)]
        first = others[-1] + 1 if others else 0
        self._whole = self.processors[:first]  # they need the row
        self._edits = tuple(process for process in self.processors[first:] if isinstance(process, LogitEdit))
        self.seed = sampling.seed if stream == 0 else sampling.seed ^ (stream * 0x9E3779B97F4A7C15)
        self.filters = _filters(sampling)
        self._rule: NoiseRule = RULES[rule]()
        self._gumbel = self._rule if isinstance(self._rule, GumbelRule) else GumbelRule()

    @property
    def greedy(self) -> bool:
        return self.sampling.temperature == 0

    @property
    def plain(self) -> bool:
        """True if the choice is the argmax of the raw logits, so that one call can choose at all nodes."""
        return self.greedy and not self.processors

    @property
    def pick(self) -> Pick | None:
        """The choice as a `Pick`, or None if it depends on the prefix."""
        return None if self.processors else self.edited_pick

    @property
    def edited_pick(self) -> Pick | None:
        """The choice as a `Pick` with its edits, or None if a processor is not an edit."""
        if self._whole:
            return None
        return Pick(self.seed, self.sampling.temperature, () if self.greedy else self.filters, self.rule, self._edits)

    def process(self, logits: Tensor, prefix: list[int]) -> Tensor:
        """Return the final logits of the token after `prefix`; excluded tokens have -inf."""
        # [vocab] -> [vocab]
        return self._finished(self._started(logits, prefix), prefix)

    def _started(self, logits: Tensor, prefix: list[int]) -> Tensor:  # [vocab] -> [vocab]
        """Logits after the processors up to the last that is no edit."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if self._whole and not math.isfinite(logits.max()):
            raise RequestFailed(f"the model returned non-finite logits at position {len(prefix)}")
        return _edited(self._whole, logits, prefix)

    def _finished(self, logits: Tensor, prefix: list[int]) -> Tensor:  # [vocab] -> [vocab]
        """Logits after the rest of the processors, the temperature and the filters."""
        where = f"at position {len(prefix)}"
        if not self._whole and not math.isfinite(logits.max()):
            raise RequestFailed(f"the model returned non-finite logits {where}")
        logits = _edited(self._edits, logits, prefix)
        best = float(logits.max()) if self.processors else 0.0
        if best == -math.inf:
            raise RequestFailed(f"no token is allowed {where}: the constraints exclude all of them")
        if not math.isfinite(best):
            raise RequestFailed(f"a processor returned non-finite logits {where}")
        return self._filtered(logits)

    def process_batch(self, logits: Tensor, prefixes: Sequence[list[int]]) -> Tensor:
        """Run `process` for several prefixes, in one call unless there are processors."""  # [n, vocab] -> [n, vocab]
        if self.processors:
            return torch.stack([self.process(row, prefix) for row, prefix in zip(logits, prefixes, strict=True)])
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if not torch.isfinite(logits.amax(-1)).all():
            raise RequestFailed(f"the model returned non-finite logits at position {len(prefixes[0])}")
        return self._filtered(logits)

    def _filtered(self, logits: Tensor) -> Tensor:  # [..., vocab] -> [..., vocab]
        if self.greedy:
            return logits
        logits = logits / self.sampling.temperature
        for keep in self.filters:
            logits = keep(logits)
        return logits

    def choose(self, logits: Tensor, prefix: list[int]) -> int:
        """Return the chosen token after `prefix`."""
        logits = self._started(logits, prefix)
        found = self._compiled(logits, prefix)
        if found is None:
            found = int(self.noised(self._finished(logits, prefix), len(prefix)).argmax())
        return found

    def _compiled(self, logits: Tensor, prefix: list[int]) -> int | None:
        """Return the same choice by compiled code, or None where that code is not certain."""
        if (self.rule != GUMBEL and not self.greedy) or not native.readable(logits):
            return None
        edits = [process.edit(prefix) for process in self._edits]
        return native.choose(logits, self.sampling, self.seed, len(prefix), edits)

    def noised(self, processed: Tensor, position: int, salt: int = 0) -> Tensor:
        """Return the scores that rank tokens at a position: the highest is the sample. Greedy decoding adds no noise.

        A draft that may not use the target's noise passes a `salt`. It always gets Gumbel noise, because only this
        ranks several samples without replacement.
        """  # [..., vocab] -> [..., vocab]
        if self.greedy:
            return processed
        return (self._rule if not salt else self._gumbel).scores(processed, self.seed, position, salt)

    def distribution(self, logits: Tensor, prefix: list[int]) -> Tensor:
        """Return the probabilities of the token after `prefix`, in float64."""  # [vocab] -> [vocab]
        logits = self.process(logits, prefix)
        if self.greedy:
            return torch.zeros_like(logits, dtype=torch.float64).index_fill_(0, logits.argmax(), 1.0)
        return logits.double().softmax(-1)

    def sampled_logits(self, logits: Tensor, prefix: list[int]) -> Tensor:
        """Return logits whose softmax is `distribution`."""  # [vocab] -> [vocab]
        return self.distribution(logits, prefix).log() if self.greedy else self.process(logits, prefix)

    def uniform(self, *counters: int) -> float:
        return uniform(self.seed, *counters)


def _edited(processors: Sequence[Processor], logits: Tensor, prefix: list[int]) -> Tensor:  # [vocab] -> [vocab]
    owned = False  # True: the logits are a copy of our own, which may be changed
    for process in processors:
        if isinstance(process, LogitEdit):
            logits, owned = logits if owned else logits.clone(), True
            process.edit(prefix).apply(logits)
        else:
            logits, owned = process(prefix, logits), False
    return logits


# Filters on the logits of one position or many, in Transformers' order and with its rules, but tokens with equal logits
# stay or go together. They are plain records, so a model can read their settings and implement them in its own way.


@dataclass(frozen=True)
class TopK:
    """Keep the `count` likeliest tokens, and all tokens tied with the last of them."""

    count: int

    def __call__(self, x: Tensor) -> Tensor:
        return _drop(x, x < torch.topk(x, min(self.count, x.shape[-1])).values[..., -1:])


@dataclass(frozen=True)
class TopP:
    """Keep the tokens for which all likelier tokens have a probability of less than `mass`; equals share a fate."""

    mass: float

    def __call__(self, x: Tensor) -> Tensor:
        return _top_p(x, self.mass)


@dataclass(frozen=True)
class MinP:
    """Keep the tokens with at least `share` times the probability of the likeliest token."""

    share: float

    def __call__(self, x: Tensor) -> Tensor:
        probs = x.double().softmax(-1)
        return _drop(x, probs < self.share * probs.amax(-1, keepdim=True))


@dataclass(frozen=True)
class TypicalP:
    """Keep the tokens whose surprisal is closest to the entropy, until they reach `mass`."""

    mass: float

    def __call__(self, x: Tensor) -> Tensor:
        return _typical_p(x, self.mass)


Filter = TopK | TopP | MinP | TypicalP


def _filters(s: Sampling) -> tuple[Filter, ...]:
    filters: list[tuple[bool, Filter]] = [
        (s.top_k > 0, TopK(s.top_k)),
        (s.top_p < 1, TopP(s.top_p)),
        (s.min_p > 0, MinP(s.min_p)),
        (s.typical_p < 1, TypicalP(s.typical_p)),
    ]
    return tuple(keep for wanted, keep in filters if wanted)


def _drop(logits: Tensor, out: Tensor) -> Tensor:
    return logits.masked_fill(out, -torch.inf)


def _top_p(logits: Tensor, mass: float) -> Tensor:
    ordered, _ = torch.sort(logits, descending=True)
    held = ordered.double().softmax(-1).cumsum(-1)[..., :-1]
    last = (held < mass).sum(-1, keepdim=True)  # place of the least likely token that is kept
    return _drop(logits, logits < ordered.gather(-1, last))


def _typical_p(logits: Tensor, mass: float) -> Tensor:
    logp = logits.double().log_softmax(-1)
    probs = logp.exp()
    distance = (-logp - torch.special.entr(probs).sum(-1, keepdim=True)).abs()
    ordered, index = torch.sort(distance)
    held = probs.gather(-1, index).cumsum(-1)
    last = (held < mass).sum(-1, keepdim=True).clamp(max=probs.shape[-1] - 1)
    return _drop(logits, distance > ordered.gather(-1, last))
