"""APIFailure: an error as a client sees it: a status and the fields of OpenAI's and Anthropic's error objects."""

from __future__ import annotations

import logging
import re
from typing import Any

from outpace.errors import OutpaceError, UsageError

logger = logging.getLogger("outpace.serve")
SETTING = re.compile(r"(\w+)(?:=|: | must | is not valid)")  # messages about a setting begin with its name
CLIENT_GONE = 499  # nginx's number for a client that has left; nobody reads such a reply
NO_RETRY = {"x-should-retry": "false"}  # the official clients read it
# Anthropic's name for each status; all others are `api_error`.
ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


class APIFailure(OutpaceError):
    """An error with everything that its reply says."""

    def __init__(
        self, message: str, status: int = 400, *, code: str | None = None, param: str | None = None,
        headers: dict[str, str] | None = None,
    ):  # fmt: skip
        super().__init__(message)
        self.message, self.status, self.code, self.param = message, status, code, param
        self.headers = headers or {}

    @property
    def type(self) -> str:
        if self.status in (429, 503):
            return "rate_limit_error" if self.status == 429 else "service_unavailable_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def openai(self) -> dict[str, Any]:
        """Return the reply in OpenAI's shape."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        """Return the reply in Anthropic's shape."""
        kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}


def bad_field(param: str, message: str) -> APIFailure:
    """Build the error for a field with a wrong value."""
    return APIFailure(f"{param}: {message}", param=param, code="invalid_value")


def queue_full(seconds: int) -> APIFailure:
    headers = {"Retry-After": str(seconds)}
    return APIFailure("too many requests are waiting; try again later", 429, code="queue_full", headers=headers)


def not_ready(reason: str) -> APIFailure:
    return APIFailure(f"the server is {reason}", 503, code="not_ready", headers={"Retry-After": "1"})


def timed_out(seconds: float) -> APIFailure:
    text = f"the request took longer than {seconds:g} s"
    return APIFailure(text, 504, code="timeout", headers=NO_RETRY)


def client_gone() -> APIFailure:
    return APIFailure("the client has closed its connection", CLIENT_GONE, code="client_gone")


def failure_of(error: Exception) -> APIFailure:
    """Return the reply for an error; an unexpected one is described in the log alone."""
    if isinstance(error, APIFailure):
        return error
    if isinstance(error, UsageError):
        named = SETTING.match(str(error))
        return APIFailure(str(error), param=named[1] if named else None, code="invalid_value")
    if isinstance(error, OutpaceError):
        return APIFailure(str(error), code="request_failed")
    logger.error("internal error", exc_info=error)
    return APIFailure("internal error", 500, code="internal_error", headers=NO_RETRY)
