"""Engine: the loop. Guess a tree, let the target choose at every node in one pass, keep what it chose.

    tree = policy.prune(drafter.propose(seq, policy.budget(seq)))
    scores = target.score(tree)
    step = verifier.verify(seq, tree, scores)
    target.keep(step.kept)

It runs over a ragged batch: rows of different lengths, methods and sampling settings, which join and leave at any step.
Code of one request that raises an error ends that request, and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from outpace.core.lm import LM, Scores
from outpace.core.scheduler import Scheduler
from outpace.core.sequence import Sequence, Step
from outpace.core.stats import timed
from outpace.core.tree import ROOT, Budget, Tree
from outpace.errors import CacheFull, RequestFailed


@dataclass(frozen=True)
class Event:
    """What happened to one sequence: a pass, or, without one, a failure or a cancellation."""

    seq: Sequence
    step: Step | None = None
    scores: Scores | None = None  # of the nodes of the step's tree; passes that overlap have none to show
    seconds: dict[str, float] = field(default_factory=dict)  # of the whole pass: prefill, draft, score, verify, keep
    rows: int = 1  # requests that shared the pass


class PassInFlight(NamedTuple):
    """A pass on its way."""

    trees: dict[int, Tree]
    scores: dict[int, Scores]
    events: list[Event]  # of requests that left before it
    seconds: dict[str, float]


class Engine:
    """Requests go in through `submit`; each `step` is one pass of the target over all that run. It knows no threads."""

    def __init__(self, target: LM, max_rows: int = 16, overlap: bool = True):
        self.target = target
        self.scheduler = Scheduler(target, max_rows)
        self._overlap = overlap and target.asynchronous
        self._late: list[Event] = []  # of the last pass, to be looked at while the next one runs

    @property
    def idle(self) -> bool:
        return not (self.scheduler.waiting or self.scheduler.running or self._late)

    @property
    def running(self) -> list[Sequence]:
        return self.scheduler.running

    @property
    def overlaps(self) -> bool:
        """Whether the host deals with one pass while the next one runs. That one reuses its output buffers, so events
        then carry no scores."""
        return self._overlap and not any(seq.watched for seq in self.running)

    def submit(self, seq: Sequence) -> None:
        """Queue a request, or refuse it before anything runs."""
        self.scheduler.submit(seq)

    def cancel(self, seq: Sequence) -> None:
        """End a request now; what it has so far stays readable, and nothing more is heard of it."""
        self.scheduler.cancel(seq)
        self._late = [event for event in self._late if event.seq is not seq]

    def turn(self, deliver: Callable[[Event], object]) -> None:
        """One pass over every running request, and its events; with overlap, the events of the pass before."""
        flight = self._begin()
        late, self._late = self._late, []
        for event in late:  # the pass is on its way: now there is time
            deliver(event)
        overlaps = self.overlaps
        events = self._end(flight)
        if overlaps:
            self._late = [replace(event, scores=None) for event in events]
        else:
            for event in events:
                deliver(event)

    def serve(self) -> bool:
        """One pass, whose events go to the listeners of the requests; False when all of them have ended."""
        try:
            self.turn(_tell)
        except Exception as error:
            late, self._late = self._late, []
            for event in [*late, *self.abort(error)]:
                _tell(event)
        return not self.idle

    def run(self) -> Generator[Event]:
        """Step until every request has ended; stopping early gives all rows back."""
        try:
            while not self.idle:
                events: list[Event] = []
                self.turn(events.append)
                yield from (event for event in events if event.seq.finish_reason != "cancelled")
        finally:
            for seq in [*self.scheduler.waiting, *self.running]:
                self.cancel(seq)
            self._late = []

    def step(self) -> list[Event]:
        """One pass over every running request."""
        return self._end(self._begin())

    def abort(self, error: Exception) -> list[Event]:
        """A pass broke off for a reason that belongs to no request: those that were in it fail."""
        failed = list(self.running)
        for seq in failed:
            self.scheduler.fail(seq, error)
        self.target.clear()
        return [Event(seq) for seq in failed]

    def _begin(self) -> PassInFlight:
        """Guess, and send the pass off."""
        seconds: dict[str, float] = {}
        with timed(seconds, "prefill"):
            failed = self.scheduler.admit()
        with timed(seconds, "draft"):
            trees = self._draft(failed)
        with timed(seconds, "score"):
            scores = self._score(trees, failed)
            if self.overlaps:
                self._ahead(trees)
        return PassInFlight(trees, scores, [Event(seq) for seq in failed], seconds)

    def _end(self, flight: PassInFlight) -> list[Event]:
        """Wait for the pass, and commit what it says to the requests that run."""
        trees, scores, events, seconds = flight.trees, flight.scores, flight.events, flight.seconds
        with timed(seconds, "score"):
            _finish(scores)
        with timed(seconds, "verify"):
            steps = {seq.id: self._verify(seq, trees[seq.id], scores[seq.id]) for seq in self.running}
        with timed(seconds, "keep"):
            kept = [(seq, step) for seq in self.running if (step := steps[seq.id]) is not None]
            self.target.keep([step.kept for _, step in kept], [_row(seq) for seq, _ in kept])
        with timed(seconds, "draft"):  # to learn from a pass is a part of the price of guessing
            for seq, step in kept:
                self._observe(seq, step, scores[seq.id])
        rows = len(self.running)
        for seq in list(self.running):
            for name, spent in seconds.items():
                seq.stats.seconds[name] = seq.stats.seconds.get(name, 0.0) + spent
            events.append(Event(seq, steps[seq.id], scores[seq.id], seconds, rows))
            if seq.finished:
                self.scheduler.leave(seq)
        return events

    def _draft(self, failed: list[Sequence]) -> dict[int, Tree]:
        """A tree for each running sequence; those that share a drafter are drafted together."""
        trees = {seq.id: Tree([seq.tokens[-1]]) for seq in self.running}
        budgets: dict[int, Budget] = {}

        def grant(group: list[Sequence]) -> None:
            for seq, budget in zip(group, group[0].policy.budgets(group, len(self.running)), strict=True):
                room = min(seq.room - 1, self.target.context - len(seq.tokens))
                budgets[seq.id] = budget.within(room, self.target.trees)

        def propose(group: list[Sequence]) -> None:
            try:
                drafted = group[0].drafter.propose_batch(group, [budgets[seq.id] for seq in group])
            except (RequestFailed, torch.OutOfMemoryError):
                return  # a draft that cannot be made costs speed, never the answer
            trees.update({seq.id: tree for seq, tree in zip(group, drafted, strict=True)})

        def prune(group: list[Sequence]) -> None:
            given = [trees[seq.id] for seq in group], [budgets[seq.id] for seq in group]
            kept = group[0].policy.prune(group, *given, len(self.running))
            trees.update({seq.id: tree for seq, tree in zip(group, kept, strict=True)})

        def prepare(group: list[Sequence]) -> None:
            for seq in group:
                trees[seq.id] = seq.verifier.prepare(seq, trees[seq.id])

        self._guarded(_grouped(self.running, lambda seq: seq.policy), grant, failed)
        asked = [seq for seq in self.running if budgets[seq.id].depth and budgets[seq.id].nodes]
        self._guarded(_grouped(asked, lambda seq: seq.drafter), propose, failed)
        self._guarded(_grouped(self.running, lambda seq: seq.policy), prune, failed)
        self._guarded([[seq] for seq in self.running], prepare, failed)
        return trees

    def _guarded(
        self, groups: list[list[Sequence]], work: Callable[[list[Sequence]], None], failed: list[Sequence]
    ) -> None:
        """Work on each group; where it raises an error, the requests of that group fail."""
        for group in groups:
            try:
                work(group)
            except Exception as error:
                for seq in group:
                    self.scheduler.fail(seq, error)
                failed += group

    def _score(self, trees: dict[int, Tree], failed: list[Sequence]) -> dict[int, Scores]:
        """Scores by sequence. When memory runs out the guesses go first, then a request has to wait, or to fail."""
        bare = False
        while self.running:
            try:
                rows, picks = [_row(seq) for seq in self.running], [seq.verifier.pick(seq) for seq in self.running]
                found = self.target.score([trees[seq.id] for seq in self.running], rows, picks=picks)
                return {seq.id: scores for seq, scores in zip(self.running, found, strict=True)}
            except (CacheFull, torch.OutOfMemoryError) as error:
                if bare:
                    row = error.row if isinstance(error, CacheFull) else self.running[-1].row
                    seq = next(seq for seq in self.running if seq.row == row)
                    if not self.scheduler.make_room(seq, error):
                        failed.append(seq)
                for seq in self.running:
                    trees[seq.id] = seq.verifier.prepare(seq, Tree([seq.tokens[-1]]))
                bare = True
            except Exception as error:
                failed += self._culprits(trees) or [event.seq for event in self.abort(error)]
        return {}

    def _culprits(self, trees: dict[int, Tree]) -> list[Sequence]:
        """Requests with which a pass breaks off, found by scoring each alone; they fail."""
        found: list[Sequence] = []

        def alone(group: list[Sequence]) -> None:
            (seq,) = group
            self.target.score([trees[seq.id]], [_row(seq)], picks=[seq.verifier.pick(seq)])

        self._guarded([[seq] for seq in self.running], alone, found)
        return found

    def _ahead(self, trees: dict[int, Tree]) -> None:
        """Begin the next pass, too, where it is known: nobody guesses, and no one looks at what this one says."""
        on = [seq for seq in self.running if seq.room > 1]
        bare = all(len(trees[seq.id]) == 1 and seq.limits.logprobs is None and seq.policy.rests(seq) for seq in on)
        if on and bare:
            self.target.ahead([_row(seq) for seq in on], [seq.verifier.pick(seq) for seq in on])

    def _verify(self, seq: Sequence, tree: Tree, scores: Scores) -> Step | None:
        seq.hidden = self.target.hidden(_row(seq))
        start = len(seq.tokens)
        try:
            return seq.verifier.verify(seq, tree, scores)
        except RequestFailed as error:
            seq.fail(str(error))
            tokens = seq.tokens[start:]  # what was committed before it failed was found in the tree
            path = tree.walk([tree.tokens[ROOT], *tokens])
            return Step(tree, path, tokens, path) if tokens else None
        except Exception as error:  # of a logits processor, say
            seq.fail(f"{type(error).__name__}: {error}", error)
            return None

    def _observe(self, seq: Sequence, step: Step, scores: Scores) -> None:
        seq.hidden = self.target.hidden(_row(seq))
        seq.stats.add(step)
        seq.drafted += [True] * step.accepted + [False] * (len(step.tokens) - step.accepted)
        try:
            seq.policy.observe(seq, step)
            seq.drafter.observe(seq, step, scores)
        except Exception as error:
            seq.fail(f"{type(error).__name__}: {error}", error)


def _tell(event: Event) -> None:
    if event.seq.listener is not None:
        event.seq.listener(event)


def _grouped(seqs: list[Sequence], shared: Callable[[Sequence], object]) -> list[list[Sequence]]:
    """Those that share an object together."""
    groups: dict[int, list[Sequence]] = {}
    for seq in seqs:
        groups.setdefault(id(shared(seq)), []).append(seq)
    return list(groups.values())


def _row(seq: Sequence) -> int:
    assert seq.row is not None, "a running sequence has a row"
    return seq.row


def _finish(scores: dict[int, Scores]) -> None:
    """Wait for the device, so that the time of a pass is not counted as that of whoever reads its result first."""
    for found in scores.values():
        if found.chosen is not None:
            found.chosen.wait()  # not for the next pass, which may have begun
        elif found.logits.is_cuda:
            torch.cuda.synchronize()
