"""Backoff: decides which requests draft in a pass, and which pause because their draft tokens did not pay.

Each pause of a request is longer than the last. In a large batch the first one is long already, because one pass there
shows as many draft tokens as many passes of a single request. One request that drafts can slow down the pass of all,
so pauses end in the same passes. In this example the drafts (D) of A and B never pay, and B joins in pass 5:

    pass     1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18 ... 31 32 33
    A        D  D  .  D  .  .  .  D  .  .  .  .  .  .  .  D  .  . ...  .  D  .
    B                    D  D  .  D  .  .  .  .  .  .  .  D  .  . ...  .  D  .

    A pauses for 1 (until pass 2), 3 (until 4), 7 (until 8), 15 (until 16) and 31 passes (until 32)

A pause is one less than a power of two, because 2^k - 1 paused passes and the pass that drafts again make a period of
2^k passes. Pauses end only at multiples of their period, and a multiple of 16 is also one of 8, 4 and 2. So requests
with long pauses draft in passes in which requests with shorter pauses draft too, instead of slowing down other passes.
To end there, a pause p skips from p // 2 to p + p // 2 passes: A, which started in step, skips 0, 1, 3, 7 and 15.

While nothing pays, only a sample of a large batch drafts, in rotation. If its draft tokens pay, all requests draft.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

SAMPLE = 8  # requests that draft as a sample of a large batch
LONGEST = 128  # upper limit of a pause, in passes


@dataclass
class RequestPause:
    """The pause of one request."""

    left: int = 0  # passes until it drafts again
    length: int = 0  # of the last pause in passes; 0: its last draft paid, or it has never paused
    since: int = 0  # number of the pass in which the pause began


class Backoff:
    """The pauses of all requests under one policy."""

    def __init__(self) -> None:
        self._passes = 0  # number of the current pass
        self._pays = True  # whether the last drafts paid
        self._woken = 0  # number of the pass that ended all pauses begun before it
        self._pause = 1  # length of the last pause of any request
        self._sampled = 0  # counts samples, to rotate them
        self._skipped = list[RequestPause]()  # requests outside the sample of this pass

    def is_paused(self, request: RequestPause) -> bool:
        return request.left > 0 and request.since >= self._woken

    def choose_sample(self, requests: Seq[RequestPause]) -> None:
        """Before a pass, while nothing pays, let only a sample of a large batch draft. New requests wait for it."""
        self._skipped = []
        if self._pays or not self._pause or len(requests) <= SAMPLE:
            return
        due = [request for request in requests if not self.is_paused(request)]
        stride = len(due) // SAMPLE
        if len(due) < len(requests) and all(request.length == 0 for request in due):
            for request in due:
                self._begin(request, self._pause)
        elif stride > 1:
            self._skipped = [request for i, request in enumerate(due) if (i + self._sampled) % stride]
            self._sampled += 1
            for request in self._skipped:
                self._begin(request, max(request.length, self._pause))
                request.left = max(request.left, 1)  # at least for this pass

    def begin_pass(self) -> None:
        """Count a new pass."""
        self._passes += 1

    def update(
        self, requests: Seq[RequestPause], gains: Seq[float], batch_size: int, exposed: float, longest: int
    ) -> None:
        """Update the pauses after drafting: `gains` are the seconds saved by each request that drafted.

        A draft keeps the next pass from being launched ahead, which costs all requests `exposed` seconds. All gains
        together must be worth that. The length of a pause is at most `longest`.
        """
        represented = (len(requests) + len(self._skipped)) / len(requests)  # requests that each gain stands for
        before, self._pays = self._pays, represented * sum(gain for gain in gains if gain > 0) > exposed
        if self._pays and not before:
            self._woken = self._passes
        for request, gain in zip(requests, gains, strict=True):
            if self._pays and gain > 0:
                request.length = 0
            else:
                self._begin(request, _round(min(longest, LONGEST, 2 * request.length + max(1, batch_size // 2))))
                self._pause = request.length
        for request in self._skipped if not self._pays else ():  # pause as long as the sample
            self._begin(request, self._pause)

    def _begin(self, request: RequestPause, pause: int) -> None:
        """Begin a pause that ends at a multiple of its period, and not before half of it is over."""
        half = pause // 2
        request.left = pause - (self._passes + half) % (pause + 1) + half
        request.length, request.since = pause, self._passes


def _round(pause: int) -> int:
    """Round down to one less than a power of two."""
    return (1 << (pause + 1).bit_length() - 1) - 1
