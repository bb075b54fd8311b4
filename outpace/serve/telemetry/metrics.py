"""Metrics for Prometheus, under `outpace:` and, for existing tools and dashboards, under vLLM's names."""

from __future__ import annotations

import re
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from outpace.api.stream import Completion
from outpace.core.engine import Engine
from outpace.serve.jobs.job import JobOutcome
from outpace.serve.telemetry.names import ALIAS, COUNTERS, GAUGES, HISTOGRAMS, LABELLED, OWN
from outpace.serve.telemetry.passes import BY_PASS, PassMetrics

NAMES = re.compile(rf"(# (?:HELP|TYPE) )?{OWN}(?!http_|\w+_by_source)")  # vLLM has none by the other names
CREATED = re.compile(r"^(# (?:HELP|TYPE) )?\S+_created\b.*\n", re.MULTILINE)  # when a counter was made


class ServerMetrics:
    """The metrics of one server, which has one model."""

    def __init__(self, model_name: str, engine: Engine):
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self.passes = PassMetrics(engine, self._labels)
        self.registry.register(self.passes)
        self._counters = {name: self._counter(name).labels(**self._labels) for name in COUNTERS if name not in BY_PASS}
        self._histograms = {name: self._histogram(name) for name in HISTOGRAMS if name not in BY_PASS}
        self._accepted_at = self._counter("spec_decode_num_accepted_tokens_per_pos")
        self._ends = self._counter("request_success")
        self._drafted_by = self._counter("draft_tokens_by_source")
        self._accepted_by = self._counter("accepted_tokens_by_source")
        text, labels = LABELLED["http_replies"]
        self._replies = Counter(OWN + "http_replies", text, labels, registry=self.registry)

    def _counter(self, name: str) -> Counter:
        text, labels = LABELLED.get(name) or (COUNTERS[name], [])
        return Counter(OWN + name, text, [*self._labels, *labels], registry=self.registry)

    def _histogram(self, name: str) -> Histogram:
        text, buckets = HISTOGRAMS[name]
        found = Histogram(OWN + name, text, [*self._labels], buckets=buckets, registry=self.registry)
        return found.labels(**self._labels)

    def gauge(self, name: str, read: Callable[[], float]) -> None:
        """Have a gauge read when it is asked for."""
        gauge = Gauge(OWN + name, GAUGES[name], [*self._labels], registry=self.registry)
        gauge.labels(**self._labels).set_function(read)

    def reply(self, path: str, status: int) -> None:
        """Count a reply."""
        self._replies.labels(path=path, status=str(status)).inc()

    def ended(self, outcome: JobOutcome) -> None:
        """Count a job that has ended, with all of its samples."""
        usage, stats = outcome.usage, outcome.stats
        added = {
            "spec_decode_num_drafts": stats.offered[0] if stats.offered else 0,
            "spec_decode_num_draft_tokens": stats.drafted,
            "spec_decode_num_accepted_tokens": stats.accepted,
            "prompt_tokens": usage.prompt,
            "prompt_tokens_cached": usage.cached,
            "prefix_cache_queries": usage.prompt,
            "prefix_cache_hits": usage.cached,
        }
        for name, count in added.items():
            self._counters[name].inc(count)
        for position, count in enumerate(stats.matched):
            self._accepted_at.labels(**self._labels, position=str(position)).inc(count)
        for done in outcome.completions:
            self._sample(done, outcome.times.arrived)

    def aborted(self, samples: int) -> None:
        """Count samples whose reply was not completed."""
        self._ends.labels(**self._labels, finished_reason="abort").inc(samples)

    def _sample(self, done: Completion, arrived: float) -> None:
        self._ends.labels(**self._labels, finished_reason=str(done.finish_reason)).inc()
        for source, (drafted, accepted) in done.sources.items():
            self._drafted_by.labels(**self._labels, source=source).inc(drafted)
            self._accepted_by.labels(**self._labels, source=source).inc(accepted)
        started, first, ended = done.times
        if not first:
            return
        each = (ended - first) / (len(done.tokens) - 1) if len(done.tokens) > 1 else None
        seen = {
            "time_to_first_token_seconds": first - arrived,
            "request_time_per_output_token_seconds": each,
            "e2e_request_latency_seconds": ended - arrived,
            "request_queue_time_seconds": started - arrived,
            "request_prefill_time_seconds": first - started,
            "request_decode_time_seconds": ended - first,
            "request_prompt_tokens": done.prompt_tokens,
            "request_generation_tokens": len(done.tokens),
        }
        for name, value in seen.items():
            if value is not None:
                self._histograms[name].observe(value)

    def text(self) -> str:
        """Return all metrics under both names, as Prometheus reads them."""
        own = CREATED.sub("", generate_latest(self.registry).decode())
        return own + "".join(line.replace(OWN, ALIAS, 1) for line in own.splitlines(keepends=True) if NAMES.match(line))
