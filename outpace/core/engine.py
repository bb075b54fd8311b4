"""Engine: the decoding loop. Draft a tree, score all its nodes in one pass of the target, keep what the target chose.

    tree = policy.select(drafter.propose(seq, policy.budget(seq)))
    scores = target.score(tree)
    step = verifier.verify(seq, tree, scores)
    target.keep(step.kept)

The batch is ragged: sequences differ in length, method and sampling settings, and join and leave at any step. If the
code of one request raises an error, only that request ends.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from outpace.core.layout import Layout
from outpace.core.lm import LM, Scores
from outpace.core.policy import PassReport
from outpace.core.scheduler import Scheduler, slot_of
from outpace.core.sequence import Sequence, Step
from outpace.core.stats import timed
from outpace.core.tree import Budget
from outpace.errors import CacheFull, RequestFailed
from outpace.sampling.sampler import Pick

Work = Callable[[list[Sequence]], None]  # runs on a group of sequences


@dataclass(frozen=True)
class Event:
    """What happened to one sequence: a pass or, if `step` is None, a failure or a cancellation."""

    seq: Sequence
    step: Step | None = None
    scores: Scores | None = None  # of the nodes of the step's layout; None if passes overlap
    seconds: dict[str, float] = field(default_factory=dict)  # of the whole pass: prefill, draft, score, verify, keep
    batch_size: int = 1  # requests in the pass


class PassInFlight(NamedTuple):
    """A pass that has been launched but not read."""

    layouts: dict[int, Layout]  # by sequence
    scores: dict[int, Scores]
    events: list[Event]  # of requests that failed before the launch
    seconds: dict[str, float]


class Engine:
    """Runs the submitted requests; each step is one pass of the target over all running requests. Has no threads."""

    def __init__(self, target: LM, max_batch: int | None = None, overlap: bool = True):
        self.target = target
        self.scheduler = Scheduler(target, target.usual_batch if max_batch is None else max_batch)
        self.on_pass: list[Callable[[list[Event]], object]] = []  # called with the events of every pass of `turn`
        self._overlap = overlap and target.asynchronous
        self._late: list[Event] = []  # events of the last pass, delivered while the next one runs

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and not self._late

    @property
    def running(self) -> list[Sequence]:
        return self.scheduler.running

    @property
    def overlaps(self) -> bool:
        """Whether the host processes a pass while the next one runs, which overwrites its scores: events have none."""
        return self._overlap and not any(seq.watched for seq in self.running)

    def submit(self, seq: Sequence) -> None:
        """Queue a request, or refuse it before anything runs."""
        self.scheduler.submit(seq)

    def cancel(self, seq: Sequence) -> None:
        """End a request now. Its tokens so far stay readable, and it gets no further events."""
        self.scheduler.cancel(seq)
        self._late = [event for event in self._late if event.seq is not seq]

    def turn(self, deliver: Callable[[Event], object]) -> None:
        """Run one pass over every running request, and deliver its events; with overlap, the previous events."""
        flight = self._begin()
        late, self._late = self._late, []
        self._deliver(late, deliver)  # the pass is running on the device, so the host has time
        overlaps = self.overlaps
        events = self._end(flight, not overlaps)
        if overlaps:
            self._late = events
        else:
            self._deliver(events, deliver)

    def _deliver(self, events: list[Event], deliver: Callable[[Event], object]) -> None:
        for call in self.on_pass:
            call(events)
        for event in events:
            deliver(event)

    def serve(self) -> bool:
        """Run one pass and send its events to the listeners of the requests; False when all requests have ended."""
        try:
            self.turn(_notify)
        except Exception as error:
            late, self._late = self._late, []
            for event in [*late, *self.abort(error)]:
                _notify(event)
        return not self.idle

    def run(self) -> Generator[Event]:
        """Step until every request has ended; closing the generator early releases all slots."""
        try:
            while not self.idle:
                events: list[Event] = []
                self.turn(events.append)
                yield from (event for event in events if event.seq.finish_reason != "cancelled")
        finally:
            for seq in self.scheduler.all:
                self.cancel(seq)
            self._late = []

    def step(self) -> list[Event]:
        """Run one pass over every running request."""
        return self._end(self._begin())

    def abort(self, error: Exception) -> list[Event]:
        """Fail all running requests, after a pass broke off for a reason that belongs to none of them."""
        failed = list(self.running)
        for seq in failed:
            self.scheduler.fail(seq, error)
        self.target.clear()
        return [Event(seq) for seq in failed]

    def _begin(self) -> PassInFlight:
        """Draft, and launch the pass."""
        seconds: dict[str, float] = {}
        with timed(seconds, "prefill"):
            failed = self.scheduler.admit()
        for seq in self.scheduler.feeding:
            seq.stats.spend({"prefill": seconds["prefill"]})
        with timed(seconds, "draft"):
            layouts = self._draft(failed)
        with timed(seconds, "prefill" if self._feeds else "score"):
            scores = self._score(layouts, failed)
            if self.overlaps and not self._feeds:
                self._run_ahead(layouts)
        return PassInFlight(layouts, scores, [Event(seq) for seq in failed], seconds)

    def _end(self, flight: PassInFlight, with_scores: bool = True) -> list[Event]:
        """Wait for the pass, and commit its results to the running requests."""
        layouts, scores, events, seconds = flight.layouts, flight.scores, flight.events, flight.seconds
        # Here, so that the wait is not counted as the time of the first reader.
        with timed(seconds, "prefill" if self._feeds else "score"):
            for found in scores.values():
                found.wait()
        with timed(seconds, "verify"):
            steps = {seq.id: self._verify(seq, layouts[seq.id], scores[seq.id]) for seq in self.running}
        with timed(seconds, "keep"):
            kept = [(seq, step) for seq in self.running if (step := steps[seq.id]) is not None]
            self.target.keep([step.kept for _, step in kept], [slot_of(seq) for seq, _ in kept])
            behind = [seq for seq, step in kept if len(step.kept) < len(step.tokens)]  # tokens without cache entries
            self.target.feed([seq.tokens[:-1] for seq in behind], [slot_of(seq) for seq in behind])
        with timed(seconds, "draft"):  # learning from a pass counts as drafting
            for seq, step in kept:
                self._observe(seq, step, scores[seq.id])
        size = len(self.running)
        if not self._feeds:  # no policy expects the time of a prompt
            self._report(PassReport(seconds, size, sum(map(len, layouts.values()))))
        for seq in list(self.running):
            seq.stats.spend(seconds)
            events.append(Event(seq, steps[seq.id], scores[seq.id] if with_scores else None, seconds, size))
            seq.joins = False
            if seq.finished:
                self.scheduler.leave(seq)
        return events

    @property
    def _feeds(self) -> bool:
        """Whether the pass runs parts of prompts, too."""
        return any(seq.joins for seq in self.running)

    def _draft(self, failed: list[Sequence]) -> dict[int, Layout]:
        """Return the layout to score for each running sequence. Sequences with the same drafter draft together."""
        layouts: dict[int, Layout] = {}
        budgets: dict[int, Budget] = {}

        def grant(group: list[Sequence]) -> None:
            for seq, budget in zip(group, group[0].policy.budgets(group, len(self.running)), strict=True):
                layouts[seq.id] = seq.drafter.root(seq)
                room = 0 if seq.joins else min(seq.room - 1, self.target.max_length - len(seq.tokens))
                budgets[seq.id] = budget.within(room, self.target.trees)

        def propose(group: list[Sequence]) -> None:
            try:
                drafted = group[0].drafter.propose_batch(group, [budgets[seq.id] for seq in group])
            except (RequestFailed, torch.OutOfMemoryError):
                return  # without a draft the pass is slower, but the answer is the same
            layouts.update({seq.id: layout for seq, layout in zip(group, drafted, strict=True)})

        def select(group: list[Sequence]) -> None:
            given = [layouts[seq.id] for seq in group], [budgets[seq.id] for seq in group]
            kept = group[0].policy.select(group, *given, len(self.running))
            layouts.update({seq.id: layout for seq, layout in zip(group, kept, strict=True)})

        def prepare(group: list[Sequence]) -> None:
            for seq in group:
                layouts[seq.id] = seq.verifier.prepare(seq, layouts[seq.id])

        self._guarded(_grouped(self.running, lambda seq: seq.policy), grant, failed)
        drafting = [seq for seq in self.running if budgets[seq.id].depth and budgets[seq.id].nodes]
        self._guarded(_grouped(drafting, lambda seq: seq.drafter), propose, failed)
        self._guarded(_grouped(self.running, lambda seq: seq.policy), select, failed)
        self._guarded([[seq] for seq in self.running], prepare, failed)
        return layouts

    def _guarded(self, groups: list[list[Sequence]], work: Work, failed: list[Sequence]) -> None:
        """Run `work` on each group; if it raises an error, the requests of that group fail."""
        for group in groups:
            try:
                work(group)
            except Exception as error:
                for seq in group:
                    self.scheduler.fail(seq, error)
                failed += group

    def _score(self, layouts: dict[int, Layout], failed: list[Sequence]) -> dict[int, Scores]:
        """Return the scores by sequence. If memory runs out, drop the drafts, then make a request wait or fail."""
        bare = False
        while self.running:
            try:
                slots, picks = [slot_of(seq) for seq in self.running], [seq.verifier.pick(seq) for seq in self.running]
                found = self.target.score([layouts[seq.id] for seq in self.running], slots, picks=picks)
                return {seq.id: scores for seq, scores in zip(self.running, found, strict=True)}
            except (CacheFull, torch.OutOfMemoryError) as error:
                if bare:
                    slot = error.slot if isinstance(error, CacheFull) else self.running[-1].slot
                    seq = next(seq for seq in self.running if seq.slot == slot)
                    if not self.scheduler.make_room(seq, error):
                        failed.append(seq)
                for seq in self.running:
                    layouts[seq.id] = seq.verifier.prepare(seq, seq.drafter.root(seq))
                bare = True
            except Exception as error:
                failed += self._culprits(layouts) or [event.seq for event in self.abort(error)]
        return {}

    def _culprits(self, layouts: dict[int, Layout]) -> list[Sequence]:
        """Find the requests that break a pass by scoring each alone; they fail."""
        found: list[Sequence] = []

        def alone(group: list[Sequence]) -> None:
            (seq,) = group
            self.target.score([layouts[seq.id]], [slot_of(seq)], picks=[seq.verifier.pick(seq)])

        self._guarded([[seq] for seq in self.running], alone, found)
        return found

    def _run_ahead(self, layouts: dict[int, Layout]) -> None:
        """Launch the next pass too if its input is known: no request drafts, and no code needs this result first."""
        ahead = self.target.run_ahead
        left = [seq for seq in self.running if seq.room > 1]
        if ahead is None or not left or not all(len(layouts[seq.id]) == 1 and seq.policy.idle(seq) for seq in left):
            return
        picks = [seq.verifier.pick(seq) for seq in left]
        if not any(_reads_logits(seq, pick) for seq, pick in zip(left, picks, strict=True)):
            ahead.begin([slot_of(seq) for seq in left], picks)

    def _verify(self, seq: Sequence, layout: Layout, scores: Scores) -> Step | None:
        start = len(seq.tokens)
        try:
            return seq.verifier.verify(seq, layout, scores)
        except RequestFailed as error:
            seq.fail(str(error))
            tokens = seq.tokens[start:]  # tokens committed before the failure were found in the tree
            path = layout.walk([layout.tokens[0], *tokens])
            return Step(layout, path, tokens, path) if tokens else None
        except Exception as error:  # such as an error of a logits processor
            seq.fail(f"{type(error).__name__}: {error}", error)
            return None

    def _observe(self, seq: Sequence, step: Step, scores: Scores) -> None:
        seq.stats.add(step)
        seq.drafted += [True] * step.accepted + [False] * (len(step.tokens) - step.accepted)
        try:
            seq.policy.observe(seq, step)
            seq.drafter.observe(seq, step, scores)
        except Exception as error:
            seq.fail(f"{type(error).__name__}: {error}", error)

    def _report(self, report: PassReport) -> None:
        for group in _grouped(self.running, lambda seq: seq.policy):
            try:
                group[0].policy.after_pass(report)
            except Exception as error:
                for seq in group:
                    seq.fail(f"{type(error).__name__}: {error}", error)


def _reads_logits(seq: Sequence, pick: Pick | None) -> bool:
    """Return whether the host reads the logits of this request, which the next pass would overwrite."""
    return seq.limits.logprobs is not None and (pick is None or pick.logprobs is None)


def _notify(event: Event) -> None:
    if event.seq.listener is not None:
        event.seq.listener(event)


def _grouped(seqs: list[Sequence], shared: Callable[[Sequence], object]) -> list[list[Sequence]]:
    """Group the sequences that share an object."""
    groups: dict[int, list[Sequence]] = {}
    for seq in seqs:
        groups.setdefault(id(shared(seq)), []).append(seq)
    return list(groups.values())
