"""RequestLog: one line of JSON for each request, without its texts unless asked; its figures go further, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter, time_ns
from typing import TYPE_CHECKING

from outpace.serve.jobs.job import Job, JobOutcome
from outpace.serve.telemetry.log_lines import say
from outpace.serve.telemetry.metrics import ServerMetrics
from outpace.serve.web.failures import APIFailure

if TYPE_CHECKING:
    from outpace.serve.telemetry.spans import RequestSpans


@dataclass
class RequestEntry:
    """What is told of one request at its end: a line, metrics, and a span if somebody collects them."""

    log: RequestLog
    surface: str
    id: str
    owner: str | None
    headers: Mapping[str, str]
    arrived: float = field(default_factory=perf_counter)
    arrived_ns: int = field(default_factory=time_ns)  # by the clock on the wall
    job: Job | None = None
    _ended: bool = False

    def end(self, outcome: JobOutcome | None, failure: APIFailure | None = None) -> None:
        """Tell of it, once: either what came of it or why it failed."""
        if self._ended:
            return
        self._ended = True
        if outcome is not None:
            self.log.metrics.ended(outcome)
        elif self.job is not None:
            self.log.metrics.aborted(self.job.samples)
        if self.log.spans is not None:
            self.log.spans.record(self, outcome, failure)
        self._say(outcome, failure)

    def _say(self, outcome: JobOutcome | None, failure: APIFailure | None) -> None:
        said: dict[str, object] = {"id": self.id, "api": self.surface}
        said["status"] = 200 if failure is None else failure.status
        if failure is not None and failure.code is not None:
            said["code"] = failure.code
        said["ms"] = round(1000 * (perf_counter() - self.arrived))
        if self.owner is not None:
            said["owner"] = self.owner
        if outcome is not None:
            said |= _figures(outcome)
        if self.log.prompts and self.job is not None:
            said["prompts"] = self.job.prompts
            said["answers"] = [] if outcome is None else [answer.output.content for answer in outcome.answers]
        say("request", **said)


def _figures(outcome: JobOutcome) -> dict[str, object]:
    usage, stats, times = outcome.usage, outcome.stats, outcome.times
    return {
        "queue_ms": round(1000 * (times.started - times.arrived)),
        "first_token_ms": round(1000 * (times.first - times.arrived)),
        "prompt_tokens": usage.prompt,
        "cached_tokens": usage.cached,
        "completion_tokens": usage.completion,
        "passes": stats.passes,
        "draft_tokens": stats.drafted,
        "accepted_tokens": stats.accepted,
        "methods": sorted({done.method for done in outcome.completions}),
        "finish_reasons": [answer.finish_reason for answer in outcome.answers],
    }


@dataclass
class RequestLog:
    """Begins what is told of each request."""

    metrics: ServerMetrics
    prompts: bool  # whether lines and spans have the texts
    spans: RequestSpans | None = None

    def begin(self, surface: str, id: str, owner: str | None, headers: Mapping[str, str]) -> RequestEntry:
        return RequestEntry(self, surface, id, owner, headers)
