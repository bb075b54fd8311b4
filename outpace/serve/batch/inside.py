"""ask: one request to a web application in this process, without a port."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Scope


class InsideReply(NamedTuple):
    """A whole reply."""

    status: int
    headers: Headers
    body: bytes


async def ask(app: ASGIApp, path: str, body: bytes) -> InsideReply:
    """Post JSON to a path of the application."""
    given: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        if given:
            return given.pop()
        return await asyncio.Future()  # who asks from inside does not hang up

    async def send(message: Message) -> None:
        sent.append(message)

    await app(_scope(path, body), receive, send)
    start, *parts = sent
    return InsideReply(start["status"], Headers(raw=start["headers"]), b"".join(part["body"] for part in parts))


def _scope(path: str, body: bytes) -> Scope:
    names = {"host": "localhost", "content-type": "application/json", "content-length": str(len(body))}
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "client": None, "server": None,
        "headers": [(name.encode(), value.encode()) for name, value in names.items()],
    }  # fmt: skip
