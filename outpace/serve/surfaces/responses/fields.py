"""Fields of /v1/responses."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from outpace.serve.surfaces.chat_fields import PredictionFields, TextPart
from outpace.serve.surfaces.engine_fields import EngineFields, LooseFields


class SummaryPart(LooseFields):
    """A text of an earlier reasoning."""

    type: str = "reasoning_text"
    text: str = ""


class InputItem(LooseFields):
    """An item of the conversation: a message, a call, the output of a call, or reasoning."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[TextPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[TextPart] | None = None
    summary: list[SummaryPart] | None = None


class FunctionTool(LooseFields):
    """A function that the model may call."""

    type: Literal["function"]
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(LooseFields):
    """The choice of one function."""

    type: Literal["function"]
    name: str


class TextFormat(LooseFields):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextFields(LooseFields):
    """How the text is to be."""

    format: TextFormat | None = None


class ReasoningFields(LooseFields):
    """How much to reason."""

    effort: str | None = None


class ResponseFields(EngineFields):
    """The body of a request."""

    input: str | list[InputItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    store: bool | None = True
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = True
    text: TextFields | None = None
    reasoning: ReasoningFields | None = None
    include: list[str] | None = None
    top_logprobs: int | None = Field(None, ge=0)
    metadata: dict[str, str] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    stop: str | list[str] | None = None
    prediction: PredictionFields | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    # Accepted from OpenAI's clients, without effect here.
    max_tool_calls: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    stream_options: Any = None
    user: Any = None
