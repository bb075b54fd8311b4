"""Requests from inside: to a web application in this process, without a port."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Scope


@dataclass(frozen=True)
class InsideRequest:
    """A request whose body is whole, and whose sender is known."""

    path: str
    body: bytes
    method: str = "POST"
    query: bytes = b""
    owner: str | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The body; empty if it is no JSON object, which the application will say."""
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def scope(self) -> Scope:
        names = {"host": "localhost", "content-type": "application/json", "content-length": str(len(self.body))}
        return {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": self.method, "scheme": "http",
            "path": self.path, "raw_path": self.path.encode(), "query_string": self.query, "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in names.items()], "client": None,
            "server": None, "owner": self.owner,
        }  # fmt: skip


class InsideReply(NamedTuple):
    """A whole reply."""

    status: int
    headers: Headers
    body: bytes


async def ask(app: ASGIApp, request: InsideRequest) -> InsideReply:
    """Return the reply of the application."""
    start, *parts = [message async for message in messages(app, request)]
    return InsideReply(start["status"], Headers(raw=start["headers"]), b"".join(part["body"] for part in parts))


async def messages(app: ASGIApp, request: InsideRequest) -> AsyncGenerator[Message, None]:
    """Yield the messages of a reply as they come. Who stops to read them has gone away."""
    given: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]
    sent: asyncio.Queue[Message | None] = asyncio.Queue()

    async def receive() -> Message:
        return given.pop() if given else await asyncio.Future()

    async def run() -> None:
        try:
            await app(request.scope, receive, sent.put)
        finally:
            sent.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        while (message := await sent.get()) is not None:
            yield message
        await task
    finally:
        task.cancel()
