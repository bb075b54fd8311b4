"""/v1/chat/completions: from its fields to a job, and from answers to its replies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outpace.serve.chat.conversation import Conversation, ToolUse, call_for_template
from outpace.serve.chat.parts import CallArguments, CallStart, ContentText, OutputPart, ReasoningText, ToolCall
from outpace.serve.jobs.job import Delta, Job, JobOutcome, ServedAnswer, TraceWish
from outpace.serve.jobs.run import JobRun
from outpace.serve.settings import ServeLimits
from outpace.serve.surfaces.chat_fields import ChatFields, ChatMessage, NamedTool
from outpace.serve.surfaces.chat_job import chat_job
from outpace.serve.surfaces.engine_fields import stop_strings
from outpace.serve.surfaces.openai_parts import (
    DONE,
    effort_hints,
    head,
    output_rule,
    text_of,
    token_logprobs,
    tool_specs,
    top_logprobs,
    usage_of,
)
from outpace.serve.surfaces.surface import EventWriter, Exchange, Surface
from outpace.serve.telemetry.figures import request_metrics
from outpace.serve.web.event_stream import ServerEvent
from outpace.serve.web.failures import APIFailure, bad_field
from outpace.tracing.trace import Line


class ChatSurface(Surface[ChatFields]):
    """OpenAI's chat completions."""

    name, id_prefix = "chat", "chatcmpl-"

    def job(self, exchange: Exchange[ChatFields]) -> Job:
        fields, limits = exchange.fields, exchange.served.settings.limits
        given = {
            "max_tokens": fields.max_completion_tokens or fields.max_tokens,
            "stop": stop_strings(fields.stop, limits),
            "n": fields.samples,
            "logprobs": top_logprobs(fields.top_logprobs, bool(fields.logprobs), limits),
            "prediction": "" if fields.prediction is None else text_of(fields.prediction.content, "prediction"),
        }
        job = chat_job(exchange, _conversation(fields, limits), given)
        return replace(job, trace=_trace_wish(exchange))

    def reply(self, exchange: Exchange[ChatFields], outcome: JobOutcome) -> dict[str, Any]:
        choices = [self._choice(exchange, i, answer) for i, answer in enumerate(outcome.answers)]
        prompt = {"prompt_token_ids": outcome.prompts[0]} if exchange.fields.return_token_ids else {}
        return {
            **head(exchange, "chat.completion"),
            "choices": choices,
            "usage": usage_of(outcome.usage),
            "metrics": request_metrics(outcome),
            **prompt,
        }

    def _choice(self, exchange: Exchange[ChatFields], index: int, answer: ServedAnswer) -> dict[str, Any]:
        output = answer.output
        message: dict[str, Any] = {"role": "assistant", "content": output.content, "refusal": None}
        if output.reasoning:
            message |= {"reasoning_content": output.reasoning, "reasoning": output.reasoning}
        if output.calls:
            message |= {"content": output.content or None, "tool_calls": [_call(call) for call in output.calls]}
        shown = None
        if answer.logprobs is not None:
            shown = {"content": token_logprobs(exchange.served, answer.logprobs, True), "refusal": None}
        ids = {"token_ids": answer.tokens} if exchange.fields.return_token_ids else {}
        reason = {"finish_reason": answer.finish_reason, "stop_reason": answer.stop}
        return {"index": index, "message": message, "logprobs": shown, **reason, **ids}

    def writer(self, exchange: Exchange[ChatFields], run: JobRun) -> EventWriter:
        return ChatWriter(exchange, run)


class ChatWriter(EventWriter):
    """Writes the chunks of a chat completion."""

    def __init__(self, exchange: Exchange[ChatFields], run: JobRun):
        self.exchange, self.run = exchange, run
        self._begun: set[int] = set()  # answers with text
        options = exchange.fields.stream_options
        self._usage = bool(options and options.include_usage)
        self._each_usage = bool(options and options.continuous_usage_stats)

    def begin(self) -> list[ServerEvent]:
        delta = {"role": "assistant", "content": ""}
        events = [self._chunk([_choice(i, delta)]) for i in range(len(self.run.seqs))]
        return events if self.run.trace is None else [self._chunk([], trace=self.run.trace.opening), *events]

    def write(self, delta: Delta) -> list[ServerEvent]:
        """One chunk holds all that has come, unless it ends the answer."""
        exchange = self.exchange
        shown = None
        if delta.logprobs:
            entries = token_logprobs(exchange.served, delta.logprobs, delta.index not in self._begun)
            shown = {"content": entries, "refusal": None}
        if delta.tokens:
            self._begun.add(delta.index)
        ids = {"token_ids": delta.tokens} if exchange.fields.return_token_ids else {}
        changes = _changes(delta.parts)
        events = [self._chunk([_choice(delta.index, change)]) for change in changes[:-1]]
        last = changes[-1] if changes else {}
        if last or shown or ids or delta.finish_reason:
            choice = _choice(delta.index, last, delta.finish_reason)
            if delta.finish_reason:
                choice["stop_reason"] = delta.stop
            events.append(self._chunk([choice | {"logprobs": shown} | ids]))
        return [self._chunk([], trace=delta.trace), *events] if delta.trace else events

    def end(self, outcome: JobOutcome) -> list[ServerEvent]:
        if not self._usage:
            return [DONE]
        usage = {"usage": usage_of(outcome.usage), "metrics": request_metrics(outcome)}
        return [self._chunk([], usage), DONE]

    def fail(self, failure: APIFailure) -> list[ServerEvent]:
        return [ServerEvent(failure.openai()), DONE]

    def _chunk(
        self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None, trace: list[Line] | None = None
    ) -> ServerEvent:
        if usage is None and self._each_usage:
            usage = {"usage": usage_of(self.run.usage)}
        elif usage is None and self._usage:
            usage = {"usage": None}
        more = (usage or {}) | ({} if trace is None else {"trace": trace})
        return ServerEvent({**head(self.exchange, "chat.completion.chunk"), "choices": choices, **more})


def _trace_wish(exchange: Exchange[ChatFields]) -> TraceWish | None:
    fields, settings = exchange.fields, exchange.served.settings
    if not fields.return_trace:
        return None
    if not fields.stream:
        raise bad_field("return_trace", "only streams have a trace; send stream: true")
    if settings.shares_text:
        text = "this server gives no traces: their drafts would show what other callers wrote"
        raise APIFailure(text, 403, code="trace_refused", param="return_trace")
    return TraceWish(fields.return_trace == "probs", settings.limits.traced_nodes)


def _choice(index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


def _changes(parts: list[OutputPart]) -> list[dict[str, Any]]:
    """Return the deltas of parts; parts of one kind that follow each other share one."""
    out: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, ContentText | ReasoningText):
            names = ("content",) if isinstance(part, ContentText) else ("reasoning_content", "reasoning")
            if out and out[-1].keys() == set(names):
                out[-1] = {name: out[-1][name] + part.text for name in names}
            else:
                out.append(dict.fromkeys(names, part.text))
        else:
            out.append({"tool_calls": [_call_change(part)]})
    return out


def _call_change(part: CallStart | CallArguments) -> dict[str, Any]:
    if isinstance(part, CallStart):
        function = {"name": part.name, "arguments": ""}
        return {"index": part.index, "id": part.id, "type": "function", "function": function}
    return {"index": part.index, "function": {"arguments": part.text}}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _conversation(fields: ChatFields, limits: ServeLimits) -> Conversation:
    choice = fields.tool_choice
    several = fields.parallel_tool_calls is not False
    if isinstance(choice, NamedTool):
        use = ToolUse("required", choice.function.name, several=False)
    else:
        use = ToolUse(choice or "auto", several=several)
    return Conversation(
        messages=template_messages(fields.messages),
        tools=tool_specs([tool.function for tool in fields.tools or []], limits),
        tool_use=use,
        rule=output_rule(fields.structured_outputs, fields.response_format, limits),
        continues=bool(fields.continue_final_message),
        template_values=dict(fields.chat_template_kwargs or {}),
        hints=effort_hints(fields.reasoning_effort),
    )


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages as chat templates read them."""
    return [_message(message, i) for i, message in enumerate(messages)]


def _message(message: ChatMessage, index: int) -> dict[str, Any]:
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    out: dict[str, Any] = {"role": role, "content": text_of(message.content, f"messages[{index}].content")}
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        out["reasoning_content"] = reasoning
    if message.tool_calls:
        called = message.tool_calls
        out["tool_calls"] = [call_for_template(c.id, c.function.name, c.function.arguments) for c in called]
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            out[name] = value
    return out
