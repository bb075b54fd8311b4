"""Access: who may ask, and how much may be sent. It stands around the app and reads each body as a whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outpace.serve.settings import ServeSettings
from outpace.serve.web.event_stream import ClientGone
from outpace.serve.web.failures import APIFailure
from outpace.serve.web.keys import ApiKeys
from outpace.serve.web.replies import refusal

OPEN_PATHS = frozenset({"/health"})  # no key is needed for these
OTHER = "other"  # paths that no route has, as metrics count them


class AccessGuard:
    """ASGI middleware: host names, API keys, the number of requests inside, the size of bodies."""

    def __init__(self, app: ASGIApp, settings: ServeSettings, count: Callable[[str, int], None], pages: frozenset[str]):
        self.app, self.settings, self.count = app, settings, count
        self.keys = ApiKeys(settings.keys)
        self.open = OPEN_PATHS | pages
        self.inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        self.inside += 1
        try:
            await self._request(scope, receive, send)
        except ClientGone:
            pass
        finally:
            self.inside -= 1

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                self.count(OTHER if route is None else route.path, message["status"])
            await send(message)

        try:
            self._check(scope)
            body = await self._body(Headers(scope=scope), receive)
        except APIFailure as failure:
            return await refusal(failure, scope["path"])(scope, receive, counted)
        await self.app(scope, _after(body, receive), counted)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self.inside > self.settings.limits.connections:
            raise APIFailure("too many requests at a time", 429, code="too_many_requests", headers={"Retry-After": "1"})
        host = _host_of(headers.get("host", ""))
        if "*" not in self.settings.allowed_hosts and host not in self.settings.hosts:
            raise APIFailure(
                f"the host {host!r} is not allowed; serve with --allowed-host", 403, code="host_not_allowed"
            )
        if self.keys and scope["path"] not in self.open:
            scope["owner"] = self._owner(headers)

    def _owner(self, headers: Headers) -> str:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        owner = self.keys.owner(given)
        if owner is None:
            advice = {"WWW-Authenticate": "Bearer"}
            text = "the API key is wrong" if given else "an API key is missing: send Authorization: Bearer KEY"
            raise APIFailure(text, 401, code="invalid_api_key", headers=advice)
        return owner

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        limits = self.settings.limits
        too_large = APIFailure(f"the body is larger than {limits.body} bytes", 413, code="body_too_large")
        declared = headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > limits.body:
            raise too_large
        body, more = bytearray(), True
        try:
            async with asyncio.timeout(limits.body_seconds):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > limits.body:
                        raise too_large
        except TimeoutError as error:
            text = f"the body did not arrive within {limits.body_seconds:g} s"
            raise APIFailure(text, 408, code="body_timeout") from error
        _check_text(bytes(body))
        return bytes(body)


def _check_text(body: bytes) -> None:
    """Refuse escapes that are no characters (halves of surrogate pairs), which no tokenizer takes."""
    if b"\\u" not in body:
        return
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise APIFailure("the body is not valid JSON: a string is no valid text", code="invalid_json") from error
    except (ValueError, RecursionError):
        return  # the app says what is wrong


def _after(body: bytes, receive: Receive) -> Callable[[], Awaitable[Any]]:
    """Return a `receive` that gives the whole body first."""
    whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def read() -> Message:
        return whole.pop() if whole else await receive()

    return read


def _host_of(header: str) -> str:
    """Return the name in a Host header, without the port."""
    host = header.strip().lower()
    if host.startswith("["):  # an IPv6 address
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
