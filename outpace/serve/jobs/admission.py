"""Admission: how many requests run, who is next, and when to refuse more.

A request takes a place before anything is computed for it. When it is prepared, it waits for its turn: the owner with
the fewest running requests comes first, and the requests of one owner keep their order. Everything here runs on the
event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from time import perf_counter

from outpace.serve.web.failures import queue_full

FOLLOW = 0.1  # how fast the average duration follows
LONGEST_RETRY = 60  # seconds

Owner = str | None


class QueuePlace:
    """The place of one request, from its arrival until the engine has ended it."""

    def __init__(self, admission: Admission, owner: Owner, size: int):
        self.admission, self.owner, self.size = admission, owner, size
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.started: float | None = None  # when its turn came
        self._left = False

    async def wait(self) -> None:
        """Wait until the request may run."""
        self.admission.line_up(self)
        await self.turn

    def leave(self) -> None:
        """Give the place back; further calls do nothing."""
        if not self._left:
            self._left = True
            self.admission.remove(self)


class Admission:
    """The places of a server. `capacity` is how many samples the engine gets, `most_waiting` how many others may be."""

    def __init__(self, capacity: int, most_waiting: int):
        self.capacity, self.most_waiting = capacity, most_waiting
        self.running = 0
        self.pending = 0  # samples that are prepared or wait
        self._of_owner: Counter[Owner] = Counter()  # running samples
        self._pending_of: Counter[Owner] = Counter()
        self._lines: dict[Owner, deque[QueuePlace]] = {}
        self._seconds = 1.0  # average duration of a request

    def take(self, owner: Owner, size: int = 1) -> QueuePlace:
        """Take a place, or refuse if too many wait. An owner of whom none waits gets one, whatever others have sent."""
        if self.pending + size > self.most_waiting and self._pending_of[owner]:
            raise queue_full(self._retry_after)
        self._add_pending(owner, size)
        return QueuePlace(self, owner, size)

    def _add_pending(self, owner: Owner, size: int) -> None:
        self.pending += size
        self._pending_of[owner] += size

    def line_up(self, place: QueuePlace) -> None:
        self._lines.setdefault(place.owner, deque()).append(place)
        self._admit()

    def remove(self, place: QueuePlace) -> None:
        if place.started is None:
            self._add_pending(place.owner, -place.size)
            line = self._lines.get(place.owner)
            if line is not None and place in line:
                line.remove(place)
        else:
            self.running -= place.size
            self._of_owner[place.owner] -= place.size
            self._seconds += FOLLOW * (perf_counter() - place.started - self._seconds)
        place.turn.cancel()
        self._admit()

    def _admit(self) -> None:
        """Give a turn to those who fit. A large request that does not fit yet is not overtaken, or it would starve."""
        while waiting := [owner for owner, line in self._lines.items() if line]:
            owner = min(waiting, key=lambda owner: self._of_owner[owner])
            place = self._lines[owner][0]
            if self.running and self.running + place.size > self.capacity:
                return
            self._lines[owner].popleft()
            if not self._lines[owner]:
                del self._lines[owner]
            self._add_pending(owner, -place.size)
            self.running += place.size
            self._of_owner[owner] += place.size
            place.started = perf_counter()
            if not place.turn.done():
                place.turn.set_result(None)

    @property
    def _retry_after(self) -> int:
        """Seconds until about half of those who wait have run."""
        seconds = self._seconds * self.pending / (2 * self.capacity)
        return max(1, min(LONGEST_RETRY, math.ceil(seconds)))
