"""conversation_key: what the requests of one conversation have in common, so that one replica gets all of them."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from outpace.serve.web.inside import InsideRequest

BEGINNING = 1024  # characters or tokens of a plain prompt


def conversation_key(request: InsideRequest) -> str:
    """Return the key of a request, whatever its API.

    It is made of the owner and of what stays as it is when a conversation grows: all up to the first message of the
    user. A client that knows better gives `prompt_cache_key`.
    """
    fields = request.fields
    given = fields.get("prompt_cache_key")
    common = given if isinstance(given, str) else _beginning(fields)
    return hashlib.sha256(json.dumps([request.owner, common]).encode()).hexdigest()


def _beginning(body: dict[str, Any]) -> list[Any]:
    if "prompt" in body:
        prompt = body["prompt"]
        return [prompt[:BEGINNING] if isinstance(prompt, str | list) else prompt]
    said = body.get("messages", body.get("input"))
    before = [body.get("system"), body.get("instructions"), body.get("tools")]
    if not isinstance(said, list):
        return [*before, said]
    users = (i for i, each in enumerate(said) if isinstance(each, dict) and each.get("role") == "user")
    return [*before, said[: next(users, 0) + 1]]
