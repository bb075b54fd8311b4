"""Rota: who is asked for guesses, and who rests because they did not pay.

A rest is longer each time, and longer at once in a large batch, which sees as many guesses in one pass as a request
alone in many. One request that is asked can slow down the pass of all, so rests end in the same passes; and while
nothing pays some are asked for all of a large batch, others the next time. If their guesses pay, all are woken.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

SAMPLE = 8  # requests that are asked for all
LONGEST = 128  # passes


@dataclass
class RequestPause:
    """Of one request."""

    left: int = 0  # passes until its drafter is asked again
    pause: int = 0  # passes of the last rest
    since: int = 0  # pass in which it began


class Backoff:
    """Of all requests of a policy."""

    def __init__(self) -> None:
        self._passes = 0
        self._pays = True  # what was guessed last
        self._woken = 0  # pass since which all are to be asked
        self._pause = 1  # of the last rest of all
        self._turn = 0  # of those who are asked for all
        self._spared = list[RequestPause]()  # in this pass others are asked for these

    def resting(self, rest: RequestPause) -> bool:
        return rest.left > 0 and rest.since >= self._woken

    def sample(self, rests: Seq[RequestPause]) -> None:
        """Before a pass: while nothing pays, only some of many are asked, and those who join wait for the others."""
        self._spared = []
        if self._pays or not self._pause or len(rests) <= SAMPLE:
            return
        due = [rest for rest in rests if not self.resting(rest)]
        apart = len(due) // SAMPLE
        if len(due) < len(rests) and all(rest.pause == 0 for rest in due):
            for rest in due:
                self._begin(rest, self._pause)
        elif apart > 1:
            self._spared = [rest for i, rest in enumerate(due) if (i + self._turn) % apart]
            self._turn += 1
            for rest in self._spared:
                self._begin(rest, max(rest.pause, self._pause))
                rest.left = max(rest.left, 1)  # in any case for this pass

    def begin(self) -> None:
        """A pass begins."""
        self._passes += 1

    def settle(self, rests: Seq[RequestPause], gains: Seq[float], rows: int, exposed: float, longest: int) -> None:
        """Those of `rows` who were asked in this pass, and the seconds that it gains to ask each of them.

        Whoever is asked keeps the pass of all from beginning ahead: together they must be worth those seconds.
        """
        told = (len(rests) + len(self._spared)) / len(rests)
        before, self._pays = self._pays, told * sum(gain for gain in gains if gain > 0) > exposed
        if self._pays and not before:
            self._woken = self._passes
        for rest, gain in zip(rests, gains, strict=True):
            if self._pays and gain > 0:
                rest.pause = 0
            else:
                self._begin(rest, _round(min(longest, LONGEST, 2 * rest.pause + max(1, rows // 2))))
                self._pause = rest.pause
        for rest in self._spared if not self._pays else ():  # they rest as long as those who were asked
            self._begin(rest, self._pause)

    def _begin(self, rest: RequestPause, pause: int) -> None:
        """All end their rests in the same passes, and none before half of it is over."""
        half = pause // 2
        rest.left = pause - (self._passes + half) % (pause + 1) + half
        rest.pause, rest.since = pause, self._passes


def _round(pause: int) -> int:
    """Down to one less than a power of two."""
    return (1 << (pause + 1).bit_length() - 1) - 1
