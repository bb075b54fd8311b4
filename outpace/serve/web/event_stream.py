"""EventStream: a reply as server-sent events; and a watch on the client's connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outpace.serve.web.failures import APIFailure, client_gone, failure_of, timed_out
from outpace.serve.web.replies import encoded

if TYPE_CHECKING:
    from outpace.serve.jobs.run import JobRun
    from outpace.serve.surfaces.surface import EventWriter
    from outpace.serve.telemetry.request_log import RequestEntry

T = TypeVar("T")
LAST_WORDS = 1.0  # seconds to send an error after the deadline
MOST_SENDS = 2000  # a second, of all streams together
SHORTEST = 0.005  # seconds; a shorter pause is not worth it
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not hold events back
]


class ServerEvent(NamedTuple):
    """One event: JSON, or a text as it is."""

    data: dict[str, Any] | str
    name: str | None = None

    def encode(self) -> bytes:
        data = self.data.encode() if isinstance(self.data, str) else encoded(self.data)
        return (b"" if self.name is None else b"event: %s\n" % self.name.encode()) + b"data: %s\n\n" % data


class Deadline:
    """When a request must have ended."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._at = asyncio.get_running_loop().time() + seconds

    def limit(self) -> asyncio.Timeout:
        """Return a context that raises `TimeoutError` at that time."""
        return asyncio.timeout_at(self._at)


class ClientGone(Exception):
    """The client has closed its connection."""


async def while_connected(
    receive: Receive, work: Coroutine[Any, Any, T], drop: Callable[[T], object] = lambda result: None
) -> T:
    """Return the result of `work`; cancel it if the client goes away. `drop` gets a result that comes too late."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
    except BaseException:
        task.add_done_callback(lambda task: _dropped(task, drop))
        raise
    else:
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.wait((task, watch))


def _dropped(task: asyncio.Task[T], drop: Callable[[T], object]) -> None:
    if not task.cancelled() and task.exception() is None:
        drop(task.result())


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Pace:
    """Bounds how often the streams of a server send: of many streams, each sends the text of several passes at once.

    Otherwise the event loop would take from the engine the time in which it makes the tokens.
    """

    def __init__(self) -> None:
        self.streams = 0

    async def pause(self) -> None:
        """Wait until a stream may send again."""
        seconds = self.streams / MOST_SENDS
        if seconds > SHORTEST:
            await asyncio.sleep(seconds)


class EventStream(Response):
    """Sends the events of a run as they come. However it ends, the run ends too."""

    def __init__(self, run: JobRun, writer: EventWriter, entry: RequestEntry, deadline: Deadline, pace: Pace):
        super().__init__()
        self.run, self.writer, self.entry = run, writer, entry
        self.deadline, self.pace = deadline, pace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure: APIFailure | None = client_gone()
        self.pace.streams += 1
        try:
            failure = await while_connected(receive, self._send(send))
        except (ClientGone, OSError):
            pass
        finally:
            self.pace.streams -= 1
            self.run.cancel()
            self.entry.end(self.run.found if failure is None else None, failure)

    async def _send(self, send: Send) -> APIFailure | None:
        """Send everything; return why it failed, which is the last event then."""
        headers = [*HEADERS, (b"x-request-id", self.entry.id.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async with self.deadline.limit():
                await _body(send, self.writer.begin())
                async for deltas in self.run.deltas():
                    await _body(send, [event for delta in deltas for event in self.writer.write(delta)])
                    if not self.run.ended:
                        await self.pace.pause()
                await _body(send, self.writer.end(self.run.found), more=False)
            return None
        except TimeoutError:
            return await self._fail(send, timed_out(self.deadline.seconds))
        except OSError:
            raise
        except Exception as error:
            return await self._fail(send, failure_of(error))

    async def _fail(self, send: Send, failure: APIFailure) -> APIFailure:
        with suppress(TimeoutError):  # a client that does not read does not hear it either
            async with asyncio.timeout(LAST_WORDS):
                await _body(send, self.writer.fail(failure), more=False)
        return failure


async def _body(send: Send, events: Iterable[ServerEvent], more: bool = True) -> None:
    data = b"".join(event.encode() for event in events)
    if data or not more:
        await send({"type": "http.response.body", "body": data, "more_body": more})
