"""JobTrace: the trace of a job for its stream, in the format of `outpace.tracing.trace` and bounded in size."""

from __future__ import annotations

from collections import deque

from outpace.api.model import Model
from outpace.core.engine import Event
from outpace.core.sequence import Sequence
from outpace.serve.jobs.job import TraceWish
from outpace.tracing.trace import Line, TraceLines


class JobTrace:
    """Holds the lines of each event until the chunk of that event is read."""

    def __init__(self, model: Model, seqs: list[Sequence], wish: TraceWish):
        self._lines = TraceLines(model.tokenizer, model.name, wish.probs)
        self.opening = [self._lines.header(), *self._lines.begin(seqs)]
        self._most, self._nodes = wish.most_nodes, 0
        self._cut = False
        self._events: list[deque[list[Line]]] = [deque() for _ in seqs]
        self._places = {seq.id: i for i, seq in enumerate(seqs)}
        for seq in seqs:
            seq.watched = wish.probs  # then its scores are kept until they are read

    def event(self, event: Event) -> None:
        """Record an event, on the engine's thread."""
        self._nodes += 0 if event.step is None else len(event.step.layout)
        within = self._nodes <= self._most
        lines = list(self._lines.event(event if within else Event(event.seq)))
        if not within and not self._cut:
            self._cut = True
            lines.insert(0, {"type": "cut", "nodes": self._most})
        self._events[self._places[event.seq.id]].append(lines)

    def take(self, index: int, events: int) -> list[Line]:
        """Return the lines of the next events of an answer."""
        return [line for _ in range(events) for line in self._events[index].popleft()]
