"""StreamSeam: goes on with a stream that broke off, from the same answer that another replica begins anew.

The same seed gives the same text, so what the client has is skipped. Events are cut at other places each time, so the
seam is in the middle of their texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from outpace.serve.web.event_stream import ServerEvent

RESUMABLE = ("/v1/chat/completions", "/v1/completions")
PREFIX = b"data: "


class SeamBroken(Exception):
    """The answer that was begun anew is another one."""


class Growing(NamedTuple):
    """A member of an event that grows over the stream."""

    key: tuple[Any, ...]
    holder: dict[str, Any]
    name: str


class StreamSeam:
    """Knows what a client has got of a stream, and what of the same stream it still lacks."""

    def __init__(self, sent: bytes):
        self._left: dict[tuple[Any, ...], Any] = {}  # what is to be skipped of each growing member
        self._marks = set[tuple[Any, ...]]()  # what comes once, and has come
        self._head: dict[str, Any] = {}
        for event in _events(sent):
            self._note(event)

    def _note(self, event: dict[str, Any] | str) -> None:
        if isinstance(event, str):
            self._marks.add((event,))
            return
        self._head = {name: event[name] for name in ("id", "created")}
        self._marks |= set(_marks(event))
        for key, holder, name in _growing(event):
            self._left[key] = self._left[key] + holder[name] if key in self._left else holder[name]

    def rest(self, data: bytes) -> bytes:
        """Return what is new in events of the stream that was begun anew."""
        return b"".join(ServerEvent(event).encode() for event in map(self._rest, _events(data)) if event)

    def _rest(self, event: dict[str, Any] | str) -> dict[str, Any] | str | None:
        if isinstance(event, str):
            return None if (event,) in self._marks else event
        if "error" in event:
            return event
        new = [mark for mark in _marks(event) if mark not in self._marks]
        grown = [self._cut(*each) for each in _growing(event)]
        event |= self._head
        return event if new or any(grown) else None

    def _cut(self, key: tuple[Any, ...], holder: dict[str, Any], name: str) -> bool:
        """Drop what the client has of a member; say whether something is left."""
        known, value = self._left.get(key, ""), holder[name]
        size = min(len(known), len(value))
        if "logprobs" not in key and value[:size] != known[:size]:
            raise SeamBroken
        holder[name] = value[size:]
        if size:
            self._left[key] = known[size:]
        return len(value) > size


def _events(data: bytes) -> Iterator[dict[str, Any] | str]:
    for part in data.split(b"\n\n"):
        if part.startswith(PREFIX):
            text = part.removeprefix(PREFIX).decode()
            yield json.loads(text) if text.startswith("{") else text


def _growing(event: dict[str, Any]) -> Iterator[Growing]:
    for choice in event["choices"]:
        index, delta = choice["index"], choice.get("delta", choice)
        for name in ("text", "content", "reasoning_content", "reasoning"):
            if delta.get(name) is not None:
                yield Growing((index, name), delta, name)
        for call in delta.get("tool_calls", ()):
            yield Growing((index, "call", call["index"]), call["function"], "arguments")
        if choice.get("token_ids") is not None:
            yield Growing((index, "token_ids"), choice, "token_ids")
        logprobs = choice.get("logprobs") or {}
        for name, values in logprobs.items():
            if values is not None:
                yield Growing((index, "logprobs", name), logprobs, name)


def _marks(event: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    if not event["choices"] and "trace" not in event:  # the trace of a lost replica is not gone on with
        yield ("usage",)
    for choice in event["choices"]:
        index, delta = choice["index"], choice.get("delta", {})
        if "role" in delta:
            yield index, "role"
        if choice["finish_reason"] is not None:
            yield index, "finish"
        yield from ((index, "call", call["index"]) for call in delta.get("tool_calls", ()) if "id" in call)
