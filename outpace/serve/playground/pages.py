"""The files of the playground, and what the page needs to know of the server."""

from __future__ import annotations

from functools import partial
from importlib import resources
from pathlib import PurePath
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from outpace import registry
from outpace.registry import catalogue
from outpace.sampling.settings import Sampling
from outpace.serve.served import Served
from outpace.serve.settings import ServeSettings
from outpace.serve.surfaces.engine_fields import REQUESTABLE, largest_option
from outpace.serve.surfaces.info import prepared
from outpace.serve.web.replies import JSONReply
from outpace.tracing.viewer.page import PHASES, asset

SHARED = ("parts.css", "parts.js")  # with the trace viewer
OWN = ("page.css", "page.js", "answer.js", "client.js", "controls.js", "export.js", "trace.js")
# They hold no secrets.
FILES = {"/": "page.html"} | {f"/playground/{name}": name for name in SHARED + OWN}
SETTINGS = "/playground/settings"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
# The page asks only this server, runs only its own scripts, and stands in no frame.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
SAMPLING = ("temperature", "top_p", "top_k", "min_p")
NUMBERS = {"int", "float", "int | None", "float | None"}


def open_pages(settings: ServeSettings) -> frozenset[str]:
    """Return the paths of the page, which need no key."""
    return frozenset(FILES if settings.playground else ())


def playground() -> APIRouter:
    """Return the routes of the page. They are no API, so the OpenAPI document does not have them."""
    router = APIRouter(include_in_schema=False)
    for path, name in FILES.items():
        router.add_api_route(path, partial(_file, name))

    @router.get(SETTINGS)
    async def settings(http: HTTPRequest) -> Response:
        return JSONReply(await prepared(http, lambda: page_settings(http.app.state.service.served)))

    return router


async def _file(name: str) -> Response:
    own = resources.files("outpace.serve.playground").joinpath(name)
    text = asset(name) if name in SHARED else own.read_text(encoding="utf-8")
    return Response(text, headers=HEADERS, media_type=KINDS[PurePath(name).suffix])


def page_settings(served: Served) -> dict[str, Any]:
    """Return what the page offers: the methods with their options, and the defaults of the server."""
    settings = served.settings
    names = dict.fromkeys([settings.method, *REQUESTABLE])
    usual = {"temperature": 1.0, **settings.sampling}
    return {
        "model": settings.names[0],
        "most_tokens": served.room(0),
        "method": settings.method,
        "methods": {name: _method(name) for name in names},
        "sampling": {name: usual.get(name, getattr(Sampling(), name)) for name in SAMPLING},
        "traces": not settings.shares_text,
        "phases": PHASES,
    }


def _method(name: str) -> dict[str, Any]:
    entry = catalogue.entry("method", name)
    options = [
        {
            "name": option,
            "usual": usual,
            "least": entry.least.get(option),
            "most": largest_option(entry, option),
            "whole": entry.types[option].startswith("int"),
        }
        for option, usual in entry.options.items()
        if entry.types[option] in NUMBERS
    ]
    return {"about": entry.about, "options": options, "remembers": bool(registry.find(name).remembers)}
