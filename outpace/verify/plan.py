"""The plan of a verification: the model, the prompts and the settings that all checks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from outpace.api.model import Model
from outpace.api.request import Request
from outpace.api.stream import Completion
from outpace.errors import UsageError
from outpace.sampling.settings import Sampling
from outpace.verify.judge import Answer, Judge

CALLERS = 4  # least number of concurrent callers
Way = Callable[[Model, Seq[Request]], list[Completion]]


@dataclass(frozen=True)
class Subject:
    """A method under test: its name, and the settings that select it."""

    name: str
    settings: dict[str, Any]  # method, draft, policy, verifier and options, as `generate` takes them


@dataclass(frozen=True)
class VerifyPlan:
    """The prompts and settings of the checks, the same for every method."""

    model: Model
    prompts: list[list[int]]
    max_tokens: int = 64
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=1.0))  # for the sampled checks
    batches: tuple[int, ...] = (4,)
    samples: int = 400  # draws per context in the test of the distribution
    contexts: int = 2  # prompts whose distribution is tested
    alpha: float = 0.001  # probability that the test of the distribution fails a correct method
    answers: dict[int, str] = field(default_factory=dict)  # prompt -> the correct answer; for the task score
    judge: Judge = field(init=False)

    def __post_init__(self) -> None:
        if not self.prompts:
            raise UsageError("no prompts to verify: give at least one")
        if self.sampling.temperature == 0:
            raise UsageError("temperature must be above 0 for the sampled checks; greedy decoding is always checked")
        if not 0 < self.alpha < 1 or self.samples < 50 or any(batch < 2 for batch in self.batches):
            raise UsageError("alpha must be between 0 and 1, samples at least 50, and each batch size at least 2")
        object.__setattr__(self, "judge", Judge(self.model.lm.reference()))

    def request(self, subject: Subject, prompt: list[int], **settings: Any) -> Request:
        given = {"max_tokens": self.max_tokens, **subject.settings, **settings}
        return Request.from_keywords(prompt, given)

    def run(self, subject: Subject, sampling: Sampling, indices: list[int], batch: int = 1) -> list[Completion]:
        """Answer these prompts in batches of this size, each with an empty prefix cache."""
        out: list[Completion] = []
        for start in range(0, len(indices), batch):
            self.model.clear_cache()
            group = [self.request(subject, self.prompts[i], **_given(sampling)) for i in indices[start : start + batch]]
            out += self.model.generate(group)
        return out

    def together(self, subject: Subject, sampling: Sampling, way: Way) -> list[list[Completion]]:
        """Answer all prompts concurrently, one caller per prompt; prompts repeat until there are enough callers."""
        count = len(self.prompts)
        prompts = self.prompts * -(-CALLERS // count)
        self.model.clear_cache()
        found = way(self.model, [self.request(subject, prompt, **_given(sampling)) for prompt in prompts])
        return [found[start : start + count] for start in range(0, len(found), count)]

    def answer(self, completion: Completion, index: int, sampling: Sampling) -> Answer:
        """Pair a completion with the sampler that its settings define."""
        request = Request.from_keywords(
            self.prompts[index], {"method": "plain", "max_tokens": self.max_tokens, **_given(sampling)}
        )
        return Answer(self.prompts[index], completion.tokens, self.model.sequence(request).sampler)


def _given(sampling: Sampling) -> dict[str, Any]:
    return vars(sampling)
