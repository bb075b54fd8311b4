"""Metrics for Prometheus, under `outpace:` and, for existing tools and dashboards, under vLLM's names."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence as Seq

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from outpace.api.stream import Completion
from outpace.serve.jobs.job import JobOutcome

OWN, ALIAS = "outpace:", "vllm:"
NAMES = re.compile(rf"(# (?:HELP|TYPE) )?{OWN}(?!http_|\w+_by_source)")  # vLLM has none by the other names
CREATED = re.compile(r"^(# (?:HELP|TYPE) )?\S+_created\b.*\n", re.MULTILINE)  # when a counter was made
SHORT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
EACH = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
LONG = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 600.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

# Name -> what it counts. Prometheus shows counters with `_total`.
COUNTERS = {
    "spec_decode_num_drafts": "Passes with draft tokens.",
    "spec_decode_num_draft_tokens": "Draft tokens that were verified.",
    "spec_decode_num_accepted_tokens": "Draft tokens that were accepted.",
    "prompt_tokens": "Tokens of prompts.",
    "prompt_tokens_cached": "Tokens of prompts that the cache held already.",
    "generation_tokens": "Tokens of answers.",
    "prefix_cache_queries": "Tokens of prompts that were looked for in the cache.",
    "prefix_cache_hits": "Tokens of prompts that were found in the cache.",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": ("From the arrival of a request to its first token.", SHORT),
    "inter_token_latency_seconds": ("Mean time between the tokens of an answer.", EACH),
    "request_time_per_output_token_seconds": ("Mean time between the tokens of an answer.", EACH),
    "e2e_request_latency_seconds": ("From the arrival of a request to its end.", LONG),
    "request_queue_time_seconds": ("From the arrival of a request to its slot.", LONG),
    "request_prefill_time_seconds": ("From the slot to the first token.", LONG),
    "request_decode_time_seconds": ("From the first token to the end.", LONG),
    "request_prompt_tokens": ("Tokens of a prompt.", TOKENS),
    "request_generation_tokens": ("Tokens of an answer.", TOKENS),
}
GAUGES = {
    "num_requests_running": "Samples in the engine.",
    "num_requests_waiting": "Samples that wait.",
    "kv_cache_usage_perc": "Share of the KV cache that is in use, from 0 to 1.",
}


class ServerMetrics:
    """The metrics of one server, which has one model."""

    def __init__(self, model_name: str):
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._counters = {name: self._counter(name, text).labels(**self._labels) for name, text in COUNTERS.items()}
        self._histograms = {name: self._histogram(name, *about) for name, about in HISTOGRAMS.items()}
        at = "Accepted draft tokens by their position in the draft."
        self._accepted_at = self._counter("spec_decode_num_accepted_tokens_per_pos", at, "position")
        self._ends = self._counter("request_success", "Samples that ended, by why.", "finished_reason")
        self._drafted_by = self._counter("draft_tokens_by_source", "Draft tokens by who drafted them.", "source")
        self._accepted_by = self._counter("accepted_tokens_by_source", "Accepted ones by who drafted them.", "source")
        text = "Replies by path and status."
        self._replies = Counter(OWN + "http_replies", text, ["path", "status"], registry=self.registry)

    def _counter(self, name: str, text: str, *more: str) -> Counter:
        return Counter(OWN + name, text, [*self._labels, *more], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Seq[float]) -> Histogram:
        return Histogram(OWN + name, text, [*self._labels], buckets=buckets, registry=self.registry).labels(
            **self._labels
        )

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
            "generation_tokens": usage.completion,
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
            "inter_token_latency_seconds": each,
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
