"""Reads the replies of all four APIs: the texts of whole ones, and the pieces of streams."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

LAST = ("response.completed", "response.incomplete", "message_stop")  # events; OpenAI's other streams end with [DONE]
FAILED = ("response.failed", "error")


class Piece(NamedTuple):
    """More text of one answer."""

    answer: int
    text: str


def texts_of(reply: dict[str, Any]) -> list[str]:
    """Return the text of each answer of a whole reply; of a tool call, its name and arguments."""
    if "choices" in reply:
        return [_choice(choice) for choice in reply["choices"]]
    blocks = reply["output"] if "output" in reply else reply["content"]
    return ["".join(map(_block, blocks))]


def _choice(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return (message["content"] or "") + "".join(call["name"] + call["arguments"] for call in calls)


def _block(block: dict[str, Any]) -> str:
    """Return the text of an item of a response, or of a block of a message."""
    if block["type"] == "message":
        return "".join(part["text"] for part in block["content"])
    if block["type"] == "function_call":
        return str(block["name"] + block["arguments"])
    if block["type"] == "tool_use":
        return str(block["name"]) + json.dumps(block["input"])
    return str(block["text"])


@dataclass
class StreamReader:
    """Joins the events of a stream."""

    texts: list[str]
    ended: bool = False
    failed: dict[str, Any] | None = None
    metrics: dict[str, Any] = field(default_factory=dict)

    def line(self, line: str) -> None:
        if not line.startswith("data: "):
            return
        if line == "data: [DONE]":
            self.ended = True
            return
        event = json.loads(line.removeprefix("data: "))
        kind = event.get("type", "error" if "error" in event else "")
        self.ended |= kind in LAST
        if kind in FAILED:
            self.failed = event
        self.metrics = event.get("metrics") or event.get("response", {}).get("metrics") or self.metrics
        for piece in _pieces(event, kind):
            self.texts[piece.answer] += piece.text


def _pieces(event: dict[str, Any], kind: str) -> list[Piece]:
    if "choices" in event:
        return [Piece(choice["index"], _change(choice)) for choice in event["choices"]]
    if kind in ("response.output_text.delta", "response.function_call_arguments.delta"):
        return [Piece(0, event["delta"])]
    if kind == "response.output_item.added":
        return [Piece(0, event["item"].get("name", ""))]
    if kind == "content_block_start":
        return [Piece(0, event["content_block"].get("name", ""))]
    if kind == "content_block_delta":
        return [Piece(0, event["delta"].get("text") or event["delta"].get("partial_json", ""))]
    return []


def _change(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    delta = choice["delta"]
    calls = [call["function"] for call in delta.get("tool_calls", [])]
    return (delta.get("content") or "") + "".join(call.get("name", "") + call["arguments"] for call in calls)
