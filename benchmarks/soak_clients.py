"""The clients of the soak: each asks for one thing after the other, and checks what comes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

import httpx2
from soak_faults import bad_request, failing_body
from soak_plan import CHAT, COMPLETIONS, RESPONSES, Ask
from soak_replies import StreamReader, texts_of
from soak_server import KEYS

PATIENCE = 120.0  # seconds for a request, on a machine that others use too
SHOWN = 20  # violations that are told in full


class Refused(Exception):
    """The server did not answer, and said so: a status, or an error in a stream."""

    def __init__(self, status: int, body: Any):
        super().__init__(f"{status} {body}")
        self.status, self.body = status, body


class Timing(NamedTuple):
    """Milliseconds of one request."""

    queue: float
    run: float


@dataclass
class Weather:
    """What has been done to the server: requests that it could not answer may be asked again."""

    down: bool = True
    draining: bool = False
    over: bool = False  # nothing will answer any more
    up_at: float = 0.0  # when it was ready again
    broken_passes: int = 0

    def excuses(self, begun: float) -> bool:
        return self.down or begun <= self.up_at


@dataclass
class Tally:
    """What has been seen."""

    counts: Counter[str] = field(default_factory=Counter)
    timings: list[Timing] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def wrong(self, what: str) -> None:
        self.counts["violations"] += 1
        if len(self.violations) < SHOWN:
            self.violations.append(what)


@dataclass
class Gate:
    """Lets clients ask, and counts those that do."""

    open: asyncio.Event = field(default_factory=asyncio.Event)
    inside: int = 0
    left: int = 1_000_000  # requests

    async def close(self) -> None:
        """Wait until no client asks any more."""
        self.open.clear()
        while self.inside:
            await asyncio.sleep(0.05)


@dataclass
class SoakClient:
    """Asks by chance, with a chance of its own, so that the load can be repeated."""

    url: str
    asks: list[Ask]
    random: Random
    weather: Weather
    tally: Tally
    think: float  # most seconds between two requests
    http: httpx2.AsyncClient = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx2.AsyncClient(base_url=self.url, timeout=PATIENCE, verify=False)

    async def reconnect(self) -> None:
        """Close all connections."""
        await self.http.aclose()
        self.__post_init__()

    async def run(self, gate: Gate) -> None:
        """Ask while the gate is open, until the task is cancelled."""
        actions: dict[Callable[[Ask], Awaitable[None]], int] = {
            self.whole: 30, self.streamed: 30, self.left_in_stream: 10, self.left_before_reply: 10, self.slow: 5,
            self.bad: 10, self.failing: 4, self.idle: 3, self.looked: 4,
        }  # fmt: skip
        while True:
            await gate.open.wait()
            if gate.left <= 0:
                return
            gate.left, gate.inside = gate.left - 1, gate.inside + 1
            (action,) = self.random.choices(list(actions), list(actions.values()))
            try:
                await action(self.random.choice(self.asks))
                self.tally.counts[action.__name__] += 1
            except Exception as error:
                self.tally.wrong(f"{action.__name__}: {type(error).__name__}: {error}")
            finally:
                gate.inside -= 1
            await asyncio.sleep(self.random.uniform(0, self.think))

    # What is answered

    async def whole(self, ask: Ask) -> None:
        await self._retried(ask, self._whole)

    async def streamed(self, ask: Ask) -> None:
        await self._retried(ask, self._streamed)

    async def slow(self, ask: Ask) -> None:
        """Read a stream slowly."""
        await self._retried(ask, lambda ask: self._streamed(ask, pause=0.1))

    async def _retried(self, ask: Ask, way: Callable[[Ask], Awaitable[None]]) -> None:
        """Ask again for what the weather, a broken pass or a full queue took away."""
        while not self.weather.over:
            begun = time.monotonic()
            try:
                return await way(ask)
            except Refused as refusal:
                if refusal.status == 429:
                    self.tally.counts["full queue"] += 1
                elif "internal_error" in str(refusal.body) or "internal error" in str(refusal.body):
                    self.tally.counts["lost to broken passes"] += 1
                elif not self.weather.excuses(begun):
                    return self.tally.wrong(f"{ask.path}: {refusal}")
            except httpx2.TransportError as error:
                if not self.weather.excuses(begun):
                    return self.tally.wrong(f"{ask.path}: {type(error).__name__}: {error}")
            self.tally.counts["asked again"] += 1
            await asyncio.sleep(self.random.uniform(0.2, 0.6))

    async def _whole(self, ask: Ask) -> None:
        reply = await self._post(ask.path, await self._body(ask), ask.owner)
        self._compare(ask, texts_of(reply), reply["metrics"])

    async def _streamed(self, ask: Ask, pause: float = 0.0, pieces: int | None = None) -> None:
        """Read a stream; leave after this number of pieces."""
        options = {"stream_options": {"include_usage": True}} if ask.path in (CHAT, COMPLETIONS) else {}
        body = {**await self._body(ask), "stream": True, **options}
        async with self.http.stream("POST", ask.path, json=body, headers=self._key(ask.owner)) as stream:
            if stream.status_code != 200:
                await stream.aread()
                raise Refused(stream.status_code, stream.json())
            try:
                await self._read(ask, stream, pause, pieces)
            except httpx2.TransportError as error:
                if self.weather.draining:
                    raise AssertionError("the drain cut off a stream that had begun") from error
                raise

    async def _read(self, ask: Ask, stream: httpx2.Response, pause: float, pieces: int | None) -> None:
        reader, left = StreamReader([""] * len(ask.texts)), pieces
        async for line in stream.aiter_lines():
            reader.line(line)
            self._compare_begin(ask, reader.texts)
            left = None if left is None else left - bool(line)
            if left == 0:
                return
            await asyncio.sleep(pause)
        if reader.failed is not None:
            raise Refused(200, reader.failed)
        if not reader.ended:
            raise httpx2.ReadError("the stream ended early")
        self._compare(ask, reader.texts, reader.metrics)

    async def _body(self, ask: Ask) -> dict[str, Any]:
        if ask.before is None:
            return ask.body
        first = await self._post(RESPONSES, ask.before.body, ask.owner)
        return {**ask.body, "previous_response_id": first["id"]}

    def _compare(self, ask: Ask, texts: list[str], metrics: dict[str, Any] | None) -> None:
        self.tally.counts["answers"] += len(texts)
        if tuple(texts) != ask.texts:
            self.tally.counts["wrong answers"] += 1
            self.tally.wrong(f"{ask.path} {ask.body}: {texts} instead of {list(ask.texts)}")
        if metrics:
            queue = metrics["queue_time_ms"]
            run = metrics["time_to_first_token_ms"] - queue + metrics["generation_time_ms"]
            self.tally.timings.append(Timing(queue, run))

    def _compare_begin(self, ask: Ask, texts: list[str]) -> None:
        """A text that is not whole is the beginning of the answer."""
        if not all(whole.startswith(text) for whole, text in zip(ask.texts, texts, strict=True)):
            self.tally.counts["wrong answers"] += 1
            raise AssertionError(f"{ask.path} {ask.body}: {texts} does not begin {list(ask.texts)}")

    # What is given up

    async def left_in_stream(self, ask: Ask) -> None:
        pieces = self.random.randrange(1, 30)
        await self._retried(ask, lambda ask: self._streamed(ask, pieces=pieces))

    async def left_before_reply(self, ask: Ask) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self.random.uniform(0, 1.0)):
                await self._retried(ask, self._whole)

    async def idle(self, ask: Ask) -> None:
        """Open a connection, send a part of a request or nothing, and go."""
        with suppress(OSError):
            host, port = self.url.removeprefix("http://").split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            head = f"POST {ask.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: {KEYS[ask.owner]}\r\n"
            whole = f"{head}Content-Type: application/json\r\nContent-Length: 500\r\n\r\n{{"
            try:
                writer.write(whole[: self.random.randrange(len(whole) + 1)].encode())
                await asyncio.sleep(self.random.uniform(0, 2.0))
            finally:
                writer.close()
                await writer.wait_closed()

    # What is refused

    async def bad(self, ask: Ask) -> None:
        """Send what no server can answer."""
        sent = bad_request(self.random, ask)
        begun = time.monotonic()
        try:
            reply = await self.http.request(
                sent.verb, sent.path, content=sent.content, headers={**self._key(ask.owner), **sent.headers}
            )
            if reply.status_code in (429, 503) and (reply.status_code == 429 or self.weather.excuses(begun)):
                return
            sound = reply.status_code == sent.status and "error" in reply.json()
        except httpx2.TransportError as error:
            # A server may refuse a body before all of it has been sent.
            if self.weather.excuses(begun) or sent.status == 413:
                return
            return self.tally.wrong(f"bad request {sent.name}: {type(error).__name__}: {error}")
        if not sound:
            self.tally.wrong(f"bad request {sent.name}: {reply.status_code} {reply.text[:300]}")

    async def failing(self, ask: Ask) -> None:
        """Ask for an answer that breaks in its middle; the error is this request's alone."""
        begun, stream = time.monotonic(), self.random.random() < 0.5
        body = failing_body(self.random, stream)
        try:
            reply = await self.http.post(CHAT, json=body, headers=self._key(ask.owner))
        except httpx2.TransportError as error:
            if not self.weather.excuses(begun):
                self.tally.wrong(f"failing request: {type(error).__name__}: {error}")
            return
        expected = reply.status_code == (200 if stream else 500) and "internal_error" in reply.text
        if "Injected" in reply.text or not (expected or reply.status_code == 429 or self.weather.excuses(begun)):
            self.tally.wrong(f"failing request: {reply.status_code} {reply.text[-300:]}")

    # What is looked at

    async def looked(self, ask: Ask) -> None:
        """Read what the server says of itself, and have it count tokens."""
        begun = time.monotonic()
        path = self.random.choice(("/health", "/metrics", "/v1/models", "/tokenize"))
        try:
            if path == "/tokenize":
                await self._post(path, {"prompt": str(ask.prompt)}, ask.owner)
            elif (reply := await self.http.get(path, headers=self._key(ask.owner))).status_code != 200:
                raise Refused(reply.status_code, reply.text)
        except (Refused, httpx2.TransportError) as error:
            if not self.weather.excuses(begun):
                self.tally.wrong(f"{path}: {type(error).__name__}: {error}")

    async def _post(self, path: str, body: dict[str, Any], owner: str) -> dict[str, Any]:
        reply = await self.http.post(path, json=body, headers=self._key(owner))
        if reply.status_code != 200:
            raise Refused(reply.status_code, reply.json())
        return dict(reply.json())

    def _key(self, owner: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {KEYS[owner]}"}
