"""Sampler: the distribution from which the target chooses, and the choice itself, by keyed noise.

A processor is a pure function of the prefix and the logits, so it can run at any node of a tree. The choice at a node
is `argmax(logits)`, or `argmax(logits + gumbel(seed, position, token))`, which is a sample of softmax(logits).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outpace.errors import RequestFailed
from outpace.sampling import native
from outpace.sampling.noise import uniform
from outpace.sampling.noise_rule import GUMBEL, RULES, GumbelRule, NoiseRule
from outpace.sampling.settings import Sampling


class Processor(Protocol):
    """Logits of the token that follows `prefix`, changed."""

    def __call__(self, prefix: list[int], logits: Tensor) -> Tensor: ...  # [vocab] -> [vocab]


@dataclass(frozen=True)
class Pick:
    """A choice that needs no prefix: a model can make it at every node of a tree at once, where its logits are."""

    seed: int
    temperature: float  # 0 is greedy
    filters: tuple[Filter, ...] = ()
    rule: str = GUMBEL  # how noise becomes a draw; a model that does not know the rule leaves the choice to the host


class Sampler:
    """One request's choices: processors, then temperature and the filters, then noise."""

    def __init__(self, sampling: Sampling, processors: Sequence[Processor] = (), stream: int = 0, rule: str = GUMBEL):
        self.sampling = sampling
        self.rule = rule
        self.processors = tuple(processors)
        self.seed = sampling.seed if stream == 0 else sampling.seed ^ (stream * 0x9E3779B97F4A7C15)
        self.filters = _filters(sampling)
        self._rule: NoiseRule = RULES[rule]()
        self._gumbel = self._rule if isinstance(self._rule, GumbelRule) else GumbelRule()

    @property
    def greedy(self) -> bool:
        return self.sampling.temperature == 0

    @property
    def plain(self) -> bool:
        """True when the choice is the largest raw logit, so that all nodes can be chosen at once."""
        return self.greedy and not self.processors

    @property
    def pick(self) -> Pick | None:
        """The choice, if it is the same whatever the prefix was."""
        if self.processors:
            return None
        return Pick(self.seed, self.sampling.temperature, () if self.greedy else self.filters, self.rule)

    def process(self, logits: Tensor, prefix: list[int]) -> Tensor:
        """Logits of the distribution of the token that follows `prefix`; -inf where it cannot be."""
        # [vocab] -> [vocab]
        return self._filtered(self._processed(logits, prefix))

    def _processed(self, logits: Tensor, prefix: list[int]) -> Tensor:  # [vocab] -> [vocab]
        """Logits after the processors, before the temperature and the filters."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if not torch.isfinite(logits.max()):
            raise RequestFailed(f"the model gave non-finite logits at position {len(prefix)}")
        for process in self.processors:
            logits = process(prefix, logits)
        best = logits.max()
        if best == -torch.inf:
            raise RequestFailed(f"no token is allowed at position {len(prefix)}: the constraints exclude all of them")
        if not torch.isfinite(best):
            raise RequestFailed(f"a processor gave non-finite logits at position {len(prefix)}")
        return logits

    def process_batch(self, logits: Tensor, prefixes: Sequence[list[int]]) -> Tensor:
        """The same of several prefixes; at once, unless a processor has to see each."""  # [n, vocab] -> [n, vocab]
        if self.processors:
            return torch.stack([self.process(row, prefix) for row, prefix in zip(logits, prefixes, strict=True)])
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if not torch.isfinite(logits.amax(-1)).all():
            raise RequestFailed(f"the model gave non-finite logits at position {len(prefixes[0])}")
        return self._filtered(logits)

    def _filtered(self, logits: Tensor) -> Tensor:  # [..., vocab] -> [..., vocab]
        if self.greedy:
            return logits
        logits = logits / self.sampling.temperature
        for keep in self.filters:
            logits = keep(logits)
        return logits

    def choose(self, logits: Tensor, prefix: list[int]) -> int:
        """The token that follows `prefix`."""
        if self.processors:
            logits = self._processed(logits, prefix)
        found = self._chosen(logits, len(prefix))
        if found is not None:
            return found
        processed = self._filtered(logits) if self.processors else self.process(logits, prefix)
        return int(self.noised(processed, len(prefix)).argmax())

    def _chosen(self, logits: Tensor, position: int) -> int | None:
        """The same choice by compiled code, where that is certain of it."""
        if self.greedy or self.rule != GUMBEL:
            return None
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return native.choose(logits, self.sampling, self.seed, position)

    def noised(self, processed: Tensor, position: int, salt: int = 0) -> Tensor:
        """Scores whose largest is the draw at a position, in the order in which drafts rank them; greedy adds no noise.

        A draft that may not know the target's noise gives a `salt`. It always draws with Gumbel noise, because only
        that orders several draws without replacement.
        """  # [..., vocab] -> [..., vocab]
        if self.greedy:
            return processed
        return (self._rule if not salt else self._gumbel).scores(processed, self.seed, position, salt)

    def distribution(self, logits: Tensor, prefix: list[int]) -> Tensor:
        """Probabilities of the token that follows `prefix`, in float64."""  # [vocab] -> [vocab]
        logits = self.process(logits, prefix)
        if self.greedy:
            return torch.zeros_like(logits, dtype=torch.float64).index_fill_(0, logits.argmax(), 1.0)
        return logits.double().softmax(-1)

    def log_distribution(self, logits: Tensor, prefix: list[int]) -> Tensor:
        """The logarithms of `distribution`, precise for unlikely tokens too."""  # [vocab] -> [vocab]
        if self.greedy:
            return self.distribution(logits, prefix).log()
        return self.process(logits, prefix).double().log_softmax(-1)

    def uniform(self, *counters: int) -> float:
        return uniform(self.seed, *counters)


# Filters, in Transformers' order and with its rules, on the logits of one position or of many. They are records: a
# model can read what they ask for, and choose in its own way.


@dataclass(frozen=True)
class TopK:
    """Keep the likeliest tokens, and those that are as likely as the last of them."""

    count: int

    def __call__(self, x: Tensor) -> Tensor:
        return _drop(x, x < torch.topk(x, min(self.count, x.shape[-1])).values[..., -1:])


@dataclass(frozen=True)
class TopP:
    """Keep the smallest set of likely tokens that holds `mass`."""

    mass: float

    def __call__(self, x: Tensor) -> Tensor:
        return _top_p(x, self.mass)


@dataclass(frozen=True)
class MinP:
    """Keep the tokens that are at least this share as likely as the likeliest."""

    share: float

    def __call__(self, x: Tensor) -> Tensor:
        probs = x.double().softmax(-1)
        return _drop(x, probs < self.share * probs.amax(-1, keepdim=True))


@dataclass(frozen=True)
class TypicalP:
    """Keep the tokens whose surprise is nearest to the entropy, up to `mass`."""

    mass: float

    def __call__(self, x: Tensor) -> Tensor:
        return _typical_p(x, self.mass)


Filter = TopK | TopP | MinP | TypicalP


def _filters(s: Sampling) -> tuple[Filter, ...]:
    asked: list[tuple[bool, Filter]] = [
        (s.top_k > 0, TopK(s.top_k)),
        (s.top_p < 1, TopP(s.top_p)),
        (s.min_p > 0, MinP(s.min_p)),
        (s.typical_p < 1, TypicalP(s.typical_p)),
    ]
    return tuple(keep for wanted, keep in asked if wanted)


def _drop(logits: Tensor, out: Tensor) -> Tensor:
    return logits.masked_fill(out, -torch.inf)


def _top_p(logits: Tensor, mass: float) -> Tensor:
    ordered, index = torch.sort(logits)
    out = ordered.double().softmax(-1).cumsum(-1) <= 1 - mass
    out[..., -1] = False
    return _drop(logits, torch.zeros_like(out).scatter(-1, index, out))


def _typical_p(logits: Tensor, mass: float) -> Tensor:
    logp = logits.double().log_softmax(-1)
    probs = logp.exp()
    distance = (-logp - torch.special.entr(probs).sum(-1, keepdim=True)).abs()
    ordered, index = torch.sort(distance)
    held = probs.gather(-1, index).cumsum(-1)
    last = (held < mass).sum(-1, keepdim=True).clamp(max=probs.shape[-1] - 1)
    return _drop(logits, distance > ordered.gather(-1, last))
