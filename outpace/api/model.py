"""Model: a target model that generates and streams, as `load` and `wrap` return it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence as Seq
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch import OutOfMemoryError

from outpace import registry
from outpace.api.kept import Kept
from outpace.api.request import Request
from outpace.api.stream import Chunk, Stream
from outpace.core.drafter import Drafter
from outpace.core.engine import Engine, Event
from outpace.core.lm import LM
from outpace.core.policy import Policy
from outpace.core.sequence import Limits, Sequence
from outpace.cross_tokenizer.by_tokens import NamedModel, translated
from outpace.errors import CacheFull, RequestFailed, UsageError
from outpace.models.memory import MemoryNeed
from outpace.policies.controller import costs
from outpace.policies.controller.controller import Controller
from outpace.policies.controller.costs import Costs
from outpace.sampling.grammar import GrammarCompiler
from outpace.sampling.processors import Constraints, build
from outpace.sampling.sampler import Sampler
from outpace.text import TextStream, Tokenizer, encode, is_chat, is_ids
from outpace.threads.worker import Worker
from outpace.tracing.trace import TraceWriter

MOST_METHODS = 64  # a store of `suffix` may take 100 MB
MOST_COMPILERS = 8  # each holds an index of the vocabulary


class Model:
    """A target model with its tokenizer, ready to generate by any method."""

    def __init__(self, lm: LM, tokenizer: Tokenizer | None = None, stop_token_ids: Iterable[int] = (), name: str = ""):
        self.lm = lm
        self.tokenizer = tokenizer
        self.stop_token_ids = frozenset(stop_token_ids)
        self.name = name
        self.engine = Engine(lm)
        self.checks: list[Callable[[], None]] = []  # each raises an error if the model cannot run as it is by now
        self._methods = Kept(MOST_METHODS)
        self._drafts: dict[tuple[int, int], tuple[NamedModel, LM]] = {}
        self._costs: Costs | None = None
        self._compilers = Kept(MOST_COMPILERS)

    @property
    def max_batch(self) -> int:
        """The maximum number of requests that run at a time; further ones wait."""
        return self.engine.scheduler.max_batch

    @max_batch.setter
    def max_batch(self, count: int) -> None:
        self.engine.scheduler.max_batch = count

    def generate(self, prompt: Any, *, trace: str | Path | TraceWriter | None = None, **settings: Any) -> Any:
        """Complete one prompt, or a list of prompts as one batch; `n` samples of one prompt are returned as a list.

        The settings are the fields of `Request` and of `Sampling`, and the options of the method. `trace` is a file
        path, or a writer that several calls share. Calls from several threads share passes, and each returns the text
        that it would return alone.
        """
        requests, many = self._requests(prompt, settings)
        opened = TraceWriter(trace, self.tokenizer, self.name) if isinstance(trace, str | Path) else nullcontext(trace)
        with opened as writer, self._stream(requests, writer, whole=True) as stream:
            for _ in stream:
                pass
        return _results(stream, many)

    def stream(self, prompt: Any, *, trace: TraceWriter | None = None, **settings: Any) -> Stream:
        """Like `generate`, but return a stream: one chunk per pass of each prompt. Closing the stream cancels the rest.

        The text is generated whether or not it is read. Read it with `for` in a thread, or with `async for` in an event
        loop.
        """
        return self._stream(self._requests(prompt, settings)[0], trace)

    async def agenerate(self, prompt: Any, **settings: Any) -> Any:
        """Run `generate` in an event loop; cancelling the task cancels its requests."""
        requests, many = self._requests(prompt, settings)
        stream = await asyncio.to_thread(self._stream, requests, None, True)  # preparing a method may take a while
        try:
            async for _ in stream:
                pass
        finally:
            stream.cancel()
        return _results(stream, many)

    async def astream(self, prompt: Any, **settings: Any) -> AsyncIterator[Chunk]:
        """Run `stream` in an event loop; leaving the loop over it cancels the rest."""
        stream = await asyncio.to_thread(self.stream, prompt, **settings)
        try:
            async for piece in stream:
                yield piece
        finally:
            stream.cancel()

    def warm_up(self) -> None:
        """Prepare passes of up to `max_batch` requests now, so that no answer waits for it; worth it for a server."""
        self.worker.call(partial(self.lm.prepare, self.max_batch))

    def memory(self, tokens: int, requests: int = 1) -> MemoryNeed | None:
        """Return the memory of the weights, and of requests of `tokens` tokens, prompt included; print it, or read it.

        It says what would fit: `fits`, `most_tokens` of each request, `most_requests`. None: unknown for this model.
        """
        weights = self.lm.weights
        return None if weights is None else self.worker.call(partial(weights.memory, tokens, requests))

    def clear_cache(self) -> None:
        """Drop the cached texts of finished requests: the next request is computed from its first token on."""
        self.worker.call(self.lm.clear)

    def weights_changed(self) -> None:
        """Declare that the weights have changed in place: drop everything that was computed with the old ones."""
        weights = self.lm.weights
        self.worker.call(self.lm.clear if weights is None else weights.changed)

    @property
    def worker(self) -> Worker:
        """The thread that runs this model's passes for all callers."""
        return self.lm.worker

    def _stream(self, requests: list[Request], trace: TraceWriter | None, whole: bool = False) -> Stream:
        # Every request is checked before the first one runs.
        seqs = [self.sequence(request, i) for request in requests for i in range(request.n)]
        return Stream(self, seqs, trace, whole)

    def submit(self, seqs: Seq[Sequence], trace: TraceWriter | None = None) -> None:
        """Queue requests, or refuse them all; events go to each request's listener. Call it from any thread."""
        for check in self.checks:
            check()
        for seq in seqs:
            for lm in seq.drafter.models():
                self.worker.join(lm.worker)
            for part in (seq.drafter, seq.policy, seq.verifier):  # they learn on a single thread
                self.worker.join(vars(part).setdefault("_worker", self.worker))
        try:
            self.worker.call(partial(self._submit, seqs, trace))
        except BaseException:  # the caller may have been interrupted while it waited
            self.cancel(seqs)
            raise

    def cancel(self, seqs: Seq[Sequence]) -> None:
        """End requests soon, without waiting. Call it from any thread."""
        if not all(seq.finished for seq in seqs):
            self.worker.post(partial(self._cancel, seqs))

    def _submit(self, seqs: Seq[Sequence], trace: TraceWriter | None) -> None:
        submitted: list[Sequence] = []
        try:
            for seq in seqs:
                if isinstance(seq.policy, Controller) and seq.policy.costs is None:
                    seq.policy.costs = self._measured()
                submitted.append(seq)
                self.engine.submit(seq)
            if trace is not None:
                trace.begin(seqs)
        except BaseException:
            self._cancel(submitted)
            raise
        self.worker.serve(self.engine)

    def _cancel(self, seqs: Seq[Sequence]) -> None:
        for seq in seqs:
            if not seq.finished:
                self.engine.cancel(seq)
                if seq.listener is not None:
                    seq.listener(Event(seq))

    def _requests(self, prompt: Any, settings: dict[str, Any]) -> tuple[list[Request], bool]:
        prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # ids as a tensor or an array
        single = isinstance(prompt, str | Request) or is_chat(prompt) or (is_ids(prompt) and len(prompt) > 0)
        if not single and (not isinstance(prompt, Seq) or not prompt):
            raise UsageError("the prompt is empty" if isinstance(prompt, Seq) else f"not a prompt: {prompt!r}")
        return [Request.from_keywords(p, settings) for p in ([prompt] if single else prompt)], not single

    def sequence(self, request: Request, stream: int = 0) -> Sequence:
        """Convert a request for the engine; `stream` distinguishes the samples of one prompt."""
        tokens = encode(request.prompt, self.tokenizer, self.lm.vocab)
        room = self.lm.max_length - len(tokens)
        if room < 1:
            raise UsageError(f"the prompt has {len(tokens)} tokens, but the model holds at most {self.lm.max_length}")
        stops = frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else self.stop_token_ids)
        rules = Constraints(
            request.min_tokens, tuple(sorted(stops)), self._bad_words(request), tuple(request.logits_processors),
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
            watcher=self._watcher(request, stops),
            context=request.owner,
            prediction=self._prediction(request),
        )

    def method(self, request: Request) -> Drafter:
        """The drafter of a request. The same name and options return the same object, with all that it has learned.

        Owners have objects of their own of a method that remembers text.
        """
        if isinstance(request.method, Drafter):
            return request.method
        name, options = request.method, dict(request.options)
        if request.draft is not None:
            options["draft"] = self.draft_of(request.draft)
        owner = request.owner if registry.find(name).remembers else None
        key = (owner, name, tuple(sorted((k, id(v) if k == "draft" else v) for k, v in options.items())))
        found: Drafter = self._methods.get(key, lambda: registry.method(name, **options))
        return found

    def policy(self, request: Request) -> Policy:
        """The policy of a request: its own, or the default of its method."""
        given = self.method(request).policy if request.policy is None else request.policy
        found: Policy = self._named(given, registry.policy)
        return found

    @property
    def costs(self) -> Costs | None:
        """The cost of a pass on this machine, measured on first use; None while there is no memory to measure it."""
        return self._measured() if self.worker.here else self.worker.call(self._measured)

    def _measured(self) -> Costs | None:
        if self._costs is None:
            try:
                self._costs = costs.load_or_measure(self.lm, self.name)
            except (CacheFull, OutOfMemoryError):
                return None
        return self._costs

    def draft_of(self, draft: Model | LM) -> LM:
        """The draft in terms of this model's tokens; a bare LM is assumed to have the same tokens."""
        if isinstance(draft, str | Path):
            raise UsageError(f"a draft must be a loaded model; pass draft=outpace.load({str(draft)!r})")
        if not isinstance(draft, Model):
            return draft
        key = id(draft.lm), id(draft.tokenizer)
        if key not in self._drafts:
            theirs = NamedModel(draft.lm, draft.tokenizer, draft.name)
            self._drafts.setdefault(key, (theirs, translated(NamedModel(self.lm, self.tokenizer, self.name), theirs)))
        return self._drafts[key][1]

    def _named(self, given: Any, make: Callable[..., Any]) -> Any:
        """Return the given object, or make one from "name" or "name:option=value,option=value"."""
        if not isinstance(given, str):
            return given
        name, options = registry.parse(given)
        return self._methods.get((make.__name__, given), lambda: make(name, **options))

    def _prediction(self, request: Request) -> list[int]:
        if not isinstance(request.prediction, str) or not request.prediction:
            return list(map(int, request.prediction))
        if self.tokenizer is None:
            raise UsageError("a prediction as text needs a tokenizer; pass token ids instead")
        return self.tokenizer.encode(request.prediction, add_special_tokens=False)

    def _watcher(self, request: Request, ends: frozenset[int]) -> TextStream | None:
        stops = [request.stop] if isinstance(request.stop, str) else list(request.stop)
        if self.tokenizer is None:
            if stops:
                raise UsageError("stop strings need a tokenizer")
            return None
        return TextStream(self.tokenizer, stops, request.min_tokens, None if request.skip_special_tokens else ends)

    def _bad_words(self, request: Request) -> tuple[tuple[int, ...], ...]:
        out = []
        for word in request.bad_words:
            if isinstance(word, str):
                if self.tokenizer is None:
                    raise UsageError("bad_words as text need a tokenizer; pass token sequences instead")
                # A word has different tokens at the start of a text and after a space.
                forms = {tuple(self.tokenizer.encode(w, add_special_tokens=False)) for w in (word, " " + word)}
                out += [form for form in forms if form]
            else:
                out.append(tuple(word))
        return tuple(out)

    def _grammar(self, request: Request, start: int, stops: frozenset[int]) -> Any:
        sources: dict[str, Any] = {
            "json_schema": request.json_schema,
            "regex": request.regex,
            "grammar": request.grammar,
        }
        given = {name: source for name, source in sources.items() if source is not None}
        if not given:
            return None
        return self.grammar_compiler(stops).compile(**given, start=start)

    def grammar_compiler(self, stops: frozenset[int]) -> GrammarCompiler:
        """The compiler of grammars that end with one of these tokens; the same stops return the same object."""
        if self.tokenizer is None:
            raise UsageError("a grammar needs a tokenizer")
        found: GrammarCompiler = self._compilers.get(
            stops, lambda: GrammarCompiler(self.tokenizer, self.lm.vocab, stops)
        )
        return found


def _results(stream: Stream, many: bool) -> Any:
    completions = stream.completions
    if many or len(completions) > 1:
        return completions
    if completions[0].error is not None:
        raise RequestFailed(completions[0].error)
    return completions[0]
