"""Items: input items to messages of chat templates, and parts of the output to output items and their events."""

from __future__ import annotations

import secrets
from typing import Any

from outpace.serve.chat.conversation import call_for_template
from outpace.serve.chat.parts import CallArguments, CallStart, ContentText, OutputPart, ReasoningText
from outpace.serve.surfaces.openai_parts import text_of
from outpace.serve.surfaces.responses.fields import InputItem
from outpace.serve.web.failures import bad_field

PREFIXES = {"message": "msg_", "function_call": "fc_", "reasoning": "rs_"}
Event = tuple[str, dict[str, Any]]  # the type of an event, and its further members


def messages_of(given: str | list[InputItem]) -> list[dict[str, Any]]:
    """Return input items as messages. Reasoning, text and calls of one turn become one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    out: list[dict[str, Any]] = []
    for i, item in enumerate(given):
        if item.type == "function_call_output":
            output = text_of(item.output, f"input[{i}].output")
            out.append({"role": "tool", "content": output, "tool_call_id": item.call_id or ""})
        elif item.type == "function_call":
            turn = _turn(out)
            turn.setdefault("tool_calls", []).append(call_for_template(item.call_id, item.name or "", item.arguments))
        elif item.type == "reasoning":
            parts = item.content if isinstance(item.content, list) else []
            texts = [part.text or "" for part in parts] or [part.text for part in item.summary or []]
            _turn(out, new=True)["reasoning_content"] = "".join(texts)
        elif item.role == "assistant":
            turn = _turn(out)
            turn["content"] += text_of(item.content, f"input[{i}].content")
        elif item.role is None:
            raise bad_field(f"input.{i}.role", "a message needs a role")
        else:
            role = "system" if item.role == "developer" else item.role
            out.append({"role": role, "content": text_of(item.content, f"input[{i}].content")})
    return out


def _turn(out: list[dict[str, Any]], new: bool = False) -> dict[str, Any]:
    """Return the assistant's message that a further item belongs to."""
    if new or not out or out[-1]["role"] != "assistant":
        out.append({"role": "assistant", "content": ""})
    return out[-1]


class OutputItems:
    """The output items of an answer, and the events that tell of them while they grow."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None

    def add(self, part: OutputPart, logprobs: list[dict[str, Any]] | None = None) -> list[Event]:
        """Add a part of the output; `logprobs` belong to text of a message."""
        if isinstance(part, CallStart):
            begun = {"call_id": part.id, "name": part.name, "arguments": ""}
            return [*self.close(), *self._begin("function_call", begun)]
        if isinstance(part, CallArguments):
            assert self._open is not None, "arguments follow the start of their call"
            self._open["arguments"] += part.text
            return [("response.function_call_arguments.delta", {**self._place, "delta": part.text})]
        kind = "message" if isinstance(part, ContentText) else "reasoning"
        events: list[Event] = []
        if self._open is None or self._open["type"] != kind:
            events += self.close()
            events += self._begin_text(kind)
        return events + self._grow(part, logprobs)

    def close(self, status: str = "completed") -> list[Event]:
        """End the item that is open."""
        item, place = self._open, self._place if self._open is not None else {}
        if item is None:
            return []
        item["status"] = status
        self._open = None
        events: list[Event] = []
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            events.append(("response.function_call_arguments.done", {**place, **done}))
        else:
            part = item["content"][0]
            shown = {"logprobs": part.get("logprobs", [])} if item["type"] == "message" else {}
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            events.append((f"response.{kind}.done", {**place, "content_index": 0, "text": part["text"], **shown}))
            events.append(("response.content_part.done", {**place, "content_index": 0, "part": dict(part)}))
        index = {"output_index": place["output_index"]}
        return [*events, ("response.output_item.done", {**index, "item": dict(item)})]

    @property
    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.items) - 1}

    def _begin(self, kind: str, members: dict[str, Any]) -> list[Event]:
        item = {"id": PREFIXES[kind] + secrets.token_hex(16), "type": kind, "status": "in_progress", **members}
        self.items.append(item)
        self._open = item
        index = {"output_index": len(self.items) - 1}
        return [("response.output_item.added", {**index, "item": dict(item)})]

    def _begin_text(self, kind: str) -> list[Event]:
        members: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        events = self._begin(kind, {**members, "content": []})
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        assert self._open is not None
        self._open["content"] = [part]
        return [*events, ("response.content_part.added", {**self._place, "content_index": 0, "part": dict(part)})]

    def _grow(self, part: ContentText | ReasoningText, logprobs: list[dict[str, Any]] | None) -> list[Event]:
        assert self._open is not None
        content = self._open["content"][0]
        content["text"] += part.text
        if isinstance(part, ReasoningText):
            return [("response.reasoning_text.delta", {**self._place, "content_index": 0, "delta": part.text})]
        content["logprobs"] = content["logprobs"] + (logprobs or [])
        delta = {"content_index": 0, "delta": part.text, "logprobs": logprobs or []}
        return [("response.output_text.delta", {**self._place, **delta})]
