"""Scheduler: decides which requests run. A request waits, gets a slot of the target's cache, and frees it at its end.
While other requests run, prompts are fed in chunks (chunked prefill), so that a long prompt does not stop the others.
"""

from __future__ import annotations

from collections import deque
from itertools import accumulate, compress
from time import perf_counter

import torch

from outpace.core.lm import LM
from outpace.core.sequence import Sequence
from outpace.errors import CacheFull, UsageError


class Scheduler:
    """Holds the queue of requests and the slots of running requests, and decides what happens when memory runs out."""

    def __init__(self, target: LM, max_batch: int):
        self.target = target
        self.max_batch = max_batch
        self.waiting: deque[Sequence] = deque()
        self.feeding: deque[Sequence] = deque()  # requests with a slot that does not hold the whole prompt yet
        self.running: list[Sequence] = []
        self.full = False  # memory ran out: admit no request until another one ends
        self.preemptions = 0  # how often a request gave up its slot because of that

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.feeding or self.running)

    @property
    def all(self) -> list[Sequence]:
        return [*self.waiting, *self.feeding, *self.running]

    def submit(self, seq: Sequence) -> None:
        """Queue a request, or refuse it before anything runs."""
        if len(seq.tokens) > self.target.max_length:
            raise UsageError(f"the prompt has {len(seq.tokens)} tokens, but the model holds {self.target.max_length}")
        seq.target, seq.vocab = self.target, self.target.vocab
        if seq.verifier.needs_trees and not self.target.trees:
            raise UsageError(f"{type(seq.verifier).__name__} scores trees, which this model cannot: it scores chains")
        seq.drafter.open(seq)
        _taps(seq)
        self.waiting.append(seq)

    def admit(self) -> list[Sequence]:
        """Admit waiting requests while slots and memory last, and feed prompts; return the requests that failed.

        A request that does not fit next to the running ones waits for them.
        """
        failed = []
        while self.waiting and len(self.running) + len(self.feeding) < self.max_batch and not self._must_wait:
            seq = self.waiting.popleft()
            need = None if self.target.weights is None else self.target.weights.memory(len(seq.tokens) + seq.room)
            if need is not None and need.cache > need.available:  # a limit is met when the text is that long
                seq.fail(f"the request does not fit into memory: {need}; {need.advice(len(seq.tokens))}")
                self.leave(seq)
                failed.append(seq)
                continue
            self.feeding.append(seq)
            seq.started = perf_counter()
            try:
                seq.slot = self.target.acquire(seq.tokens[:-1], context=seq.context, taps=_taps(seq))
            except Exception as error:
                self._failed(seq, error, failed)
        self._feed(failed)
        return failed

    @property
    def _must_wait(self) -> bool:
        return self.full and bool(self.running or self.feeding)

    def _feed(self, failed: list[Sequence]) -> None:
        """Feed prompts in order of arrival: some tokens a step, or the first prompts whole if no request runs."""
        limit, before = self.target.prompt_tokens, accumulate((len(seq.tokens) for seq in self.feeding), initial=0)
        group = [seq for seq, tokens in zip(self.feeding, before, strict=False) if tokens < limit]
        self._feed_group(group, limit if self.running else None, failed)

    def _feed_group(self, group: list[Sequence], limit: int | None, failed: list[Sequence]) -> None:
        """Feed prompts together; after an error each one alone, to find the request that it belongs to."""
        try:
            done = self.target.feed([seq.tokens[:-1] for seq in group], list(map(slot_of, group)), limit, defer=True)
        except Exception as error:
            if len(group) == 1:
                return self._failed(group[0], error, failed)
            for seq in group:
                self._feed_group([seq], limit, failed)
        else:
            for seq in compress(group, done):
                self.feeding.remove(seq)
                self.running.append(seq)
                seq.joins = self.target.late_prompts
                seq.cached = self.target.reused(slot_of(seq))

    def _failed(self, seq: Sequence, error: Exception, failed: list[Sequence]) -> None:
        """Handle a failed admission: the request waits if memory is short and other requests will free some."""
        if not isinstance(error, CacheFull | torch.OutOfMemoryError):
            self.fail(seq, error)
            failed.append(seq)
        elif not self.make_room(seq, error):
            failed.append(seq)

    def make_room(self, seq: Sequence, error: Exception) -> bool:
        """Let a request wait until another one ends. If it is alone in the batch, it fails, and this returns False."""
        if len(self.running) + len(self.feeding) == 1:
            seq.fail(str(error))
            self.leave(seq)
            return False
        (self.running if seq in self.running else self.feeding).remove(seq)
        self.preemptions += seq.slot is not None
        self._free(seq)
        self.waiting.appendleft(seq)
        self.full = True
        return True

    def fail(self, seq: Sequence, error: Exception) -> None:
        """End a request with an error of its own code or of Outpace; its caller gets the original error."""
        seq.fail(f"{type(error).__name__}: {error}", error)
        self.leave(seq)

    def cancel(self, seq: Sequence) -> None:
        """End a request now; its tokens so far stay readable."""
        if not seq.finished:
            seq.finish_reason = "cancelled"
            self.leave(seq)

    def leave(self, seq: Sequence) -> None:
        """Remove a request that has ended, and free its slot."""
        for queue in (self.running, self.waiting, self.feeding):
            if seq in queue:
                queue.remove(seq)
        self._free(seq)
        self.full = False
        try:
            seq.drafter.close(seq)
        except Exception as error:
            seq.fail(f"{type(error).__name__}: {error}", error)

    def _free(self, seq: Sequence) -> None:
        if seq.slot is not None:
            self.target.release(seq.slot)
            seq.slot = None


def slot_of(seq: Sequence) -> int:
    """Return the slot of a request that has one."""
    assert seq.slot is not None, "a request has a slot while it is fed and while it runs"
    return seq.slot


def _taps(seq: Sequence) -> tuple[int, ...]:
    if seq.drafter.taps and seq.verifier.taps and seq.drafter.taps != seq.verifier.taps:
        raise UsageError("this method and this verifier read different hidden states and cannot be combined")
    return seq.drafter.taps or seq.verifier.taps
