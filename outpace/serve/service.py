"""Service: a model that is served: its queue, its threads, its state. It starts jobs; surfaces read them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Literal, TypeVar

from outpace.api.model import Model
from outpace.serve.chat.template import ChatFormat
from outpace.serve.jobs.admission import Admission, Owner
from outpace.serve.jobs.job import Job
from outpace.serve.jobs.job_trace import JobTrace
from outpace.serve.jobs.run import EngineLink, JobRun, PreparedJob
from outpace.serve.served import Served
from outpace.serve.settings import ServeSettings
from outpace.serve.telemetry.metrics import ServerMetrics
from outpace.serve.telemetry.request_log import RequestEntry, RequestLog
from outpace.serve.telemetry.spans import RequestSpans, exporting_provider
from outpace.serve.web.event_stream import Pace
from outpace.serve.web.failures import APIFailure, not_ready, queue_full

T = TypeVar("T")
PREPARING = 8  # threads that encode prompts and compile grammars
SUBMITTING = 32  # threads that wait until the engine takes a job, between two passes
AHEAD = 8  # one of so many requests waits in the engine, so that a free slot need not wait for the event loop


class Service:
    """Starts jobs on a model, for one event loop."""

    def __init__(self, model: Model, settings: ServeSettings):
        self.model, self.settings = model, settings
        self.served = Served(model, settings, ChatFormat(model, settings.tool_format))
        self.metrics = ServerMetrics(settings.names[0], model.engine)
        self.log = RequestLog(self.metrics, settings.log_prompts, _spans(settings))
        self.state: Literal["starting", "ready", "draining", "failed"] = "starting"
        self.failure: Exception | None = None  # of the warm-up
        self.admission = Admission(model.max_batch + max(1, model.max_batch // AHEAD), settings.limits.waiting)
        self._preparing = ThreadPoolExecutor(PREPARING, "outpace-prepare")
        self._submitting = ThreadPoolExecutor(SUBMITTING, "outpace-submit")
        self.pace = Pace()
        self._link: EngineLink | None = None
        scheduler = model.engine.scheduler
        self.metrics.gauge("num_requests_running", lambda: len(scheduler.running) + len(scheduler.feeding))
        self.metrics.gauge("num_requests_waiting", lambda: self.admission.pending + len(scheduler.waiting))
        self.metrics.gauge("kv_cache_usage_perc", self._cache_usage)

    async def warm_up(self) -> None:
        """Prepare all that the first request would wait for; then the server is ready."""
        self._link = EngineLink(asyncio.get_running_loop())
        await asyncio.to_thread(self._warm_up)
        self.metrics.passes.begin()
        if self.state == "starting":
            self.state = "ready"

    def _warm_up(self) -> None:
        self.model.warm_up()
        settings = self.settings
        given = {"method": settings.method, "draft": settings.draft, "policy": settings.policy, **settings.options}
        self.model.generate([0, 1, 2], **given, max_tokens=4, ignore_eos=True)
        self.model.clear_cache()

    async def start(self, make: Callable[[], Job], entry: RequestEntry, samples: int) -> JobRun:
        """Queue a job and submit it. `make` runs on a thread; it may take a while."""
        if self.state != "ready" or self._link is None:
            raise not_ready(self.state)
        place = self.admission.take(entry.owner, samples)
        try:
            prepared = await self.prepared(lambda: self._sequences(make(), entry.owner))
            await place.wait()
            run = JobRun(prepared, self.model, entry.arrived)
            run.on_end.append(place.leave)
            run.listen(self._link)
            await self._submit(run)
        except BaseException:
            place.leave()
            raise
        entry.job = run.job
        return run

    async def prepared(self, work: Callable[[], T]) -> T:
        """Run work for a request on a thread, for a limited time."""
        seconds = self.settings.limits.prepare_seconds
        future = self._preparing.submit(work)
        try:
            # Not `wait_for`: in Python 3.11 it drops a cancellation that comes just as the work ends.
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            if future.cancelled():  # it never began
                raise queue_full(round(max(1, seconds))) from error
            text = f"preparing the request took longer than {seconds:g} s; is its grammar or schema too complex?"
            raise APIFailure(text, code="too_complex") from error

    def _sequences(self, job: Job, owner: Owner) -> PreparedJob:
        shared = None if self.settings.share_between_keys else owner
        requests = [replace(request, owner=shared) for request in job.requests]
        seqs = [self.model.sequence(request, i) for request in requests for i in range(request.n)]
        return PreparedJob(job, seqs, None if job.trace is None else JobTrace(self.model, seqs, job.trace))

    async def _submit(self, run: JobRun) -> None:
        """Submit a job. If the caller is cancelled meanwhile, the job is, once the engine has it."""
        future: Future[None] = self._submitting.submit(self.model.submit, run.seqs)
        try:
            await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not future.cancelled():
                future.add_done_callback(lambda _: self.model.cancel(run.seqs))
            raise

    def _cache_usage(self) -> float:
        weights, scheduler = self.model.lm.weights, self.model.engine.scheduler
        used = sum(len(seq.tokens) for seq in [*scheduler.running, *scheduler.feeding])
        need = None if weights is None else weights.memory(used)
        return need.cache / need.available if need is not None and need.available else 0.0

    async def close(self) -> None:
        """Let the threads end, and have spans sent."""
        self.metrics.passes.end()
        if self.log.spans is not None:
            await asyncio.to_thread(self.log.spans.close)
        for pool in (self._preparing, self._submitting):
            pool.shutdown(wait=False, cancel_futures=True)


def _spans(settings: ServeSettings) -> RequestSpans | None:
    if settings.otlp_endpoint is None:
        return None
    return RequestSpans(exporting_provider(settings.otlp_endpoint), settings.names[0])
