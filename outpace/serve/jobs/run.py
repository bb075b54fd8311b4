"""JobRun: a job in the engine. EngineLink: the way of its events from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from outpace.api.model import Model
from outpace.api.stream import Chunk, Completion, Listener, Message
from outpace.core.sequence import Sequence
from outpace.sampling.logprobs import Logprob
from outpace.serve.chat.output import OutputReader
from outpace.serve.chat.parts import CallStart
from outpace.serve.jobs.job import Delta, Job, JobOutcome, JobTimes, ServedAnswer, TokenUsage
from outpace.serve.jobs.job_trace import JobTrace
from outpace.serve.web.failures import APIFailure
from outpace.text import TextStream


class EngineLink:
    """Hands messages of the engine's thread to the event loop, with one wake-up for all that are on their way."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._mail: deque[tuple[JobRun, Message]] = deque()
        self._awake = False

    def post(self, run: JobRun, message: Message) -> None:
        """Call this on the engine's thread."""
        self._mail.append((run, message))
        if not self._awake:
            self._awake = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._awake = False  # before the mail is read: what comes later wakes the loop again
        while self._mail:
            run, message = self._mail.popleft()
            run.receive(message)


class Sender:
    """The receiver of one run's listeners."""

    def __init__(self, link: EngineLink, run: JobRun):
        self._link, self._run = link, run

    def put(self, message: Message) -> None:
        self._link.post(self._run, message)


class PreparedJob(NamedTuple):
    """A job with what the engine and its readers need."""

    job: Job
    seqs: list[Sequence]
    trace: JobTrace | None


class JobRun:
    """A job in the engine: read its deltas as they come, then its outcome."""

    def __init__(self, prepared: PreparedJob, model: Model, arrived: float):
        self.job, self.seqs, self.trace = prepared
        self.arrived = arrived
        self.answers = [ServedAnswer() for _ in self.seqs]
        self.ended = False  # in the engine; there may be more to read
        self.on_end: list[Callable[[], None]] = []
        self._model = model
        self._readers = [OutputReader(self.job.reading) for _ in self.seqs]
        self._completions: dict[int, Completion] = {}
        self._mail: list[Chunk] = []
        self._failure: Exception | None = None
        self._arrival = asyncio.Event()

    def listen(self, link: EngineLink) -> None:
        """Have the events of all samples sent here."""
        sender = Sender(link, self)
        for i, seq in enumerate(self.seqs):
            seq.listener = Listener(i, sender, self.trace, whole=not self.job.stream)

    def receive(self, message: Message) -> None:
        """Take a message, on the event loop."""
        if isinstance(message, Exception):
            self._failure = self._failure or message
        elif isinstance(message, Chunk):
            self._mail.append(message)
            if message.completion is not None:
                self._completions[message.index] = message.completion
        if self._failure is not None or len(self._completions) == len(self.seqs):
            self._end()
        self._arrival.set()

    def cancel(self) -> None:
        """End what still runs."""
        if not self.ended:
            self._model.cancel(self.seqs)
            self._end()

    def _end(self) -> None:
        if not self.ended:
            self.ended = True
            if self._failure is not None:
                self._model.cancel(self.seqs)
            for call in self.on_end:
                call()

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """Yield what has come, all that is there at a time; raise the failure of any sample."""
        while True:
            if self._failure is not None:
                raise self._failure
            if self._mail:
                mail, self._mail = self._mail, []
                yield self._read(mail)
            elif self.ended:
                return
            else:
                self._arrival.clear()
                await self._arrival.wait()

    async def outcome(self) -> JobOutcome:
        """Read to the end."""
        async for _ in self.deltas():
            pass
        return self.found

    @property
    def found(self) -> JobOutcome:
        """All answers, once everything has been read."""
        done = [self._completions[i] for i in range(len(self.seqs))]
        prompts = [seq.tokens[: seq.prompt_length] for seq in self.seqs]
        return JobOutcome(self.job, self.answers, self.usage, self._times(done), done, prompts)

    @property
    def usage(self) -> TokenUsage:
        """The tokens so far; while it runs, only those of prompts and completions."""
        total, known = TokenUsage(), set[int]()
        owners = [i for i, request in enumerate(self.job.requests) for _ in range(request.n)]
        for i, answer in enumerate(self.answers):
            done = self._completions.get(i)
            if done is None:
                used = TokenUsage(self.seqs[i].prompt_length, 0, len(answer.tokens))
            else:
                used = TokenUsage.of_completion(done, self._reasoning_tokens(i))
            total = total.plus(used, owners[i] in known)
            known.add(owners[i])
        return total

    def _reasoning_tokens(self, index: int) -> int:
        """Count the tokens up to the end of the reasoning."""
        watcher, output = self.seqs[index].watcher, self.answers[index].output
        if not output.reasoning or not isinstance(watcher, TextStream):
            return 0
        if not output.content and not output.calls:
            return len(self.answers[index].tokens)
        end = watcher.text.find(output.reasoning) + len(output.reasoning)
        marks = self.job.reading.marks
        close = -1 if marks is None else watcher.text.find(marks.close, end)
        return watcher.tokens_in(end if marks is None or close < 0 else close + len(marks.close))

    def _times(self, done: list[Completion]) -> JobTimes:
        return JobTimes(
            self.arrived,
            min(each.times.started for each in done),
            min(each.times.first or each.times.ended for each in done),
            max(each.times.ended for each in done),
        )

    def _read(self, mail: list[Chunk]) -> list[Delta]:
        """Merge the chunks of each answer, and read their text."""
        chunks: dict[int, list[Chunk]] = {}
        for chunk in mail:
            chunks.setdefault(chunk.index, []).append(chunk)
        found = [self._delta(index, group) for index, group in chunks.items()]
        for delta in found:
            self.answers[delta.index].add(delta)
        return found

    def _delta(self, index: int, chunks: list[Chunk]) -> Delta:
        done, reader = chunks[-1].completion, self._readers[index]
        if done is not None and done.error is not None:
            raise APIFailure(done.error, code="request_failed")
        if done is not None and done.finish_reason == "cancelled":
            raise APIFailure("the request was cancelled", 503, code="cancelled")
        if self.job.stream:
            text, tokens = "".join(chunk.text for chunk in chunks), [t for chunk in chunks for t in chunk.tokens]
            logprobs = _joined(chunks)
        else:
            assert done is not None, "only the last chunk of a whole answer is sent"
            text, tokens, logprobs = done.text, done.tokens, done.logprobs
        parts = reader.push(text)
        trace = [] if self.trace is None else self.trace.take(index, len(chunks))
        if done is None:
            return Delta(index, parts, tokens, logprobs, trace=trace)
        parts += reader.finish()
        called = bool(self.answers[index].output.calls) or any(isinstance(part, CallStart) for part in parts)
        reason = "tool_calls" if called and done.finish_reason == "stop" else done.finish_reason
        return Delta(index, parts, tokens, logprobs, reason, done.stop, trace)


def _joined(chunks: list[Chunk]) -> list[Logprob] | None:
    known = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
    return [logprob for logprobs in known for logprob in logprobs] if known else None
