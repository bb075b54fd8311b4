"""The web application: its routes, its errors, and what happens at its start and end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HTTPRequest

from outpace.serve.playground.pages import open_pages, playground
from outpace.serve.service import Service
from outpace.serve.surfaces.info import info
from outpace.serve.surfaces.routes import routes
from outpace.serve.telemetry.log_lines import say
from outpace.serve.web.access import AccessGuard
from outpace.serve.web.failures import APIFailure, failure_of
from outpace.serve.web.replies import JSONReply, refusal, reply_to_failure
from outpace.version import __version__


def build_app(service: Service) -> FastAPI:
    """Return the application of a service."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        warming = asyncio.create_task(_warm_up(service))  # meanwhile the server says that it is not ready
        yield
        warming.cancel()
        await service.close()
        say("stopped")

    app = FastAPI(title="Outpace", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.service = service
    app.include_router(routes(service.settings.limits))
    app.include_router(info)
    if service.settings.playground:
        app.include_router(playground())
    app.add_exception_handler(APIFailure, reply_to_failure)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _unexpected)
    pages = open_pages(service.settings)
    app.add_middleware(AccessGuard, settings=service.settings, count=service.metrics.reply, pages=pages)
    if service.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.settings.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
        )
    return app


async def _warm_up(service: Service) -> None:
    settings, begun = service.settings, perf_counter()
    about = {"model": settings.root, "host": settings.host, "port": settings.port, "method": settings.method}
    say("starting", version=__version__, **about, max_batch=service.model.max_batch)
    try:
        await service.warm_up()
        say("ready", seconds=round(perf_counter() - begun, 3))
    except Exception as error:
        service.state, service.failure = "failed", error
        say("failed", error=f"{type(error).__name__}: {error}")


async def _invalid(request: HTTPRequest, error: Exception) -> JSONReply:
    """Name the first field that is wrong."""
    assert isinstance(error, RequestValidationError)
    first: dict[str, Any] = error.errors()[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    param = ".".join(place) or None
    if first["type"] == "extra_forbidden":
        failure = APIFailure(f"unknown field {param!r}", code="unknown_field", param=param)
    elif first["type"] == "json_invalid":
        failure = APIFailure("the body is not valid JSON", code="invalid_json")
    else:
        text = f"{first['msg']}" if param is None else f"{param}: {first['msg']}"
        failure = APIFailure(text, code="invalid_value", param=param)
    return refusal(failure, request.url.path)


async def _http(request: HTTPRequest, error: Exception) -> JSONReply:
    assert isinstance(error, HTTPException)
    failure = APIFailure(str(error.detail), error.status_code, headers=dict(error.headers or {}))
    return refusal(failure, request.url.path)


async def _unexpected(request: HTTPRequest, error: Exception) -> JSONReply:
    return refusal(failure_of(error), request.url.path)
