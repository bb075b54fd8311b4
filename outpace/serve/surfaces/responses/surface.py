"""/v1/responses: from its fields to a job, and from answers to its replies."""

from __future__ import annotations

import time
from typing import Any

from outpace.sampling.logprobs import Logprob
from outpace.serve.chat.conversation import Conversation, OutputRule, ToolUse, call_for_template
from outpace.serve.chat.parts import ContentText, Output
from outpace.serve.jobs.job import Delta, Job, JobOutcome, ServedAnswer, TokenUsage
from outpace.serve.jobs.run import JobRun
from outpace.serve.settings import ServeLimits
from outpace.serve.surfaces.chat_fields import FunctionFields, ResponseFormat, SchemaFields
from outpace.serve.surfaces.chat_job import chat_job
from outpace.serve.surfaces.engine_fields import stop_strings
from outpace.serve.surfaces.openai_parts import (
    effort_hints,
    output_rule,
    text_of,
    token_logprobs,
    tool_specs,
    top_logprobs,
)
from outpace.serve.surfaces.responses.fields import NamedFunction, ResponseFields
from outpace.serve.surfaces.responses.items import Event, OutputItems, messages_of
from outpace.serve.surfaces.responses.store import ResponseStore, StoredResponse
from outpace.serve.surfaces.surface import EventWriter, Exchange, Surface
from outpace.serve.telemetry.figures import request_metrics
from outpace.serve.web.event_stream import ServerEvent
from outpace.serve.web.failures import APIFailure

LOGPROBS = "message.output_text.logprobs"  # in `include`
Fields = Exchange[ResponseFields]


class ResponseSurface(Surface[ResponseFields]):
    """OpenAI's responses. A reply that is stored can be continued by its id."""

    name, id_prefix = "responses", "resp_"

    def __init__(self, limits: ServeLimits):
        self.store = ResponseStore(limits)

    def job(self, exchange: Fields) -> Job:
        fields, limits = exchange.fields, exchange.served.settings.limits
        wanted = LOGPROBS in (fields.include or []) or bool(fields.top_logprobs)
        given = {
            "max_tokens": fields.max_output_tokens,
            "stop": stop_strings(fields.stop, limits),
            "logprobs": top_logprobs(fields.top_logprobs, wanted, limits),
            "prediction": "" if fields.prediction is None else text_of(fields.prediction.content, "prediction"),
        }
        choice = fields.tool_choice
        if isinstance(choice, NamedFunction):
            use = ToolUse("required", choice.name, several=False)
        else:
            use = ToolUse(choice or "auto", several=fields.parallel_tool_calls is not False)
        functions = [FunctionFields(**tool.model_dump(exclude={"type"})) for tool in fields.tools or []]
        system = [{"role": "system", "content": fields.instructions}] if fields.instructions else []
        conversation = Conversation(
            [*system, *self._history(exchange)],
            tool_specs(functions, limits),
            use,
            _rule(fields, limits),
            template_values=dict(fields.chat_template_kwargs or {}),
            hints=effort_hints(None if fields.reasoning is None else fields.reasoning.effort),
        )
        return chat_job(exchange, conversation, given)

    def _history(self, exchange: Fields) -> list[dict[str, Any]]:
        """Return the messages so far, without instructions: those of earlier replies are not carried over."""
        earlier = exchange.fields.previous_response_id
        before = [] if earlier is None else self.store.get(earlier, exchange.owner).messages
        return [*before, *messages_of(exchange.fields.input)]

    def reply(self, exchange: Fields, outcome: JobOutcome) -> dict[str, Any]:
        answer, items = outcome.answers[0], OutputItems()
        shown = _shown(exchange, answer.logprobs, True)
        for part in answer.output.parts:
            text = isinstance(part, ContentText)
            items.add(part, shown if text else None)
            shown = [] if text else shown
        items.close(_item_status(answer.finish_reason))
        return self.finished(exchange, outcome, items)

    def finished(self, exchange: Fields, outcome: JobOutcome, items: OutputItems) -> dict[str, Any]:
        """Return the whole reply, and keep it if the request says so."""
        answer = outcome.answers[0]
        cut = answer.finish_reason == "length"
        body = {
            **response_head(exchange),
            "status": "incomplete" if cut else "completed",
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": items.items,
            "usage": usage_of_response(outcome.usage),
            "metrics": request_metrics(outcome),
        }
        if exchange.fields.store is not False:
            assert outcome.job.conversation is not None, "a response is part of a conversation"
            said = outcome.job.conversation.messages[bool(exchange.fields.instructions) :]
            messages = [*said, _said(answer.output)]
            self.store.add(exchange.id, StoredResponse(exchange.owner, body, messages))
        return body

    def writer(self, exchange: Fields, run: JobRun) -> EventWriter:
        return ResponseWriter(exchange, self)


class ResponseWriter(EventWriter):
    """Writes the events of a response, numbered."""

    def __init__(self, exchange: Fields, surface: ResponseSurface):
        self.exchange, self.surface = exchange, surface
        self.items = OutputItems()
        self._number = 0
        self._answer = ServedAnswer()
        self._logprobs: list[Logprob] = []  # of tokens whose text has not come yet
        self._first = True

    def begin(self) -> list[ServerEvent]:
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, {"response": response_head(self.exchange)}) for kind in kinds]

    def write(self, delta: Delta) -> list[ServerEvent]:
        self._answer.add(delta)
        self._logprobs += delta.logprobs or []
        events: list[Event] = []
        for part in delta.parts:
            shown = None
            if isinstance(part, ContentText):
                shown = _shown(self.exchange, self._logprobs, self._first)
                self._logprobs, self._first = [], False
            events += self.items.add(part, shown)
        return [self._event(*event) for event in events]

    def end(self, outcome: JobOutcome) -> list[ServerEvent]:
        events = self.items.close(_item_status(self._answer.finish_reason))
        body = self.surface.finished(self.exchange, outcome, self.items)
        kind = f"response.{body['status']}"
        return [*(self._event(*event) for event in events), self._event(kind, {"response": body})]

    def fail(self, failure: APIFailure) -> list[ServerEvent]:
        error = {"code": "server_error", "message": failure.message}
        body = {**response_head(self.exchange), "status": "failed", "error": error, "output": self.items.items}
        return [self._event("response.failed", {"response": body})]

    def _event(self, kind: str, members: dict[str, Any]) -> ServerEvent:
        self._number += 1
        return ServerEvent({"type": kind, "sequence_number": self._number - 1, **members}, kind)


def response_head(exchange: Fields) -> dict[str, Any]:
    """Return a response that has just begun."""
    fields, usual = exchange.fields, {"temperature": 1.0, "top_p": 1.0, **exchange.served.settings.sampling}
    choice = fields.tool_choice
    form = fields.text.format if fields.text is not None and fields.text.format is not None else None
    return {
        "id": exchange.id,
        "object": "response",
        "created_at": exchange.created,
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "model": exchange.model,
        "output": [],
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "reasoning": {"effort": fields.reasoning and fields.reasoning.effort, "summary": None},
        "store": fields.store is not False,
        "temperature": usual["temperature"] if fields.temperature is None else fields.temperature,
        "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": choice.model_dump() if isinstance(choice, NamedFunction) else choice or "auto",
        "tools": [tool.model_dump() for tool in fields.tools or []],
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": usual["top_p"] if fields.top_p is None else fields.top_p,
        "truncation": "disabled",
        "usage": None,
        "metadata": fields.metadata or {},
    }


def usage_of_response(used: TokenUsage) -> dict[str, Any]:
    return {
        "input_tokens": used.prompt,
        "input_tokens_details": {"cached_tokens": used.cached, "cache_write_tokens": used.prompt - used.cached},
        "output_tokens": used.completion,
        "output_tokens_details": {
            "reasoning_tokens": used.reasoning,
            "accepted_prediction_tokens": used.predicted,
            "rejected_prediction_tokens": used.mispredicted,
        },
        "total_tokens": used.prompt + used.completion,
    }


def _shown(exchange: Fields, logprobs: list[Logprob] | None, first: bool) -> list[dict[str, Any]]:
    return token_logprobs(exchange.served, logprobs or [], first)


def _item_status(reason: str | None) -> str:
    return "incomplete" if reason == "length" else "completed"


def _rule(fields: ResponseFields, limits: ServeLimits) -> OutputRule | None:
    form = None if fields.text is None else fields.text.format
    if form is None:
        return output_rule(fields.structured_outputs, None, limits)
    schema = SchemaFields(schema=form.schema_) if form.schema_ is not None else None
    return output_rule(fields.structured_outputs, ResponseFormat(type=form.type, json_schema=schema), limits)


def _said(output: Output) -> dict[str, Any]:
    """Return an answer as the message of chat templates that it will be in the next turn."""
    message: dict[str, Any] = {"role": "assistant", "content": output.content}
    if output.reasoning:
        message["reasoning_content"] = output.reasoning
    if output.calls:
        message["tool_calls"] = [call_for_template(call.id, call.name, call.arguments) for call in output.calls]
    return message
