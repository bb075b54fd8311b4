"""Fields of /v1/chat/completions."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from outpace.serve.surfaces.engine_fields import EngineFields, LooseFields


class TextPart(LooseFields):
    """A part of a message."""

    type: str
    text: str | None = None
    refusal: str | None = None


Content = str | list[TextPart] | None


class FunctionCall(LooseFields):
    """The function of an earlier call."""

    name: str
    arguments: str | dict[str, Any] | None = None


class EarlierCall(LooseFields):
    """A call in an earlier message."""

    id: str | None = None
    type: str | None = "function"
    function: FunctionCall


class ChatMessage(LooseFields):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = None
    name: str | None = None
    tool_calls: list[EarlierCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class FunctionFields(LooseFields):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolFields(LooseFields):
    """A tool; only functions are known here."""

    type: Literal["function"] = "function"
    function: FunctionFields


class FunctionName(LooseFields):
    """The name of a function."""

    name: str


class NamedTool(LooseFields):
    """The choice of one tool."""

    type: Literal["function"] = "function"
    function: FunctionName


class StreamOptions(LooseFields):
    """What a stream tells beside the text."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class SchemaFields(LooseFields):
    """A JSON schema with a name."""

    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(LooseFields):
    """The form of the content."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFields | None = None


class PredictionFields(LooseFields):
    """A text that the answer may repeat in large part."""

    type: Literal["content"] = "content"
    content: str | list[TextPart]


class ChatFields(EngineFields):
    """The body of a request."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    n: int | None = 1
    stop: str | list[str] | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0)
    response_format: ResponseFormat | None = None
    tools: list[ToolFields] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = True
    prediction: PredictionFields | None = None
    reasoning_effort: str | None = None
    stream_options: StreamOptions | None = None
    # vLLM's
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    add_generation_prompt: Literal[True] | None = True
    continue_final_message: bool | None = False
    # Outpace's own
    return_trace: bool | Literal["probs"] | None = False
    # Accepted from OpenAI's clients, without effect here.
    metadata: Any = None
    modalities: list[Literal["text"]] | None = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    user: Any = None
    verbosity: Any = None

    @property
    def samples(self) -> int:
        return 1 if self.n is None else self.n
