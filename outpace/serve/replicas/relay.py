"""Relay: hands a request to a replica, and to another one if that is lost before the reply has ended."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

from starlette.datastructures import Headers
from starlette.types import Message

from outpace.serve.replicas.stream_seam import RESUMABLE, SeamBroken, StreamSeam
from outpace.serve.web.failures import APIFailure
from outpace.serve.web.inside import InsideRequest

OK = 200
ATTEMPTS = 5
PAUSE = 0.1  # seconds before a lost request is asked again; doubled each time
SEEDED = (*RESUMABLE, "/v1/responses", "/v1/messages")


def seeded(request: InsideRequest) -> InsideRequest:
    """Return a request with a seed, so that each replica would give the same text."""
    fields = request.fields
    if request.path not in SEEDED or not fields or fields.get("seed") is not None:
        return request
    return replace(request, body=json.dumps({**fields, "seed": secrets.randbits(62)}).encode())


Ask = Callable[[InsideRequest, str], AsyncGenerator[Message, None]]  # a request and its key


class Relay:
    """Asks replicas. `lost` are the errors by which a replica is known to be lost."""

    def __init__(self, ask: Ask, lost: tuple[type[Exception], ...]):
        self._ask, self._lost = ask, lost

    async def messages(self, request: InsideRequest, key: str) -> AsyncGenerator[Message, None]:
        """Yield the reply, as an application would send it."""
        reply = ReplySoFar(request.path)
        for attempt in range(ATTEMPTS):
            try:
                async with aclosing(self._ask(request, key)) as messages:
                    async for message in messages:
                        if (new := reply.new(message)) is not None:
                            yield new
                for message in reply.whole:
                    yield message
                return
            except self._lost:
                reply.lost()
                await asyncio.sleep(PAUSE * 2**attempt)
            except SeamBroken as error:
                raise _broken() from error
        raise APIFailure("the replicas that had this request were lost", 503, code="replica_lost")


class ReplySoFar:
    """What a client has got of a reply. A whole reply is kept back until it has ended; a stream goes on at once."""

    def __init__(self, path: str):
        self._resumable = path in RESUMABLE
        self._sent: list[bytes] = []
        self._seam: StreamSeam | None = None
        self._streams = False
        self.whole: list[Message] = []

    def new(self, message: Message) -> Message | None:
        """Return what may be sent now."""
        begins = message["type"] == "http.response.start"
        if begins and not self._streams:
            self._streams = Headers(raw=message["headers"]).get("content-type", "").startswith("text/event-stream")
        elif begins:
            if message["status"] != OK:
                raise _broken()
            return None  # the client has seen that
        if not self._streams:
            self.whole.append(message)
            return None
        if not begins and self._seam is not None:
            message = {**message, "body": self._seam.rest(message["body"])}
        if not begins:
            self._sent.append(message["body"])
        return message

    def lost(self) -> None:
        """Prepare for the same reply from another replica."""
        self.whole = []
        if any(self._sent):
            if not self._resumable:
                raise _broken()
            self._seam = StreamSeam(b"".join(self._sent))


def _broken() -> APIFailure:
    return APIFailure("the replica was lost in the middle of the stream; ask again", 503, code="replica_lost")
