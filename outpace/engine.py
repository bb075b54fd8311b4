"""Engine: the loop. Guess a tree, let the target choose at every node in one pass, keep what it chose.

    tree = policy.prune(drafter.propose(seq, policy.budget(seq)))
    scores = target.score(tree)
    step = verifier.verify(seq, tree, scores)
    target.keep(step.kept)

It runs over a ragged batch: rows of different lengths, methods and sampling settings, which join and leave at any step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from outpace.errors import CacheFull, RequestFailed, UsageError
from outpace.models.base import LM, Scores
from outpace.models.memory import Memory
from outpace.sequence import Sequence, Step
from outpace.stats import timed
from outpace.tree import ROOT, Budget, Tree


@dataclass(frozen=True)
class Event:
    """What happened to one sequence: a pass, or, without one, a failure or a cancellation."""

    seq: Sequence
    step: Step | None = None
    scores: Scores | None = None  # of the nodes of the step's tree; an engine that overlaps has none to show
    seconds: dict[str, float] = field(default_factory=dict)  # of the whole pass: prefill, draft, score, verify, keep
    rows: int = 1  # requests that shared the pass


class Flight(NamedTuple):
    """A pass on its way."""

    trees: dict[int, Tree]
    scores: dict[int, Scores]
    events: list[Event]  # of requests that left before it
    seconds: dict[str, float]


class Engine:
    """Requests go in through `submit`; each `step` is one pass of the target over all that run."""

    def __init__(self, target: LM, max_rows: int = 16, overlap: bool = True):
        self.target = target
        self.max_rows = max_rows
        # What is done with the last pass is done while the next one runs, if the target can; that one writes its
        # scores where the last one's were.
        self.overlap = overlap and target.asynchronous
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.full = False  # memory ran out: nobody is let in before somebody leaves

    def submit(self, seq: Sequence) -> None:
        """Queue a request; wrong ones are refused here, before anything runs."""
        if len(seq.tokens) > self.target.context:
            raise UsageError(f"the prompt has {len(seq.tokens)} tokens and the model holds {self.target.context}")
        seq.target, seq.vocab = self.target, self.target.vocab
        if seq.verifier.needs_trees and not self.target.trees:
            name = type(seq.verifier).__name__
            raise UsageError(f"{name} needs a model that can score trees, and this one scores only chains")
        seq.drafter.open(seq)
        _taps(seq)
        self.waiting.append(seq)

    def run(self) -> Generator[Event]:
        """Step until every request has ended; stopping early gives all rows back."""
        events: list[Event] = []
        try:
            while self.waiting or self.running:
                flight = self._begin()
                if self.overlap:  # the pass is on its way: now there is time
                    yield from (replace(event, scores=None) for event in events)
                    events = self._end(flight)
                else:
                    yield from self._end(flight)
            yield from (replace(event, scores=None) for event in events)
        finally:
            for seq in [*self.waiting, *self.running]:
                self.cancel(seq)

    def cancel(self, seq: Sequence) -> None:
        """End a request now; what it has so far stays readable."""
        if seq.finished:
            return
        seq.finish_reason = "cancelled"
        if seq in self.waiting:
            self.waiting.remove(seq)
        self._leave(seq)

    def step(self) -> list[Event]:
        """One pass over every running request."""
        return self._end(self._begin())

    def _begin(self) -> Flight:
        """Guess, and send the pass off."""
        seconds: dict[str, float] = {}
        with timed(seconds, "prefill"):
            events = self._admit()
        with timed(seconds, "draft"):
            trees = self._draft()
        with timed(seconds, "score"):
            scores, failed = self._score(trees)
            if self.overlap:
                self._ahead(trees)
        return Flight(trees, scores, [*events, *(Event(seq) for seq in failed)], seconds)

    def _end(self, flight: Flight) -> list[Event]:
        """Wait for the pass, and commit what it says to the requests that still run."""
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
                self._leave(seq)
        return events

    def _admit(self) -> list[Event]:
        """Let requests in while there are rows and memory; one that does not fit beside the others waits for them."""
        failed = []
        while self.waiting and len(self.running) < self.max_rows and not (self.full and self.running):
            seq = self.waiting.popleft()
            memory = self.target.memory(len(seq.tokens) + seq.room)
            if memory is not None and not memory.fits:
                seq.fail(f"the request does not fit into memory: {memory}; {_advice(memory, len(seq.tokens))}")
                failed.append(Event(seq))
                continue
            self.running.append(seq)
            try:
                seq.row = self.target.acquire(seq.tokens[:-1], _taps(seq))
                self.target.sync([seq.tokens[:-1]], [seq.row])
            except (CacheFull, torch.OutOfMemoryError) as error:
                if not self._make_room(seq, error):
                    failed.append(Event(seq))
        return failed

    def _draft(self) -> dict[int, Tree]:
        """A tree for each running sequence; rows that share a drafter are drafted together."""
        trees = {seq.id: Tree([seq.tokens[-1]]) for seq in self.running}
        budgets: dict[int, Budget] = {}
        for group in _grouped(self.running, lambda seq: seq.policy):
            for seq, budget in zip(group, group[0].policy.budgets(group, len(self.running)), strict=True):
                room = min(seq.room - 1, self.target.context - len(seq.tokens))
                budgets[seq.id] = budget.within(room, self.target.trees)
        asked = [seq for seq in self.running if budgets[seq.id].depth and budgets[seq.id].nodes]
        for group in _grouped(asked, lambda seq: seq.drafter):
            try:
                drafted = group[0].drafter.propose_batch(group, [budgets[seq.id] for seq in group])
            except (RequestFailed, torch.OutOfMemoryError):
                continue  # a draft that cannot be made costs speed, never the answer
            trees |= {seq.id: tree for seq, tree in zip(group, drafted, strict=True)}
        self._prune(trees, budgets)
        return {seq.id: seq.verifier.prepare(seq, trees[seq.id]) for seq in self.running}

    def _prune(self, trees: dict[int, Tree], budgets: dict[int, Budget]) -> None:
        """Leave of each tree what its policy has verified; a policy sees all of its rows at once."""
        for group in _grouped(self.running, lambda seq: seq.policy):
            given = [trees[seq.id] for seq in group], [budgets[seq.id] for seq in group]
            kept = group[0].policy.prune(group, *given, len(self.running))
            trees |= {seq.id: tree for seq, tree in zip(group, kept, strict=True)}

    def _score(self, trees: dict[int, Tree]) -> tuple[dict[int, Scores], list[Sequence]]:
        """Scores by sequence. When memory runs out the guesses go first, then a request has to wait, or to fail."""
        failed: list[Sequence] = []
        bare = False
        while self.running:
            try:
                rows, picks = [_row(seq) for seq in self.running], [seq.verifier.pick(seq) for seq in self.running]
                found = self.target.score([trees[seq.id] for seq in self.running], rows, picks=picks)
                return {seq.id: scores for seq, scores in zip(self.running, found, strict=True)}, failed
            except (CacheFull, torch.OutOfMemoryError) as error:
                if bare:
                    row = error.row if isinstance(error, CacheFull) else self.running[-1].row
                    seq = next(seq for seq in self.running if seq.row == row)
                    if not self._make_room(seq, error):
                        failed.append(seq)
                for seq in self.running:
                    trees[seq.id] = seq.verifier.prepare(seq, Tree([seq.tokens[-1]]))
                bare = True
        return {}, failed

    def _ahead(self, trees: dict[int, Tree]) -> None:
        """Begin the next pass, too, where it is known: nobody guesses, and no one looks at what this one says."""
        on = [seq for seq in self.running if seq.room > 1]
        bare = all(len(trees[seq.id]) == 1 and seq.limits.logprobs is None and seq.policy.rests(seq) for seq in on)
        if on and bare:
            self.target.ahead([_row(seq) for seq in on], [seq.verifier.pick(seq) for seq in on])

    def _make_room(self, seq: Sequence, error: Exception) -> bool:
        """Take a request out. While others run it waits until one of them ends, and goes on then; False: it failed."""
        if len(self.running) == 1:
            seq.fail(str(error))
            self._leave(seq)
            return False
        self.running.remove(seq)
        self._free(seq)
        self.waiting.appendleft(seq)
        self.full = True
        return True

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

    def _observe(self, seq: Sequence, step: Step, scores: Scores) -> None:
        seq.hidden = self.target.hidden(_row(seq))
        seq.stats.add(step)
        seq.drafted += [True] * step.accepted + [False] * (len(step.tokens) - step.accepted)
        seq.policy.observe(seq, step)
        seq.drafter.observe(seq, step, scores)

    def _leave(self, seq: Sequence) -> None:
        if seq in self.running:
            self.running.remove(seq)
        seq.drafter.close(seq)
        self._free(seq)
        self.full = False

    def _free(self, seq: Sequence) -> None:
        if seq.row is not None:
            self.target.release(seq.row)
            seq.row = None


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


def _advice(memory: Memory, prompt: int) -> str:
    most = memory.available // memory.token - prompt
    return f"lower max_tokens to {most}" if most > 0 else f"the prompt alone has {prompt} tokens"


def _taps(seq: Sequence) -> tuple[int, ...]:
    if seq.drafter.taps and seq.verifier.taps and seq.drafter.taps != seq.verifier.taps:
        raise UsageError("this method and this verifier read different hidden states and cannot be combined")
    return seq.drafter.taps or seq.verifier.taps
