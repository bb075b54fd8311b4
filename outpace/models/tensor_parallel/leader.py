"""Leader and followers: all processes run the same calls, in the order in which the first process makes them.

A call that fails must fail on all processes, as one does that finds the cache full. They then meet. A process that has
failed alone finds nobody there, and ends.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from outpace.models.tensor_parallel.channel import SETTLING, Channel
from outpace.models.tensor_parallel.processes import ProcessLost

LAST_CALL = 10.0  # seconds that process exit waits for a running call


class Call(NamedTuple):
    """A call of a method of an object that all processes have."""

    target: int  # number of the object
    method: str  # may be a path, such as `layers.slice`
    args: tuple[Any, ...]
    keywords: dict[str, Any]
    made: int | None = None  # the number that the result gets, if it is an object to call later
    dropped: tuple[int, ...] = ()  # numbers of objects that are not needed any more


@dataclass(eq=False)
class SharedObject:
    """An object that all processes have: its number, and this process's part of it."""

    number: int
    part: Any


class Leader:
    """The first process's end of the channel."""

    def __init__(self, channel: Channel, parts: int):
        """`parts` objects, numbered from 0, are known to all processes."""
        self._channel = channel
        self._lock = threading.Lock()  # calls come from the model's worker, and from code that compares with it
        self._count = parts
        self._dropped: list[int] = []
        self._together = True  # False: a call has ended in a way that the others do not know of

    def run(self, target: SharedObject, method: str, *args: Any, **keywords: Any) -> Any:
        """Call a method on all processes, and return this one's result."""
        with self._lock:
            return self._run(target, Call(target.number, method, args, keywords))

    def tell(self, target: SharedObject, method: str, *args: Any) -> None:
        """Call a method that only gives something up. Without the other processes there is nothing left to give up."""
        with suppress(ProcessLost):
            self.run(target, method, *args)

    def make(self, target: SharedObject, method: str, *args: Any) -> SharedObject:
        """Call a method on all processes whose result is an object to call later."""
        with self._lock:
            number, self._count = self._count, self._count + 1
            part = self._run(target, Call(target.number, method, args, {}, number))
        made = SharedObject(number, part)
        weakref.finalize(made, self._dropped.append, number)
        return made

    def _run(self, target: SharedObject, call: Call) -> Any:
        if not self._together:
            raise ProcessLost
        self._together = False
        self._channel.send(call._replace(dropped=tuple(self._dropped.pop() for _ in range(len(self._dropped)))))
        try:
            result = attrgetter(call.method)(target.part)(*call.args, **call.keywords)
        except Exception as error:
            if not isinstance(error, ProcessLost):
                self._channel.meet(SETTLING)  # the others have failed alike, or else they do not come
                self._together = True
            raise
        self._together = True
        return result

    def close(self) -> None:
        """Let the other processes end. Then the model cannot run any more."""
        if self._lock.acquire(timeout=LAST_CALL):
            if self._together:
                self._channel.send(None)
                self._together = False
            self._channel.close()
            self._lock.release()


class FollowingProcess:
    """The other end of the channel, in each of the other processes."""

    def __init__(self, channel: Channel, parts: list[Any]):
        self._channel = channel
        self._known = dict(enumerate(parts))

    def follow(self) -> None:
        """Run the first process's calls on this process's parts, until that one ends."""
        try:
            while (call := self._channel.receive()) is not None:
                self._run(call)
        finally:
            self._channel.close()

    def _run(self, call: Call) -> None:
        for number in call.dropped:
            del self._known[number]
        try:
            result = attrgetter(call.method)(self._known[call.target])(*call.args, **call.keywords)
        except ProcessLost:
            raise
        except Exception as error:
            try:
                self._channel.meet(SETTLING)
            except ProcessLost:
                raise error from None  # the first process has not failed
        else:
            if call.made is not None:
                self._known[call.made] = result
