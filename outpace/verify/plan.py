"""Plan: what is verified, of which model, with which prompts and settings."""

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

CALLERS = 4  # at least
Way = Callable[[Model, Seq[Request]], list[Completion]]


@dataclass(frozen=True)
class Subject:
    """A method as it is asked for: its name, and the settings that make it."""

    name: str
    settings: dict[str, Any]  # method, draft, policy, verifier and options, as `generate` takes them


@dataclass(frozen=True)
class VerifyPlan:
    """The questions, the same for every method."""

    model: Model
    prompts: list[list[int]]
    max_tokens: int = 64
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=1.0))  # of the sampled checks
    batches: tuple[int, ...] = (4,)
    samples: int = 400  # of the distribution, per context
    contexts: int = 2  # prompts whose distribution is tested
    alpha: float = 0.001  # chance that any check of the distribution fails a method that is right
    answers: dict[int, str] = field(default_factory=dict)  # prompt -> what a right answer says; for the task score
    judge: Judge = field(init=False)

    def __post_init__(self) -> None:
        if not self.prompts:
            raise UsageError("there is nothing to verify: give at least one prompt")
        if self.sampling.temperature == 0:
            raise UsageError("the sampled checks need a temperature above 0; greedy decoding is always checked")
        if not 0 < self.alpha < 1 or self.samples < 50 or any(batch < 2 for batch in self.batches):
            raise UsageError("alpha lies between 0 and 1, samples are at least 50 and a batch has at least 2 rows")
        object.__setattr__(self, "judge", Judge(self.model.lm.reference()))

    def request(self, subject: Subject, prompt: list[int], **settings: Any) -> Request:
        given = {"max_tokens": self.max_tokens, **subject.settings, **settings}
        return Request.from_keywords(prompt, given)

    def run(self, subject: Subject, sampling: Sampling, indices: list[int], batch: int = 1) -> list[Completion]:
        """Answers to these prompts in batches of this size, each computed from its first token on."""
        out: list[Completion] = []
        for start in range(0, len(indices), batch):
            self.model.clear_cache()
            group = [self.request(subject, self.prompts[i], **_given(sampling)) for i in indices[start : start + batch]]
            out += self.model.generate(group)
        return out

    def together(self, subject: Subject, sampling: Sampling, way: Way) -> list[list[Completion]]:
        """Answers to all prompts, each asked for by a caller of its own, all at once; few prompts are asked again."""
        count = len(self.prompts)
        prompts = self.prompts * -(-CALLERS // count)
        self.model.clear_cache()
        found = way(self.model, [self.request(subject, prompt, **_given(sampling)) for prompt in prompts])
        return [found[start : start + count] for start in range(0, len(found), count)]

    def answer(self, completion: Completion, index: int, sampling: Sampling) -> Answer:
        """The completion with the sampler that its settings make."""
        request = Request.from_keywords(
            self.prompts[index], {"method": "plain", "max_tokens": self.max_tokens, **_given(sampling)}
        )
        return Answer(self.prompts[index], completion.tokens, self.model.sequence(request).sampler)


def _given(sampling: Sampling) -> dict[str, Any]:
    return vars(sampling)
