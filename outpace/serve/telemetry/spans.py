"""RequestSpans: a span of each request for OpenTelemetry, by its conventions for generative models.

What the conventions have no name for has vLLM's (`gen_ai.latency.*`) or begins with `outpace.`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Any

from outpace.serve.jobs.job import Job, JobOutcome
from outpace.serve.telemetry.figures import speculative_decoding
from outpace.serve.web.failures import APIFailure
from outpace.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from outpace.serve.telemetry.request_log import RequestEntry

TRACES = "/v1/traces"  # where a collector takes them over HTTP
OPERATIONS = {"completions": "text_completion"}  # of surfaces; all others are chats
SETTINGS = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "seed")
NANOSECONDS = 1_000_000_000


def exporting_provider(endpoint: str) -> TracerProvider:
    """Return a provider of tracers whose spans go to a collector, from a thread of its own."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    url = endpoint if endpoint.endswith(TRACES) else endpoint.rstrip("/") + TRACES
    about = Resource.create({"service.name": "outpace", "service.version": __version__})
    provider = TracerProvider(resource=about, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url)))
    return provider


class RequestSpans:
    """Makes a span of each request that has ended."""

    def __init__(self, provider: TracerProvider, model: str):
        self.provider, self.model = provider, model
        self._tracer = provider.get_tracer("outpace.serve", __version__)

    def record(self, entry: RequestEntry, outcome: JobOutcome | None, failure: APIFailure | None) -> None:
        """Record a request, as a child of the span that its `traceparent` names."""
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        operation = OPERATIONS.get(entry.surface, "chat")
        span = self._tracer.start_span(
            f"{operation} {self.model}",
            TraceContextTextMapPropagator().extract(entry.headers),
            SpanKind.SERVER,
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "outpace",
                "gen_ai.request.model": self.model,
                "gen_ai.response.id": entry.id,
                "http.response.status_code": 200 if failure is None else failure.status,
            },
            start_time=entry.arrived_ns,
        )
        if entry.job is not None:
            span.set_attributes(dict(_requested(entry.job)))
        if outcome is not None:
            span.set_attributes(dict(_found(outcome)))
        if entry.log.prompts and entry.job is not None:
            span.set_attributes(dict(_texts(entry.job, outcome)))
        if failure is not None:
            span.set_attribute("error.type", failure.code or str(failure.status))
            span.set_status(Status(StatusCode.ERROR))
        span.end(entry.arrived_ns + round(NANOSECONDS * (perf_counter() - entry.arrived)))

    def close(self) -> None:
        """Send what has not been sent."""
        self.provider.shutdown()


def _requested(job: Job) -> Iterator[tuple[str, Any]]:
    """Yield how the answers were to be made."""
    request = job.requests[0]  # those of further prompts have the same settings
    for name in SETTINGS:
        yield f"gen_ai.request.{name}", getattr(request.sampling, name)
    yield "gen_ai.request.max_tokens", request.max_tokens
    yield "gen_ai.request.choice.count", request.n
    yield "gen_ai.request.stream", job.stream
    yield "gen_ai.output.type", "text" if request.json_schema is None else "json"
    if request.stop:
        yield "gen_ai.request.stop_sequences", [request.stop] if isinstance(request.stop, str) else list(request.stop)


def _found(outcome: JobOutcome) -> Iterator[tuple[str, Any]]:
    """Yield what came of a request, and in which time."""
    usage, times = outcome.usage, outcome.times
    yield "gen_ai.response.finish_reasons", [str(answer.finish_reason) for answer in outcome.answers]
    yield "gen_ai.usage.input_tokens", usage.prompt
    yield "gen_ai.usage.output_tokens", usage.completion
    yield "gen_ai.usage.cache_read.input_tokens", usage.cached
    yield "gen_ai.usage.reasoning.output_tokens", usage.reasoning
    yield "gen_ai.response.time_to_first_chunk", times.first - times.arrived
    yield "gen_ai.latency.time_in_queue", times.started - times.arrived
    yield "gen_ai.latency.time_in_model_prefill", times.first - times.started
    yield "gen_ai.latency.time_in_model_decode", times.ended - times.first
    yield "outpace.methods", sorted({done.method for done in outcome.completions})
    yield "outpace.passes", outcome.stats.passes
    for name, value in (speculative_decoding(outcome.stats) or {}).items():
        yield f"outpace.speculation.{name}", value


def _texts(job: Job, outcome: JobOutcome | None) -> Iterator[tuple[str, str]]:
    """Yield prompts and answers, in the form of the conventions."""
    given = [_message("user", prompt) for prompt in job.prompts]
    yield "gen_ai.input.messages", json.dumps(given)
    if outcome is not None:
        said = [
            {**_message("assistant", answer.output.content), "finish_reason": answer.finish_reason}
            for answer in outcome.answers
        ]
        yield "gen_ai.output.messages", json.dumps(said)


def _message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}
