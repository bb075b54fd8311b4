"""Parts of replies that OpenAI's APIs have in common: usage, log-probabilities, stop reasons."""

from __future__ import annotations

from typing import Any

from outpace.sampling.logprobs import Logprob
from outpace.serve.chat.conversation import OutputRule, ToolSpec
from outpace.serve.jobs.job import TokenUsage
from outpace.serve.served import Served
from outpace.serve.settings import ServeLimits
from outpace.serve.surfaces.chat_fields import Content, FunctionFields, ResponseFormat
from outpace.serve.surfaces.engine_fields import JSON_OBJECT, StructuredFields, check_rule, structured_rule
from outpace.serve.surfaces.surface import Exchange
from outpace.serve.web.event_stream import ServerEvent
from outpace.serve.web.failures import bad_field

DONE = ServerEvent("[DONE]")  # the end of a stream


def head(exchange: Exchange[Any], kind: str) -> dict[str, Any]:
    """Return the members that every object of a reply begins with."""
    return {"id": exchange.id, "object": kind, "created": exchange.created, "model": exchange.model}


def usage_of(used: TokenUsage) -> dict[str, Any]:
    """Return the usage of chats and completions."""
    return {
        "prompt_tokens": used.prompt,
        "completion_tokens": used.completion,
        "total_tokens": used.prompt + used.completion,
        "prompt_tokens_details": {"cached_tokens": used.cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": used.predicted,
            "rejected_prediction_tokens": used.mispredicted,
            "reasoning_tokens": used.reasoning,
        },
    }


def token_logprobs(served: Served, logprobs: list[Logprob], first: bool) -> list[dict[str, Any]]:
    """Return an entry for each token, as chats show them; `first`: the first token begins the answer."""
    return [
        {
            **_token(served, each.token, each.logprob, first and place == 0),
            "top_logprobs": [_token(served, token, value, first and place == 0) for token, value in each.top.items()],
        }
        for place, each in enumerate(logprobs)
    ]


def _token(served: Served, token: int, logprob: float, first: bool) -> dict[str, Any]:
    data = served.token_bytes(token)
    return {
        "token": served.token_text(token, first),
        "logprob": max(logprob, -9999.0),  # JSON has no infinity
        "bytes": None if data is None else list(data),
    }


def text_of(content: Content, param: str) -> str:
    """Return the text of a message."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        text = part.text if part.text is not None else part.refusal
        if text is None:
            raise bad_field(param, f"parts of type {part.type!r} are not supported; this model reads text")
        texts.append(text)
    return "".join(texts)


def top_logprobs(top: int | None, wanted: bool, limits: ServeLimits) -> int | None:
    """Return how many log-probabilities to show at each token; None for none."""
    if (top or 0) > limits.top_logprobs:
        raise bad_field("top_logprobs", f"at most {limits.top_logprobs}")
    if top and not wanted:
        raise bad_field("top_logprobs", "needs logprobs=true")
    return (top or 0) if wanted else None


def output_rule(given: StructuredFields | None, form: ResponseFormat | None, limits: ServeLimits) -> OutputRule | None:
    """Return the rule of `response_format` or `structured_outputs`."""
    rule = structured_rule(given, limits)
    if form is None or form.type == "text":
        return rule
    if rule is not None:
        raise bad_field("response_format", "a request takes one constraint at a time; leave out structured_outputs")
    if form.type == "json_object":
        return OutputRule(json_schema=JSON_OBJECT)
    if form.json_schema is None or form.json_schema.schema_ is None:
        raise bad_field("response_format", "json_schema.schema is missing")
    rule = OutputRule(json_schema=form.json_schema.schema_)
    check_rule("response_format", rule, limits)
    return rule


def effort_hints(effort: str | None) -> dict[str, Any]:
    """Return the variables by which chat templates are told how much to reason."""
    return {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def tool_specs(functions: list[FunctionFields], limits: ServeLimits) -> list[ToolSpec]:
    """Return the tools of a request."""
    if len(functions) > limits.tools:
        raise bad_field("tools", f"more than {limits.tools} tools")
    if sum(len(str(each.parameters)) for each in functions) > limits.grammar:
        raise bad_field("tools", f"their schemas are longer than {limits.grammar} characters")
    return [ToolSpec(each.name, each.description or "", each.parameters or {}) for each in functions]
