"""JSONReply: a reply as compact JSON. What is no valid text, as an error may quote it, is replaced."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse

from outpace.serve.web.failures import APIFailure

ANTHROPIC = "/v1/messages"  # this API has its own shape of errors


def encoded(data: Any) -> bytes:
    """Return data as JSON in UTF-8."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


class JSONReply(JSONResponse):
    """A reply with a JSON body."""

    def render(self, content: Any) -> bytes:
        return encoded(content)


def failure_reply(failure: APIFailure, path: str) -> JSONReply:
    """Return an error in the shape of the API of this path."""
    body = failure.anthropic() if path.startswith(ANTHROPIC) else failure.openai()
    return JSONReply(body, failure.status, headers=failure.headers)


async def reply_to_failure(request: HTTPRequest, error: Exception) -> JSONReply:
    """Return the reply for an error that a handler has raised."""
    assert isinstance(error, APIFailure)
    return failure_reply(error, request.url.path)
