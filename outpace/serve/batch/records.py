"""Records of a batch: what is written for each line, in OpenAI's form."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any

from outpace.serve.batch.lines import BadLine
from outpace.serve.web.replies import encoded

OK = 200


@dataclass(frozen=True)
class BatchRecord:
    """The outcome of one line, ready to be written."""

    custom_id: str | None
    data: bytes  # with the end of the line
    answered: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    problem: str = ""  # why there is no answer


def answer_record(custom_id: str, status: int, request_id: str | None, body: bytes) -> BatchRecord:
    """Return the record of a reply, be it an answer or an error."""
    id, found = _id(), json.loads(body)
    response = {"status_code": status, "request_id": request_id or id, "body": found}
    data = _line({"id": id, "custom_id": custom_id, "response": response, "error": None})
    if status != OK:
        return BatchRecord(custom_id, data, problem=f"{custom_id}: status {status}, {found['error']['message']}")
    usage = found["usage"]
    read, written = ("input", "output") if "input_tokens" in usage else ("prompt", "completion")
    return BatchRecord(custom_id, data, True, usage[f"{read}_tokens"], usage[f"{written}_tokens"])


def bad_record(number: int, bad: BadLine) -> BatchRecord:
    """Return the record of a line that is no request."""
    error: dict[str, Any] = {"code": "invalid_line", "message": str(bad), "line": number}
    data = _line({"id": _id(), "custom_id": bad.custom_id, "response": None, "error": error})
    return BatchRecord(bad.custom_id, data, problem=f"line {number}: {bad}")


def _id() -> str:
    return f"batch_req_{secrets.token_hex(12)}"


def _line(record: dict[str, Any]) -> bytes:
    return encoded(record) + b"\n"
