"""RequestLog: one line of JSON for each request, without its texts unless asked."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from time import perf_counter, time

from outpace.serve.jobs.job import Job, JobOutcome
from outpace.serve.telemetry.metrics import ServerMetrics

logger = logging.getLogger("outpace.serve")


@dataclass
class RequestEntry:
    """The line of one request, written at its end. Its figures go to the metrics too."""

    log: RequestLog
    surface: str
    id: str
    owner: str | None
    arrived: float
    job: Job | None = None
    _ended: bool = False

    def end(self, status: int, outcome: JobOutcome | None = None) -> None:
        """Write the line, once."""
        if self._ended:
            return
        self._ended = True
        if outcome is not None:
            self.log.metrics.ended(outcome)
        elif self.job is not None:
            self.log.metrics.aborted(self.job.samples)
        said: dict[str, object] = {
            "time": round(time(), 3),
            "id": self.id,
            "api": self.surface,
            "status": status,
            "ms": round(1000 * (perf_counter() - self.arrived)),
        }
        if self.owner is not None:
            said["owner"] = self.owner
        if outcome is not None:
            said |= self._figures(outcome)
        if self.log.prompts and self.job is not None:
            said["prompts"] = self.job.prompts
            said["answers"] = [] if outcome is None else [answer.output.content for answer in outcome.answers]
        logger.info(json.dumps(said))

    def _figures(self, outcome: JobOutcome) -> dict[str, object]:
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


@dataclass(frozen=True)
class RequestLog:
    """Begins the line of each request."""

    metrics: ServerMetrics
    prompts: bool  # whether lines have the texts

    def begin(self, surface: str, id: str, owner: str | None) -> RequestEntry:
        return RequestEntry(self, surface, id, owner, perf_counter())
