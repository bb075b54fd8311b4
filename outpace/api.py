"""Model: what `load` and `wrap` give: generate, and stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import OutOfMemoryError, Tensor

from outpace import costs, registry
from outpace.bridge.translated import Side, translated
from outpace.costs import Costs
from outpace.drafter import Drafter
from outpace.engine import Engine, Event
from outpace.errors import CacheFull, RequestFailed, UsageError, unknown
from outpace.goodput import Goodput
from outpace.grammar import GrammarCompiler
from outpace.models.base import LM
from outpace.policy import Policy
from outpace.processors import Rules, build
from outpace.sample import Sampler, Sampling
from outpace.sequence import FinishReason, Limits, Logprob, Sequence, Step
from outpace.stats import Stats
from outpace.text import Prompt, TextStream, Tokenizer, encode, is_chat, is_ids
from outpace.trace import TraceWriter
from outpace.verify import Verifier


@dataclass(frozen=True)
class Request:
    """One prompt and everything that can be set for it; `generate` and `stream` take the same names as keywords."""

    prompt: Prompt
    method: str | Drafter = "auto"  # also "name:option=value,..."
    draft: Model | LM | None = None
    policy: str | Policy | None = None  # None: "auto" for the method "auto", else "fixed"
    verifier: str | Verifier | None = None  # None: what the method asks for, "match" for nearly all
    max_tokens: int = 256
    min_tokens: int = 0
    stop: str | Seq[str] = ()
    stop_tokens: Seq[int] = ()
    ignore_eos: bool = False
    banned: Seq[str | Seq[int]] = ()  # words, or token sequences, that must not appear
    logprobs: int | None = None
    processed_logprobs: bool = False  # of the law that was sampled, after all settings, not of the model's own
    n: int = 1
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    lark: str | None = None  # a grammar in llguidance's Lark syntax
    processors: Seq[Callable[[Tensor, Tensor], Tensor]] = ()  # Transformers' LogitsProcessor objects, as they are
    sampling: Sampling = field(default_factory=Sampling)
    options: dict[str, Any] = field(default_factory=dict)  # of the method

    @classmethod
    def of(cls, prompt: Prompt | Request, given: dict[str, Any]) -> Request:
        """A request from keywords: sampling settings and the method's options are sorted out of them."""
        if isinstance(prompt, Request):
            if given:
                raise UsageError(f"a Request carries its own settings; put {', '.join(given)} into it")
            return prompt
        own = {f.name for f in dataclasses.fields(cls)} - {"prompt", "sampling", "options"}
        sampled = {f.name for f in dataclasses.fields(Sampling)}
        name = given.get("method", "auto")
        if isinstance(name, str):
            name, spelled = registry.parse(name)
            given = {**spelled, **given, "method": name}
        optional = set(registry.options(registry.find(name))) if isinstance(name, str) else set()
        for key in given:
            if key not in own | sampled | optional:
                raise unknown("option", key, own | sampled | optional)
        return cls(
            prompt,
            sampling=Sampling(**{k: v for k, v in given.items() if k in sampled}),
            options={k: v for k, v in given.items() if k in optional - own},
            **{k: v for k, v in given.items() if k in own},
        )


@dataclass(frozen=True)
class Completion:
    """What a request gave."""

    text: str
    tokens: list[int]
    finish_reason: FinishReason | None  # None while it runs
    stats: Stats
    prompt_tokens: int
    method: str
    lossless: bool
    logprobs: list[Logprob] | None = None
    error: str | None = None

    @classmethod
    def of(cls, seq: Sequence) -> Completion:
        return cls(
            text=seq.watcher.text if isinstance(seq.watcher, TextStream) else "",
            tokens=seq.generated,
            finish_reason=seq.finish_reason,
            stats=seq.stats,
            prompt_tokens=seq.prompt_length,
            method=seq.drafter.name or type(seq.drafter).__name__,
            lossless=seq.drafter.lossless and seq.verifier.lossless,
            logprobs=seq.logprobs if seq.limits.logprobs is not None else None,
            error=seq.error,
        )


@dataclass(frozen=True)
class Piece:
    """What one pass added to a stream."""

    text: str
    drafted: list[tuple[str, bool]]  # the same text in runs: True where it came from accepted guesses
    tokens: list[int]
    step: Step | None
    index: int = 0  # which prompt
    completion: Completion | None = None  # with the last piece


class Stream(Iterator[Piece]):
    """Pieces of one or more requests as they come; `completions` is what there is of each at any time."""

    def __init__(self, model: Model, requests: list[Request], trace: TraceWriter | None = None):
        # Every request is checked before the first one runs.
        self._seqs = [model.sequence(request, i) for request in requests for i in range(request.n)]
        self._engine = Engine(model.lm, model.max_rows, overlap=trace is None)
        for seq in self._seqs:
            self._engine.submit(seq)
        self._trace = trace
        if trace is not None:
            trace.begin(self._seqs)
        self._index = {seq.id: i for i, seq in enumerate(self._seqs)}
        self._events = self._engine.run()

    def __next__(self) -> Piece:
        event = next(self._events)
        seq, tokens = event.seq, [] if event.step is None else event.step.tokens
        runs: list[tuple[str, bool]] = []
        if isinstance(seq.watcher, TextStream):
            if seq.finished:
                seq.watcher.finish()
            runs = [(span.text, seq.drafted[span.token]) for span in seq.watcher.take()]
        if self._trace is not None:
            self._trace.event(event)
        index, text = self._index[seq.id], "".join(text for text, _ in runs)
        return Piece(text, runs, tokens, event.step, index, Completion.of(seq) if seq.finished else None)

    def close(self) -> None:
        """Cancel what still runs; its rows are free again."""
        for seq in self._seqs:
            if not seq.finished:
                self._engine.cancel(seq)
                if self._trace is not None:
                    self._trace.event(Event(seq))
        self._events.close()

    @property
    def completions(self) -> list[Completion]:
        return [Completion.of(seq) for seq in self._seqs]


class Model:
    """A target model with its tokenizer, ready to generate by any method."""

    def __init__(self, lm: LM, tokenizer: Tokenizer | None = None, stop_tokens: Iterable[int] = (), name: str = ""):
        self.lm = lm
        self.tokenizer = tokenizer
        self.stop_tokens = frozenset(stop_tokens)
        self.name = name
        self.max_rows = 16  # requests that run at a time; further ones wait
        self._methods: dict[Any, Drafter] = {}  # so that what a method learned serves the next call
        self._drafts: dict[tuple[int, int], tuple[Side, LM]] = {}
        self._costs: Costs | None = None
        self._compilers: dict[frozenset[int], GrammarCompiler] = {}

    def generate(self, prompt: Any, *, trace: str | Path | TraceWriter | None = None, **settings: Any) -> Any:
        """Complete one prompt, or a list of them as one batch; `n` samples of one prompt come as a list.

        Settings are the fields of `Request` and of `Sampling`, and the options of the method. `trace` is a file, or a
        writer that several calls share.
        """
        requests, many = self._requests(prompt, settings)
        if isinstance(trace, str | Path):
            with TraceWriter(trace, self.tokenizer, self.name) as writer:
                return self.generate(prompt, trace=writer, **settings)
        stream = Stream(self, requests, trace)
        for _ in stream:
            pass
        results = stream.completions
        if many or len(results) > 1:
            return results
        if results[0].error is not None:
            raise RequestFailed(results[0].error)
        return results[0]

    def stream(self, prompt: Any, *, trace: TraceWriter | None = None, **settings: Any) -> Stream:
        """The same, as it comes: one piece per pass of each prompt. Closing the stream cancels the rest."""
        return Stream(self, self._requests(prompt, settings)[0], trace)

    def _requests(self, prompt: Any, settings: dict[str, Any]) -> tuple[list[Request], bool]:
        prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # ids as a tensor or an array
        single = isinstance(prompt, str | Request) or is_chat(prompt) or (is_ids(prompt) and len(prompt) > 0)
        if not single and (not isinstance(prompt, Seq) or not prompt):
            raise UsageError("the prompt is empty" if isinstance(prompt, Seq) else f"not a prompt: {prompt!r}")
        return [Request.of(p, settings) for p in ([prompt] if single else prompt)], not single

    def sequence(self, request: Request, stream: int = 0) -> Sequence:
        """The request as the engine takes it; `stream` tells the samples of one prompt apart."""
        if request.max_tokens < 1 or request.min_tokens < 0 or request.n < 1:
            raise UsageError("max_tokens and n must be at least 1, and min_tokens at least 0")
        tokens = encode(request.prompt, self.tokenizer, self.lm.vocab)
        room = self.lm.context - len(tokens)
        if room < 1:
            raise UsageError(f"the prompt has {len(tokens)} tokens and the model holds {self.lm.context}")
        stops = frozenset(request.stop_tokens) | (frozenset() if request.ignore_eos else self.stop_tokens)
        rules = Rules(
            request.min_tokens, tuple(sorted(stops)), self._banned(request), tuple(request.processors),
            self._grammar(request, len(tokens), stops),
        )  # fmt: skip
        drafter = self.method(request)
        return Sequence(
            tokens=tokens,
            limits=Limits(
                min(request.max_tokens, room), request.min_tokens, stops, request.logprobs, request.processed_logprobs
            ),
            sampler=Sampler(request.sampling, build(request.sampling, rules, len(tokens), self.lm.vocab), stream),
            drafter=drafter,
            verifier=self._named(request.verifier or drafter.verifier, registry.verifier),
            policy=self.policy(request),
            watcher=self._watcher(request),
        )

    def method(self, request: Request) -> Drafter:
        """The drafter of a request; the same name and options give the same object, with all it has learned."""
        if isinstance(request.method, Drafter):
            return request.method
        name, options = request.method, dict(request.options)
        if request.draft is not None:
            options["draft"] = self.draft_of(request.draft)
        key = (name, tuple(sorted((k, id(v) if k == "draft" else v) for k, v in options.items())))
        if key not in self._methods:
            self._methods[key] = registry.method(name, **options)
        return self._methods[key]

    def policy(self, request: Request) -> Policy:
        """The policy of a request: its own, or the one that its method asks for; one that needs costs gets ours."""
        given = self.method(request).policy if request.policy is None else request.policy
        policy: Policy = self._named(given, registry.policy)
        if isinstance(policy, Goodput) and policy.costs is None:
            policy.costs = self.costs
        return policy

    @property
    def costs(self) -> Costs | None:
        """What a pass takes here, measured on first use; None while there is no room to measure it."""
        if self._costs is None:
            try:
                self._costs = costs.of(self.lm, self.name)
            except (CacheFull, OutOfMemoryError):
                return None
        return self._costs

    def draft_of(self, draft: Model | LM) -> LM:
        """The draft as our tokens see it; a bare LM is taken to have the same ones."""
        if isinstance(draft, str | Path):
            raise UsageError(f"a draft is a model that was loaded: draft=outpace.load({str(draft)!r})")
        if not isinstance(draft, Model):
            return draft
        key = id(draft.lm), id(draft.tokenizer)
        if key not in self._drafts:
            theirs = Side(draft.lm, draft.tokenizer, draft.name)
            self._drafts[key] = theirs, translated(Side(self.lm, self.tokenizer, self.name), theirs)
        return self._drafts[key][1]

    def _named(self, given: Any, make: Callable[..., Any]) -> Any:
        """An object, or one made from "name" or "name:option=value,option=value"."""
        if not isinstance(given, str):
            return given
        key = (make.__name__, given)
        if key not in self._methods:
            name, options = registry.parse(given)
            self._methods[key] = make(name, **options)
        return self._methods[key]

    def _watcher(self, request: Request) -> TextStream | None:
        stops = [request.stop] if isinstance(request.stop, str) else list(request.stop)
        if self.tokenizer is None:
            if stops:
                raise UsageError("stop strings need a tokenizer")
            return None
        return TextStream(self.tokenizer, stops, request.min_tokens)

    def _banned(self, request: Request) -> tuple[tuple[int, ...], ...]:
        out = []
        for word in request.banned:
            if isinstance(word, str):
                if self.tokenizer is None:
                    raise UsageError("banned words need a tokenizer; pass token sequences")
                # A word is spelled differently at the start of a text and after a space.
                forms = {tuple(self.tokenizer.encode(w, add_special_tokens=False)) for w in (word, " " + word)}
                out += [form for form in forms if form]
            else:
                out.append(tuple(word))
        return tuple(out)

    def _grammar(self, request: Request, start: int, stops: frozenset[int]) -> Any:
        sources: dict[str, Any] = {"json_schema": request.json_schema, "regex": request.regex, "lark": request.lark}
        given = {name: source for name, source in sources.items() if source is not None}
        if not given:
            return None
        if len(given) > 1:
            raise UsageError(f"one constraint at a time, not {' and '.join(given)}")
        if self.tokenizer is None:
            raise UsageError("a grammar needs a tokenizer")
        if stops not in self._compilers:
            self._compilers[stops] = GrammarCompiler(self.tokenizer, self.lm.vocab, stops)
        return self._compilers[stops].compile(**given, start=start)
