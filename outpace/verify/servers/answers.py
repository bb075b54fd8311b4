"""The plan of a server's checks, and the greedy answers that several checks share, each requested once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from outpace.errors import UsageError
from outpace.sampling.settings import Sampling
from outpace.verify.servers.client import Server
from outpace.verify.servers.compare import Pair, drift_of, first_divergence
from outpace.verify.servers.reply import Reply


@dataclass(frozen=True)
class ServerPlan:
    """The prompts and settings of the checks, the same for every server."""

    prompts: list[str]
    max_tokens: int = 64
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=1.0))  # for the sampled checks
    samples: int = 400  # draws per context in the test of the distribution
    contexts: int = 2  # prompts whose distribution is tested
    alpha: float = 0.001  # probability that the test of the distribution fails a correct server
    concurrency: int = 8

    def __post_init__(self) -> None:
        if not self.prompts or not all(self.prompts):
            raise UsageError("no prompts to verify, or an empty one: give at least one prompt, none of them empty")
        if self.sampling.temperature == 0:
            raise UsageError("temperature must be above 0 for the sampled checks; greedy decoding is always checked")
        if not 0 < self.alpha < 1 or self.samples < 50 or self.contexts < 1:
            raise UsageError("alpha must be between 0 and 1, samples at least 50, and contexts at least 1")
        if self.concurrency < 2 or self.max_tokens < 1:
            raise UsageError("concurrency must be at least 2, and max_tokens at least 1")


@dataclass
class ServerAnswers:
    """Greedy answers, one request at a time, of the server under test and of the one without speculation."""

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
        """The answers without speculation."""
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
        """Pairs of answers without and with speculation."""
        return [] if self.off is None else list(zip(self.plain, self.first, strict=True))

    @cached_property
    def drift(self) -> float | None:
        """The largest difference of logprobs between runs that should agree."""
        return drift_of([*self.repeats, *self.plain_repeats, *self.pairs])

    def unstable(self, repeats: list[Pair]) -> set[int]:
        """Prompts on which a server is not repeatable beyond ties; later checks leave them out."""
        found = (first_divergence(pair, index, self.drift) for index, pair in enumerate(repeats))
        return {d.prompt for d in found if d is not None and not d.explained}
