"""Figures of one request, under the names that vLLM gives them and that load generators read."""

from __future__ import annotations

from typing import Any

from outpace.core.stats import Stats
from outpace.serve.jobs.job import JobOutcome


def request_metrics(outcome: JobOutcome) -> dict[str, Any] | None:
    """Return the object `metrics` of a reply; None for several answers, whose figures cannot be told apart."""
    if len(outcome.answers) != 1:
        return None
    times, tokens = outcome.times, outcome.usage.completion
    generation = times.ended - times.first
    return {
        "time_to_first_token_ms": _ms(times.first - times.arrived),
        "generation_time_ms": _ms(generation),
        "queue_time_ms": _ms(times.started - times.arrived),
        "mean_itl_ms": _ms(generation / (tokens - 1)) if tokens > 1 else None,
        "tokens_per_second": round(tokens / max(times.ended - times.started, 1e-9), 3),
        "speculative_decoding": speculative_decoding(outcome.stats),
    }


def speculative_decoding(stats: Stats) -> dict[str, Any] | None:
    """Return the acceptance of a request; None if nothing was drafted.

    A step is a pass with a draft. Of a tree, most draft tokens cannot be accepted.
    """
    if not stats.offered:
        return None
    steps = stats.offered[0]
    # How many steps accepted at least this many draft tokens, from 0 on.
    reached = [steps, *stats.matched, 0]
    return {
        "mean_acceptance_length": round(1 + stats.accepted / steps, 6),
        "draft_acceptance_rate": round(stats.acceptance, 6),
        "acceptance_histogram": [reached[i] - reached[i + 1] for i in range(len(reached) - 1)],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": stats.accepted,
        "num_draft_tokens": stats.drafted,
        "num_spec_tokens": len(stats.offered),
    }


def _ms(seconds: float) -> float:
    return round(1000 * max(seconds, 0.0), 3)
