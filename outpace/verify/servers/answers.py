"""Answers: what is asked of the servers, and the greedy answers that several checks share, each asked for once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from outpace.errors import UsageError
from outpace.sampling.settings import Sampling
from outpace.verify.servers.client import Server
from outpace.verify.servers.compare import Pair, between, drift_of
from outpace.verify.servers.reply import Reply


@dataclass(frozen=True)
class ServerPlan:
    """The questions, the same for every server."""

    prompts: list[str]
    max_tokens: int = 64
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=1.0))  # of the sampled checks
    samples: int = 400  # of the distribution, per context
    contexts: int = 2  # prompts whose distribution is tested
    alpha: float = 0.001  # chance that the distribution fails a server that is right
    concurrency: int = 8

    def __post_init__(self) -> None:
        if not self.prompts or not all(self.prompts):
            raise UsageError("there is nothing to verify: give at least one prompt, and no empty ones")
        if self.sampling.temperature == 0:
            raise UsageError("the sampled checks need a temperature above 0; greedy decoding is always checked")
        if not 0 < self.alpha < 1 or self.samples < 50 or self.contexts < 1:
            raise UsageError("alpha lies between 0 and 1, samples are at least 50 and contexts at least 1")
        if self.concurrency < 2 or self.max_tokens < 1:
            raise UsageError("concurrency is at least 2 and max_tokens at least 1")


@dataclass
class ServerAnswers:
    """Greedy answers of the server under test, and of the one without speculation, one request at a time."""

    on: Server
    off: Server | None
    plan: ServerPlan

    @property
    def subject(self) -> str:
        return self.on.base

    @property
    def greedy(self) -> dict[str, Any]:
        return {"temperature": 0, "max_tokens": self.plan.max_tokens}

    def alone(self, server: Server) -> list[Reply]:
        return [server.complete(prompt, **self.greedy) for prompt in self.plan.prompts]

    @cached_property
    def first(self) -> list[Reply]:
        return self.alone(self.on)

    @cached_property
    def again(self) -> list[Reply]:
        return self.alone(self.on)

    @cached_property
    def plain(self) -> list[Reply]:
        """Without speculation."""
        assert self.off is not None
        return self.alone(self.off)

    @cached_property
    def plain_again(self) -> list[Reply]:
        assert self.off is not None
        return self.alone(self.off)

    @property
    def repeats(self) -> list[Pair]:
        return list(zip(self.first, self.again, strict=True))

    @property
    def plain_repeats(self) -> list[Pair]:
        return [] if self.off is None else list(zip(self.plain, self.plain_again, strict=True))

    @property
    def pairs(self) -> list[Pair]:
        """Without and with speculation."""
        return [] if self.off is None else list(zip(self.plain, self.first, strict=True))

    @cached_property
    def drift(self) -> float | None:
        """How far logprobs move between runs of what should be the same."""
        return drift_of([*self.repeats, *self.plain_repeats, *self.pairs])

    def unstable(self, repeats: list[Pair]) -> set[int]:
        """Prompts to which a server gives different answers, ties aside: nothing can be held against them."""
        found = (between(pair, index, self.drift) for index, pair in enumerate(repeats))
        return {d.prompt for d in found if d is not None and not d.explained}
