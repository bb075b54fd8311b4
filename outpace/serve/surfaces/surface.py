"""Surface: one API. `answer` is the one handler of all of them: start a job, then reply whole or as a stream."""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from outpace.serve.jobs.admission import Owner
from outpace.serve.jobs.job import Delta, Job, JobOutcome
from outpace.serve.jobs.run import JobRun
from outpace.serve.served import Served
from outpace.serve.service import Service
from outpace.serve.surfaces.engine_fields import EngineFields, check_samples
from outpace.serve.web.event_stream import ClientGone, Deadline, EventStream, ServerEvent, while_connected
from outpace.serve.web.failures import CLIENT_GONE, APIFailure, client_gone, failure_of, not_ready, timed_out
from outpace.serve.web.replies import JSONReply, failure_reply

F = TypeVar("F", bound=EngineFields)


@dataclass(frozen=True)
class Exchange(Generic[F]):
    """A request and what its reply is made of, besides the answers."""

    fields: F
    served: Served
    owner: Owner
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model(self) -> str:
        """The model's name, as the reply gives it."""
        return self.fields.model or self.served.settings.names[0]


class EventWriter(ABC):
    """Turns what comes of a job into the events of one API's streams."""

    @abstractmethod
    def begin(self) -> list[ServerEvent]:
        """Return the events before any text."""

    @abstractmethod
    def write(self, delta: Delta) -> list[ServerEvent]:
        """Return the events of more output."""

    @abstractmethod
    def end(self, outcome: JobOutcome) -> list[ServerEvent]:
        """Return the events after all text."""

    @abstractmethod
    def fail(self, failure: APIFailure) -> list[ServerEvent]:
        """Return the events of an error after the stream has begun."""


class Surface(ABC, Generic[F]):
    """Translates the requests of one API to jobs, and what comes of them back."""

    name: str
    id_prefix: str

    @abstractmethod
    def job(self, exchange: Exchange[F]) -> Job:
        """Return the job of a request. This runs on a thread."""

    @abstractmethod
    def reply(self, exchange: Exchange[F], outcome: JobOutcome) -> dict[str, Any]:
        """Return the body of a whole reply."""

    @abstractmethod
    def writer(self, exchange: Exchange[F], run: JobRun) -> EventWriter:
        """Return what writes the reply as a stream."""


async def answer(surface: Surface[F], fields: F, http: HTTPRequest) -> Response:
    """Answer a request of any API."""
    service: Service = http.app.state.service
    exchange = Exchange(fields, service.served, http.scope.get("owner"), f"{surface.id_prefix}{secrets.token_hex(16)}")
    entry = service.log.begin(surface.name, exchange.id, exchange.owner, http.headers)
    limit = service.settings.limits.seconds
    seconds = limit if fields.timeout is None else min(limit, fields.timeout)
    deadline = Deadline(seconds)
    try:
        async with deadline.limit():
            check_samples(fields.samples, service.settings.limits)
            starting = service.start(lambda: surface.job(exchange), entry, fields.samples)
            run = await while_connected(http.receive, starting, drop=JobRun.cancel)
            if fields.stream:
                return EventStream(run, surface.writer(exchange, run), entry, deadline, service.pace)
            try:
                outcome = await while_connected(http.receive, run.outcome())
            finally:
                run.cancel()
            entry.end(outcome)
            return JSONReply(surface.reply(exchange, outcome), headers={"X-Request-Id": exchange.id})
    except ClientGone:
        entry.end(None, client_gone())
        return Response(status_code=CLIENT_GONE)
    except asyncio.CancelledError:  # the server ends before the request does
        entry.end(None, not_ready(service.state))
        raise
    except Exception as error:
        failure = timed_out(seconds) if isinstance(error, TimeoutError) else failure_of(error)
        entry.end(None, failure)
        return failure_reply(failure, http.url.path, exchange.id)
