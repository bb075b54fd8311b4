"""JSONReply: a reply as compact JSON. What is no valid text, as an error may quote it, is replaced."""

from __future__ import annotations

import json
import secrets
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse

from outpace.serve.telemetry.log_lines import say
from outpace.serve.web.failures import APIFailure

ANTHROPIC = "/v1/messages"  # this API has its own shape of errors
LONGEST_PATH = 200  # characters in the log


def encoded(data: Any) -> bytes:
    """Return data as JSON in UTF-8."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


class JSONReply(JSONResponse):
    """A reply with a JSON body."""

    def render(self, content: Any) -> bytes:
        return encoded(content)


def failure_reply(failure: APIFailure, path: str, id: str) -> JSONReply:
    """Return an error in the shape of the API of this path; the log knows it by its id."""
    body = failure.anthropic() if path.startswith(ANTHROPIC) else failure.openai()
    return JSONReply(body, failure.status, headers={"X-Request-Id": id, **failure.headers})


def refusal(failure: APIFailure, path: str) -> JSONReply:
    """Return the error of a request that is refused before it runs, and write a line of the log."""
    id = f"req_{secrets.token_hex(16)}"
    say("refused", id=id, path=path[:LONGEST_PATH], status=failure.status, code=failure.code)
    return failure_reply(failure, path, id)


async def reply_to_failure(request: HTTPRequest, error: Exception) -> JSONReply:
    """Return the reply for an error that a handler has raised."""
    assert isinstance(error, APIFailure)
    return refusal(error, request.url.path)
