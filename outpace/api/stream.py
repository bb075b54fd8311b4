"""Stream: yields the output of one or more requests in chunks. The result of a request is its Completion."""

from __future__ import annotations

import asyncio
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple, Protocol

from outpace.core.engine import Event
from outpace.core.sequence import FinishReason, Sequence, Step
from outpace.core.stats import Stats
from outpace.core.tree import Tree
from outpace.sampling.logprobs import Logprob
from outpace.text import TextStream

if TYPE_CHECKING:
    from outpace.api.model import Model
    from outpace.tracing.trace import TraceWriter


class DraftUse(NamedTuple):
    """Draft tokens of one source, and how many of them were accepted."""

    drafted: int
    accepted: int


class Times(NamedTuple):
    """When a request got a slot, gave its first token, and ended, by `time.perf_counter`; 0 if it never did."""

    started: float
    first: float
    ended: float


NEVER = Times(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Completion:
    """The result of a request."""

    text: str
    tokens: list[int]
    finish_reason: FinishReason | None  # None while it runs
    stats: Stats
    prompt_tokens: int
    method: str
    lossless: bool
    logprobs: list[Logprob] | None = None
    error: str | None = None
    stop: str | None = None  # the stop string that ended it
    cached_tokens: int = 0  # tokens of the prompt that the cache held already
    sources: dict[str, DraftUse] = field(default_factory=dict)  # with the last chunk: its draft tokens by source
    times: Times = NEVER  # with the last chunk

    @classmethod
    def of_sequence(cls, seq: Sequence) -> Completion:
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
            stop=seq.watcher.stop if isinstance(seq.watcher, TextStream) else None,
            cached_tokens=seq.cached,
        )


@dataclass(frozen=True)
class Chunk:
    """The output that one pass added to a stream."""

    text: str
    spans: list[tuple[str, bool]]  # the same text in spans: True where it came from accepted draft tokens
    tokens: list[int]
    step: Step | None
    logprobs: list[Logprob] | None = None  # of these tokens, if requested
    index: int = 0  # which request of the stream
    completion: Completion | None = None  # with the last chunk of a request


class EndOfStream:
    """Marks the end of a mailbox: nothing comes after it."""


Message = Chunk | Exception | EndOfStream


class Receiver(Protocol):
    """Takes what a listener makes of events, on the engine's thread."""

    def put(self, message: Message) -> None: ...


class Recorder(Protocol):
    """Records the events of requests, on the engine's thread."""

    def event(self, event: Event) -> None: ...


class Mailbox:
    """Passes chunks from the engine's thread to a reader, which waits in a thread or in an event loop."""

    def __init__(self) -> None:
        self._mail: SimpleQueue[Message] = SimpleQueue()
        self._wake: Callable[[], object] | None = None

    def put(self, message: Message) -> None:
        self._mail.put(message)
        if self._wake is not None:
            self._wake()

    def get(self) -> Message:
        return self._mail.get()

    async def wait(self) -> Message:
        arrived, loop = asyncio.Event(), asyncio.get_running_loop()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop was closed, so no reader waits any more
                loop.call_soon_threadsafe(arrived.set)

        self._wake = wake
        while True:
            try:
                return self._mail.get_nowait()
            except Empty:
                await arrived.wait()
                arrived.clear()


@dataclass
class Listener:
    """Turns the events of one request into chunks, on the engine's thread."""

    index: int
    mailbox: Receiver
    trace: Recorder | None
    whole: bool  # only the last chunk is needed
    first: float = 0.0  # when the first token came
    sources: dict[str, DraftUse] = field(default_factory=dict)

    def __call__(self, event: Event) -> None:
        """Handle an event. An error here, such as a full disk while tracing, is raised in the reader."""
        seq = event.seq
        try:
            if self.trace is not None:
                self.trace.event(event)
            if event.step is not None:
                self._note(event.step, seq.drafter.name)
            if seq.cause is not None:
                self.mailbox.put(seq.cause)
            elif seq.finished or not self.whole:
                self.mailbox.put(self._chunk(event))
        except Exception as error:
            self.mailbox.put(error)

    def _note(self, step: Step, method: str) -> None:
        self.first = self.first or perf_counter()
        if not step.drafted:
            return
        named = step.layout.sources if isinstance(step.layout, Tree) else {}
        drafted = Counter(named.values()) + Counter({method: step.drafted - len(named)})
        accepted = Counter(named.get(node, method) for node in step.path[1 : step.accepted + 1])
        for source, count in drafted.items():
            before = self.sources.get(source, DraftUse(0, 0))
            self.sources[source] = DraftUse(before.drafted + count, before.accepted + accepted[source])

    def _completion(self, seq: Sequence) -> Completion:
        times = Times(seq.started, self.first, perf_counter())
        return replace(Completion.of_sequence(seq), sources=self.sources, times=times)

    def _chunk(self, event: Event) -> Chunk:
        seq, tokens = event.seq, [] if event.step is None else event.step.tokens
        runs: list[tuple[str, bool]] = []
        if isinstance(seq.watcher, TextStream):
            if seq.finished:
                seq.watcher.finish()
            if not self.whole:
                runs = [(span.text, seq.drafted[span.token]) for span in seq.watcher.take()]
        text = "".join(text for text, _ in runs)
        logprobs = None if seq.limits.logprobs is None else seq.logprobs[len(seq.logprobs) - len(tokens) :]
        done = self._completion(seq) if seq.finished else None
        return Chunk(text, runs, tokens, event.step, logprobs, self.index, done)


class Stream(Iterator[Chunk]):
    """Yields the output of one or more requests in chunks; `completions` holds what has been read of each.

    The requests run whether or not the stream is read. Closing or dropping the stream cancels what still runs.
    """

    def __init__(self, model: Model, seqs: list[Sequence], trace: TraceWriter | None = None, whole: bool = False):
        self._model, self._seqs = model, seqs
        self._mailbox = Mailbox()
        self._read = [(0, "")] * len(seqs)  # of each request: the number of tokens and the text that have been read
        self._ended: dict[int, Completion] = {}
        self._closed = False
        for i, seq in enumerate(seqs):
            seq.listener = Listener(i, self._mailbox, trace, whole)
            seq.watched = trace is not None
        model.submit(seqs, trace)
        # Nothing on the engine's thread refers to the stream, so a dropped stream is garbage-collected.
        weakref.finalize(self, model.cancel, seqs).atexit = False

    def __next__(self) -> Chunk:
        if self._over:
            raise StopIteration
        chunk = self._take(self._mailbox.get())
        if chunk is None:
            raise StopIteration
        return chunk

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Chunk:
        if self._over:
            raise StopAsyncIteration
        chunk = self._take(await self._mailbox.wait())
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    def _take(self, message: Message) -> Chunk | None:
        if isinstance(message, EndOfStream):
            self._mailbox.put(message)  # for other reading threads
            return None
        if isinstance(message, Exception):
            self.cancel()
            raise message
        count, text = self._read[message.index]
        self._read[message.index] = count + len(message.tokens), text + message.text
        if message.completion is not None:
            self._ended[message.index] = message.completion
        return message

    @property
    def _over(self) -> bool:
        return self._closed or len(self._ended) == len(self._seqs)

    def cancel(self) -> None:
        """Cancel what still runs, without waiting."""
        if not self._over:
            self._closed = True
            self._model.cancel(self._seqs)
            self._mailbox.put(EndOfStream())

    def close(self) -> None:
        """Cancel what still runs, and wait until its cache slots are free."""
        if not self._over:
            self.cancel()
            if not self._model.worker.here:
                self._model.worker.call(lambda: None)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def completions(self) -> list[Completion]:
        """What has been read of each request so far."""
        return [self._ended.get(i) or self._partly(i) for i in range(len(self._seqs))]

    def _partly(self, index: int) -> Completion:
        found, (count, text) = Completion.of_sequence(self._seqs[index]), self._read[index]
        logprobs = None if found.logprobs is None else found.logprobs[:count]
        reason: FinishReason | None = "cancelled" if self._closed else None
        return replace(
            found, text=text, tokens=found.tokens[:count], logprobs=logprobs, finish_reason=reason, error=None
        )
