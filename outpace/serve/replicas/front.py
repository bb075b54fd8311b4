"""ReplicaFront: the application that clients talk to. It checks who asks, and hands each request to a replica."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Literal

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HTTPRequest
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outpace.serve.playground.pages import open_pages
from outpace.serve.replicas.conversation_key import conversation_key
from outpace.serve.replicas.relay import Relay, seeded
from outpace.serve.settings import ServeSettings
from outpace.serve.surfaces.info import PROMETHEUS
from outpace.serve.web.access import AccessGuard
from outpace.serve.web.event_stream import ClientGone, ServerEvent, while_connected
from outpace.serve.web.failures import APIFailure, failure_of, not_ready, timed_out
from outpace.serve.web.inside import InsideRequest
from outpace.serve.web.replies import ANTHROPIC, JSONReply, refusal

RESPONSES = "/v1/responses"


class ReplicaFront:
    """An ASGI application in front of replicas."""

    def __init__(self, relay: Relay, settings: ServeSettings, metrics: Callable[[], Awaitable[str]]):
        self.state: Literal["ready", "draining"] = "ready"
        self._relay, self._settings, self._metrics = relay, settings, metrics
        self._keys = ResponseKeys(settings.limits.stored)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "/health":
            reply: Response = JSONReply({"status": self.state}, 200 if self.state == "ready" else 503)
        elif path == "/metrics":
            reply = PlainTextResponse(await self._metrics(), media_type=PROMETHEUS)
        elif self.state != "ready":
            reply = refusal(not_ready(self.state), path)
        else:
            return await self._forward(scope, receive, send)
        await reply(scope, receive, send)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await HTTPRequest(scope, receive).body()
        given = {"method": scope["method"], "query": scope["query_string"], "owner": scope.get("owner")}
        request = InsideRequest(scope["path"], body, **given)
        if "seed" not in self._settings.sampling:
            request = seeded(request)
        key = self._keys.of(request) or conversation_key(request)
        seconds, begun = self._settings.limits.seconds, False

        async def reply() -> None:
            nonlocal begun
            async with asyncio.timeout(seconds), aclosing(self._relay.messages(request, key)) as messages:
                async for message in messages:
                    self._keys.note(request, message, key)
                    begun = True
                    await send(message)

        try:
            await while_connected(receive, reply())
        except ClientGone:
            return
        except Exception as error:
            failure = timed_out(seconds) if isinstance(error, TimeoutError) else failure_of(error)
            await _fail(failure, begun, scope, receive, send)


async def _fail(failure: APIFailure, begun: bool, scope: Scope, receive: Receive, send: Send) -> None:
    """Say that a request failed: as its reply or, if that has begun, as the last event of the stream."""
    if not begun:
        return await refusal(failure, scope["path"])(scope, receive, send)
    anthropic = scope["path"].startswith(ANTHROPIC)
    event = ServerEvent(failure.anthropic(), "error") if anthropic else ServerEvent(failure.openai())
    await send({"type": "http.response.body", "body": event.encode(), "more_body": False})


class ResponseKeys:
    """The keys of stored responses: the replica that has given one holds it, and its conversation goes on there."""

    def __init__(self, most: int):
        self._most = most
        self._keys: OrderedDict[str, str] = OrderedDict()

    def of(self, request: InsideRequest) -> str | None:
        """Return the key of the response that a request names."""
        if not request.path.startswith(RESPONSES):
            return None
        named = request.path.removeprefix(RESPONSES + "/")
        return self._keys.get(str(request.fields.get("previous_response_id")) if named == request.path else named)

    def note(self, request: InsideRequest, message: Message, key: str) -> None:
        if request.path != RESPONSES or message["type"] != "http.response.start":
            return
        self._keys[Headers(raw=message["headers"]).get("x-request-id", "")] = key
        while len(self._keys) > self._most:
            self._keys.popitem(last=False)


def guarded(front: ReplicaFront, settings: ServeSettings) -> ASGIApp:
    """Return the front behind the checks that every server has."""
    app: ASGIApp = AccessGuard(front, settings, count=lambda path, status: None, pages=open_pages(settings))
    if settings.cors_origins:
        methods = ["GET", "POST", "DELETE"]
        app = CORSMiddleware(app, allow_origins=settings.cors_origins, allow_methods=methods, allow_headers=["*"])
    return app
