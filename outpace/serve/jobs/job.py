"""Job: one request of any API for the engine; and the records in which its answers come back."""

from __future__ import annotations

from dataclasses import dataclass, field

from outpace.api.request import Request
from outpace.api.stream import Completion
from outpace.core.stats import Stats
from outpace.sampling.logprobs import Logprob
from outpace.serve.chat.conversation import Conversation
from outpace.serve.chat.output import TextReading
from outpace.serve.chat.parts import Output, OutputPart
from outpace.tracing.trace import Line

PREDICTED = "prediction"  # the method that drafts from a predicted text, as draft tokens name it


@dataclass(frozen=True)
class TraceWish:
    """That the stream of a job tells what each pass did."""

    probs: bool  # with the target's probabilities
    most_nodes: int  # of the trees of all passes; later passes are left out


@dataclass(frozen=True)
class Job:
    """Prompts and settings for the engine, and how to read the text of the answers."""

    requests: list[Request]  # the prompts are tokens
    reading: TextReading = field(default_factory=TextReading)
    stream: bool = False
    prompts: list[str] = field(default_factory=list)  # as text, for logs that show it
    conversation: Conversation | None = None  # that it answers
    trace: TraceWish | None = None

    @property
    def samples(self) -> int:
        return sum(request.n for request in self.requests)


@dataclass(frozen=True)
class Delta:
    """What passes have added to one answer."""

    index: int  # of the answer
    parts: list[OutputPart]
    tokens: list[int]
    logprobs: list[Logprob] | None
    finish_reason: str | None = None  # with the last one: "stop", "length" or "tool_calls"
    stop: str | None = None  # the stop string that ended it
    trace: list[Line] = field(default_factory=list)  # of these passes, if the job asks for it


@dataclass
class ServedAnswer:
    """A whole answer, or what has come of it."""

    output: Output = field(default_factory=Output)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] | None = None
    finish_reason: str | None = None
    stop: str | None = None

    def add(self, delta: Delta) -> None:
        self.output.parts += delta.parts
        self.tokens += delta.tokens
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs
        self.finish_reason, self.stop = delta.finish_reason, delta.stop


@dataclass(frozen=True)
class TokenUsage:
    """The tokens of a job, as bills count them."""

    prompt: int = 0
    cached: int = 0  # of the prompt, which the cache held already
    completion: int = 0
    reasoning: int = 0  # of the completion
    predicted: int = 0  # accepted draft tokens of a predicted text
    mispredicted: int = 0  # rejected ones

    @classmethod
    def of_completion(cls, done: Completion, reasoning: int) -> TokenUsage:
        drafted, accepted = done.sources.get(PREDICTED, (0, 0))
        return cls(done.prompt_tokens, done.cached_tokens, len(done.tokens), reasoning, accepted, drafted - accepted)

    def plus(self, other: TokenUsage, same_prompt: bool) -> TokenUsage:
        """Return the sum; samples of one prompt have it in common."""
        return TokenUsage(
            self.prompt + (0 if same_prompt else other.prompt),
            self.cached + (0 if same_prompt else other.cached),
            self.completion + other.completion,
            self.reasoning + other.reasoning,
            self.predicted + other.predicted,
            self.mispredicted + other.mispredicted,
        )


@dataclass(frozen=True)
class JobTimes:
    """When a job arrived, got a slot, gave its first token and ended, in seconds of one clock."""

    arrived: float
    started: float
    first: float
    ended: float


@dataclass(frozen=True)
class JobOutcome:
    """All answers of a job that has ended."""

    job: Job
    answers: list[ServedAnswer]
    usage: TokenUsage
    times: JobTimes
    completions: list[Completion]
    prompts: list[list[int]]  # of each answer, as tokens

    @property
    def stats(self) -> Stats:
        """The statistics of all samples together."""
        total = Stats()
        for each in self.completions:
            total = total.merge(each.stats)
        return total
