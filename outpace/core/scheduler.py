"""Scheduler: which requests run. They wait, get a row of the target's cache, and give it back when they end."""

from __future__ import annotations

from collections import deque

import torch

from outpace.core.lm import LM, MemoryNeed
from outpace.core.sequence import Sequence
from outpace.errors import CacheFull, UsageError


class Scheduler:
    """The queue of requests, the rows of those that run, and what happens when memory runs out."""

    def __init__(self, target: LM, max_rows: int = 16):
        self.target = target
        self.max_rows = max_rows
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.full = False  # memory ran out: no request is admitted before another one ends

    def submit(self, seq: Sequence) -> None:
        """Queue a request, or refuse it before anything runs."""
        if len(seq.tokens) > self.target.context:
            raise UsageError(f"the prompt has {len(seq.tokens)} tokens and the model holds {self.target.context}")
        seq.target, seq.vocab = self.target, self.target.vocab
        if seq.verifier.needs_trees and not self.target.trees:
            name = type(seq.verifier).__name__
            raise UsageError(f"{name} needs a model that can score trees, and this one scores only chains")
        seq.drafter.open(seq)
        _taps(seq)
        self.waiting.append(seq)

    def admit(self) -> list[Sequence]:
        """Admit requests while there are rows and memory; returns those that failed.

        A request that does not fit beside the running ones waits for them.
        """
        failed = []
        while self.waiting and len(self.running) < self.max_rows and not (self.full and self.running):
            seq = self.waiting.popleft()
            memory = self.target.memory(len(seq.tokens) + seq.room)
            if memory is not None and not memory.fits:
                seq.fail(f"the request does not fit into memory: {memory}; {_advice(memory, len(seq.tokens))}")
                self.leave(seq)
                failed.append(seq)
                continue
            self.running.append(seq)
            try:
                seq.row = self.target.acquire(seq.tokens[:-1], _taps(seq))
                self.target.sync([seq.tokens[:-1]], [seq.row])
            except (CacheFull, torch.OutOfMemoryError) as error:
                if not self.make_room(seq, error):
                    failed.append(seq)
            except Exception as error:
                self.fail(seq, error)
                failed.append(seq)
        return failed

    def make_room(self, seq: Sequence, error: Exception) -> bool:
        """Let a request wait until another one has ended; False: it was alone in the batch, and failed."""
        if len(self.running) == 1:
            seq.fail(str(error))
            self.leave(seq)
            return False
        self.running.remove(seq)
        self._free(seq)
        self.waiting.appendleft(seq)
        self.full = True
        return True

    def fail(self, seq: Sequence, error: Exception) -> None:
        """End a request with an error of its own code or of ours; its caller gets to see it as it is."""
        seq.fail(f"{type(error).__name__}: {error}", error)
        self.leave(seq)

    def cancel(self, seq: Sequence) -> None:
        """End a request now; what it has so far stays readable."""
        if not seq.finished:
            seq.finish_reason = "cancelled"
            self.leave(seq)

    def leave(self, seq: Sequence) -> None:
        """A request has ended: its row is free again."""
        if seq in self.running:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        self._free(seq)
        self.full = False
        try:
            seq.drafter.close(seq)
        except Exception as error:
            seq.fail(f"{type(error).__name__}: {error}", error)

    def _free(self, seq: Sequence) -> None:
        if seq.row is not None:
            self.target.release(seq.row)
            seq.row = None


def _advice(memory: MemoryNeed, prompt: int) -> str:
    most = memory.available // memory.token - prompt
    return f"lower max_tokens to {most}" if most > 0 else f"the prompt alone has {prompt} tokens"


def _taps(seq: Sequence) -> tuple[int, ...]:
    if seq.drafter.taps and seq.verifier.taps and seq.drafter.taps != seq.verifier.taps:
        raise UsageError("this method and this verifier read different hidden states and cannot be combined")
    return seq.drafter.taps or seq.verifier.taps
