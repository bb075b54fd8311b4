"""/v1/messages: from its fields to a job, and from answers to its replies."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from outpace.serve.chat.conversation import Conversation, OutputRule, ToolSpec, ToolUse
from outpace.serve.chat.parts import CallArguments, CallStart, ContentText, OutputPart
from outpace.serve.jobs.job import Delta, Job, JobOutcome, ServedAnswer, TokenUsage
from outpace.serve.jobs.run import JobRun
from outpace.serve.settings import ServeLimits
from outpace.serve.surfaces.chat_fields import FunctionFields
from outpace.serve.surfaces.chat_job import chat_job
from outpace.serve.surfaces.engine_fields import check_rule, stop_strings, structured_rule
from outpace.serve.surfaces.messages.fields import (
    Blocks,
    ConversationFields,
    MessageFields,
    ThinkingFields,
    TurnFields,
)
from outpace.serve.surfaces.openai_parts import text_of, tool_specs
from outpace.serve.surfaces.surface import EventWriter, Exchange, Surface
from outpace.serve.telemetry.figures import request_metrics
from outpace.serve.web.event_stream import ServerEvent
from outpace.serve.web.failures import APIFailure, bad_field

CHOICES: dict[str, Any] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
UNREAD = ("redacted_thinking",)  # blocks that only their author can read


class MessageSurface(Surface[MessageFields]):
    """Anthropic's messages."""

    name, id_prefix = "messages", "msg_"

    def job(self, exchange: Exchange[MessageFields]) -> Job:
        fields, limits = exchange.fields, exchange.served.settings.limits
        given = {
            "max_tokens": fields.max_tokens,
            "stop": stop_strings(fields.stop_sequences, limits, "stop_sequences"),
            "prediction": "" if fields.prediction is None else text_of(fields.prediction.content, "prediction"),
        }
        rule = structured_rule(fields.structured_outputs, limits)
        return chat_job(exchange, conversation_of(fields, limits, rule), given)

    def reply(self, exchange: Exchange[MessageFields], outcome: JobOutcome) -> dict[str, Any]:
        answer, blocks = outcome.answers[0], ContentBlocks()
        for part in answer.output.parts:
            blocks.add(part)
        blocks.close()
        return {
            **_head(exchange, outcome.usage),
            "content": [_finished(block) for block in blocks.blocks],
            **_stop(answer),
            "metrics": request_metrics(outcome),
        }

    def writer(self, exchange: Exchange[MessageFields], run: JobRun) -> EventWriter:
        return MessageWriter(exchange, run)


class ContentBlocks:
    """The blocks of an answer, and the events that tell of them while they grow."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._open = False

    def add(self, part: OutputPart) -> list[dict[str, Any]]:
        """Add a part of the output; return the events."""
        if isinstance(part, CallStart):
            return [*self.close(), self._begin({"type": "tool_use", "id": part.id, "name": part.name, "input": ""})]
        if isinstance(part, CallArguments):
            return [self._grow("input", part.text, {"type": "input_json_delta", "partial_json": part.text})]
        kind = "text" if isinstance(part, ContentText) else "thinking"
        events: list[dict[str, Any]] = []
        if not self._open or self.blocks[-1]["type"] != kind:
            events = [*self.close(), self._begin({"type": kind, kind: ""})]
        return [*events, self._grow(kind, part.text, {"type": f"{kind}_delta", kind: part.text})]

    def close(self) -> list[dict[str, Any]]:
        """End the block that is open."""
        if not self._open:
            return []
        self._open = False
        return [{"type": "content_block_stop", "index": len(self.blocks) - 1}]

    def _begin(self, block: dict[str, Any]) -> dict[str, Any]:
        self.blocks.append(block)
        self._open = True
        shown = {**block, "input": {}} if block["type"] == "tool_use" else _finished(block)
        return {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": shown}

    def _grow(self, member: str, text: str, delta: dict[str, Any]) -> dict[str, Any]:
        self.blocks[-1][member] += text
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


class MessageWriter(EventWriter):
    """Writes the events of a message."""

    def __init__(self, exchange: Exchange[MessageFields], run: JobRun):
        self.exchange, self.run = exchange, run
        self.blocks = ContentBlocks()
        self._answer = ServedAnswer()

    def begin(self) -> list[ServerEvent]:
        message = {**_head(self.exchange, self.run.usage), "content": [], "stop_reason": None, "stop_sequence": None}
        return [_event({"type": "message_start", "message": message}), _event({"type": "ping"})]

    def write(self, delta: Delta) -> list[ServerEvent]:
        self._answer.add(delta)
        return [_event(event) for part in delta.parts for event in self.blocks.add(part)]

    def end(self, outcome: JobOutcome) -> list[ServerEvent]:
        usage = {"usage": _usage(outcome.usage), "metrics": request_metrics(outcome)}
        last = {"type": "message_delta", "delta": _stop(self._answer), **usage}
        return [_event(event) for event in (*self.blocks.close(), last, {"type": "message_stop"})]

    def fail(self, failure: APIFailure) -> list[ServerEvent]:
        return [_event(failure.anthropic())]


def conversation_of(fields: ConversationFields, limits: ServeLimits, rule: OutputRule | None = None) -> Conversation:
    """Return what a request says of the conversation."""
    system = "" if fields.system is None else _text(fields.system, "system")
    messages = [{"role": "system", "content": system}] if system else []
    for i, turn in enumerate(fields.messages):
        messages += _messages(turn, f"messages[{i}].content")
    choice = fields.tool_choice
    use = ToolUse()
    if choice is not None:
        several = choice.type != "tool" and not choice.disable_parallel_tool_use
        use = ToolUse(CHOICES[choice.type], choice.name if choice.type == "tool" else None, several)
    form = None if fields.output_config is None else fields.output_config.format
    if form is not None:
        rule = OutputRule(json_schema=form.schema_)
        check_rule("output_config", rule, limits)
    return Conversation(
        messages, _tools(fields, limits), use, rule, fields.messages[-1].role == "assistant",
        hints=_hints(fields.thinking),
    )  # fmt: skip


def _tools(fields: ConversationFields, limits: ServeLimits) -> list[ToolSpec]:
    given = [
        FunctionFields(name=tool.name, description=tool.description, parameters=tool.input_schema)
        for tool in fields.tools or []
    ]
    return tool_specs(given, limits)


def _hints(thinking: ThinkingFields | None) -> dict[str, Any]:
    return {} if thinking is None else {"enable_thinking": thinking.type != "disabled"}


def _messages(turn: TurnFields, param: str) -> list[dict[str, Any]]:
    """Return a turn as messages of chat templates: results of tools stand in messages of their own."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    message: dict[str, Any] = {"role": turn.role, "content": ""}
    results: list[dict[str, Any]] = []
    for block in turn.content:
        if block.type == "tool_result":
            text = "" if block.content is None else _text(block.content, param)
            results.append({"role": "tool", "content": text, "tool_call_id": block.tool_use_id or ""})
        elif block.type == "tool_use":
            function = {"name": block.name or "", "arguments": block.input or {}}
            call = {"id": block.id or "", "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        elif block.type == "thinking":
            message["reasoning_content"] = block.thinking or ""
        elif block.type not in UNREAD:
            message["content"] += _text([block], param)
    return [*results, message] if message["content"] or len(message) > 2 or not results else results


def _text(given: Blocks, param: str) -> str:
    if isinstance(given, str):
        return given
    texts = []
    for block in given:
        if block.type != "text" or block.text is None:
            raise bad_field(param, f"blocks of type {block.type!r} are not supported; this model reads text")
        texts.append(block.text)
    return "".join(texts)


def _event(data: dict[str, Any]) -> ServerEvent:
    return ServerEvent(data, str(data["type"]))


def _head(exchange: Exchange[MessageFields], used: TokenUsage) -> dict[str, Any]:
    usage = {"type": "message", "role": "assistant", "model": exchange.model, "usage": _usage(used)}
    return {"id": exchange.id, **usage}


def _usage(used: TokenUsage) -> dict[str, Any]:
    """Return the usage; what the cache held is not among the input tokens."""
    return {
        "input_tokens": used.prompt - used.cached,
        "cache_read_input_tokens": used.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": used.completion,
    }


def _stop(answer: ServedAnswer) -> dict[str, Any]:
    if answer.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop}
    return {"stop_reason": REASONS.get(answer.finish_reason or "", "end_turn"), "stop_sequence": None}


def _finished(block: dict[str, Any]) -> dict[str, Any]:
    """Return a block as a whole reply shows it."""
    if block["type"] == "thinking":
        return {**block, "signature": ""}
    if block["type"] == "text":
        return {**block, "citations": None}
    given: Any = {}
    with suppress(ValueError):  # a call that was cut off
        given = json.loads(block["input"])
    return {**block, "input": given if isinstance(given, dict) else {}}
