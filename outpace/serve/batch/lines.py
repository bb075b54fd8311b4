"""Lines of a batch: requests in OpenAI's batch format, read one at a time from a file of any length."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outpace.errors import OutpaceError

LONGEST = 9 * 2**20  # bytes of a line: the longest body that a server takes, and what stands around it


class BatchLine(BaseModel):
    """A request of a batch."""

    model_config = ConfigDict(extra="forbid")

    custom_id: str = Field(min_length=1)
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    body: dict[str, Any]


class BadLine(OutpaceError):
    """A line that is no request."""

    def __init__(self, reason: str, custom_id: str | None = None):
        super().__init__(reason)
        self.custom_id = custom_id


class RawLine(NamedTuple):
    """A line as it stands in a file."""

    number: int  # from 1 on
    offset: int  # of its first byte
    data: bytes  # at most LONGEST + 1 bytes


def raw_lines(path: Path) -> Iterator[RawLine]:
    """Yield the lines that are not blank."""
    with path.open("rb") as file:
        number = offset = 0
        while data := file.readline(LONGEST + 1):
            number, start = number + 1, offset
            offset += len(data)
            rest = data
            while not rest.endswith(b"\n") and (rest := file.readline(LONGEST)):
                offset += len(rest)
            if data.strip():
                yield RawLine(number, start, data)


def parse(data: bytes) -> BatchLine:
    """Return the request of a line."""
    if len(data) > LONGEST:
        raise BadLine(f"longer than {LONGEST} bytes")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadLine(f"not valid JSON: {error}") from error
    try:
        line = BatchLine.model_validate(found)
    except ValidationError as error:
        given = found.get("custom_id") if isinstance(found, dict) else None
        raise BadLine(_reason(error), given if isinstance(given, str) else None) from error
    if line.body.get("stream"):
        raise BadLine("body.stream: a batch has no streams; leave it out", line.custom_id)
    return line


def _reason(error: ValidationError) -> str:
    """Name the first member that is wrong."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return f"unknown member {place!r}"
    return f"{place}: {first['msg']}" if place else str(first["msg"])
