"""Sequence: the state of one request in the engine. Step: the result of one pass for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from torch import Tensor

from outpace.core.layout import Layout
from outpace.core.stats import Stats
from outpace.core.tree import Tree
from outpace.sampling.logprobs import Logprob, logprob_of

if TYPE_CHECKING:
    from outpace.core.drafter import Drafter
    from outpace.core.lm import LM, Context, Scores
    from outpace.core.policy import Policy
    from outpace.core.verifier import Verifier
    from outpace.sampling.sampler import Sampler

FinishReason = Literal["stop", "length", "error", "cancelled"]
T = TypeVar("T")
_ids = itertools.count()


class Watcher(Protocol):
    """Receives every committed token in order; `stopped` becomes True when a stop string is complete."""

    stopped: bool

    def push(self, token: int) -> None: ...


@dataclass(frozen=True)
class Limits:
    """When a request ends."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None  # number of top tokens to report; None reports nothing
    processed: bool = False  # report the distribution that is sampled, after all settings, not the model's own


@dataclass
class Step:
    """One pass of one sequence: its drafted, accepted and committed tokens.

    A pass may commit nothing, or tokens without a cache entry: those of no kept node are fed before the next pass.
    """

    layout: Layout
    path: list[int]  # accepted nodes, root first
    tokens: list[int]  # committed by this pass, in order
    kept: list[int]  # nodes whose keys and values stay in the cache

    @property
    def tree(self) -> Tree:
        """The layout, for code that handles only trees."""
        assert isinstance(self.layout, Tree), "this method drafts a layout that is not a tree"
        return self.layout

    @property
    def drafted(self) -> int:
        return max(len(self.layout) - 1, 0)

    @property
    def accepted(self) -> int:
        """Number of committed tokens that were drafted."""
        return min(len(self.path) - 1, len(self.tokens)) if len(self.path) > 1 else 0


@dataclass(eq=False)
class Sequence:
    """One request: its tokens so far, the objects that decode it, and the state they keep for it."""

    tokens: list[int]  # the prompt, then the committed tokens; the last one is the next root
    limits: Limits
    sampler: Sampler
    drafter: Drafter
    verifier: Verifier
    policy: Policy
    watcher: Watcher | None = None
    listener: Callable[[Any], object] | None = None  # called with every event of this request, on the engine's thread
    watched: bool = False  # someone reads the scores of its passes, so the next pass must wait

    target: LM | None = None  # set when it is submitted
    vocab: int = 0  # of the target
    context: Context = None  # what the text is conditioned on besides its tokens
    prediction: list[int] = field(default_factory=list)  # a text that the caller expects, for methods to draft from
    slot: int | None = None  # in the target's cache, while it runs
    joins: bool = False  # its first pass is next, and may run a part of its prompt, too: nothing is drafted
    started: float = 0.0  # when it got a slot, by `time.perf_counter`
    cached: int = 0  # tokens of the prompt that were in the target's cache already
    finish_reason: FinishReason | None = None
    error: str | None = None
    cause: Exception | None = None  # raised by this request's own code, for its caller
    logprobs: list[Logprob] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)  # for each generated token: was it an accepted draft token
    stats: Stats = field(default_factory=Stats)
    id: int = field(default_factory=lambda: next(_ids))
    prompt_length: int = field(init=False)
    _memory: dict[int, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def hidden(self) -> Tensor | None:  # [tokens in the cache, taps]
        """The target's hidden states, if the drafter or the verifier reads some."""
        if self.target is None or self.target.states is None or self.slot is None:
            return None
        return self.target.states.read(self.slot)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def room(self) -> int:
        """Number of tokens that may still be committed."""
        return self.limits.max_tokens - (len(self.tokens) - self.prompt_length)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def state(self, owner: object, make: Callable[[], T]) -> T:
        """Return the state that `owner` (such as a drafter or policy) keeps for this sequence; created on first use."""
        if id(owner) not in self._memory:
            self._memory[id(owner)] = make()
        return self._memory[id(owner)]

    def forget(self, owner: object) -> Any:
        """Remove and return the state that `owner` keeps, or None if it has none."""
        return self._memory.pop(id(owner), None)

    def push(self, token: int, scores: Scores, node: int) -> bool:
        """Commit the token chosen at a node, given the scores of its pass; True if the request ends with it."""
        if self.limits.logprobs is not None:
            known = None if scores.picked is None else scores.picked.logprob(node)
            self.logprobs.append(known or self._logprob(token, scores.logits.peek(node), self.limits.logprobs))
        self.tokens.append(token)
        enough = len(self.tokens) - self.prompt_length >= self.limits.min_tokens
        if self.watcher is not None:
            self.watcher.push(token)
        if enough and (token in self.limits.stop_token_ids or (self.watcher is not None and self.watcher.stopped)):
            self.finish_reason = "stop"
        elif self.room <= 0:
            self.finish_reason = "length"
        return self.finished

    def _logprob(self, token: int, logits: Tensor, count: int) -> Logprob:  # [vocab]
        if self.limits.processed:
            logits = self.sampler.sampled_logits(logits, self.tokens)
        return logprob_of(token, logits, count)

    def fail(self, message: str, cause: Exception | None = None) -> None:
        self.finish_reason, self.error, self.cause = "error", message, cause
