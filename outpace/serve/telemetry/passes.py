"""PassMetrics: what passes did, counted on the engine's thread, and read when somebody asks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from time import perf_counter

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from outpace.core.engine import Engine, Event
from outpace.serve.telemetry.names import COUNTERS, HISTOGRAMS, OWN

BY_PASS = ("generation_tokens", "num_preemptions", "inter_token_latency_seconds", "iteration_tokens_total")


class PassHistogram:
    """A histogram that one thread fills. It takes no lock, because it gets a value for each request of each pass."""

    def __init__(self, name: str):
        self.name = name
        self.text, bounds = HISTOGRAMS[name]
        self.bounds = [*bounds, inf]
        self.counts = [0] * len(self.bounds)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def family(self, labels: dict[str, str]) -> Metric:
        """Return it as Prometheus reads it."""
        found = HistogramMetricFamily(OWN + self.name, self.text, labels=list(labels))
        buckets = zip(map(floatToGoString, self.bounds), accumulate(self.counts), strict=True)
        found.add_metric(list(labels.values()), list(buckets), self.sum)
        return found


@dataclass
class PassClock:
    """When the last pass of a request ended, by `time.perf_counter`."""

    at: float = 0.0  # 0: none has


class PassMetrics(Collector):
    """Counts the passes of an engine."""

    def __init__(self, engine: Engine, labels: dict[str, str]):
        self.engine, self._labels = engine, labels
        self._tokens = 0
        self._of_pass = PassHistogram("iteration_tokens_total")
        self._gaps = PassHistogram("inter_token_latency_seconds")

    def begin(self) -> None:
        """Count from the next pass on."""
        self.engine.on_pass.append(self.observe)

    def end(self) -> None:
        """Count no more."""
        if self.observe in self.engine.on_pass:
            self.engine.on_pass.remove(self.observe)

    def observe(self, events: list[Event]) -> None:
        """Count a pass."""
        now, committed, prompts = perf_counter(), 0, 0
        for event in events:
            if event.step is None:
                continue
            seq, last = event.seq, event.seq.state(self, PassClock)
            committed += len(event.step.tokens)
            if last.at:
                self._gaps.add(now - last.at)
            else:
                prompts += seq.prompt_length - seq.cached
            last.at = now
        self._tokens += committed
        if committed:
            self._of_pass.add(committed + prompts)

    def collect(self) -> Iterator[Metric]:
        counts = {"generation_tokens": self._tokens, "num_preemptions": self.engine.scheduler.preemptions}
        for name, count in counts.items():
            found = CounterMetricFamily(OWN + name, COUNTERS[name], labels=list(self._labels))
            found.add_metric(list(self._labels.values()), count)
            yield found
        yield self._of_pass.family(self._labels)
        yield self._gaps.family(self._labels)
