"""Fields of /v1/messages. Clients for coding send more than is read here, so blocks and unknown settings are loose."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from outpace.serve.surfaces.chat_fields import PredictionFields
from outpace.serve.surfaces.engine_fields import EngineFields, LooseFields, StrictFields


class ContentBlock(LooseFields):
    """A block of a message."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ContentBlock] | None = None


Blocks = str | list[ContentBlock]


class TurnFields(LooseFields):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class ClientTool(LooseFields):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    input_schema: dict[str, Any]


class ToolChoiceFields(LooseFields):
    """Whether tools must be used."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = False


class ThinkingFields(LooseFields):
    """Whether to reason."""

    type: str


class OutputConfig(LooseFields):
    """The form of the output."""

    effort: str | None = None
    format: JSONFormat | None = None


class JSONFormat(LooseFields):
    """A JSON schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class ConversationFields(StrictFields):
    """What a request says of the conversation."""

    model: str | None = None
    messages: list[TurnFields] = Field(min_length=1)
    system: Blocks | None = None
    tools: list[ClientTool] | None = None
    tool_choice: ToolChoiceFields | None = None
    thinking: ThinkingFields | None = None
    output_config: OutputConfig | None = None
    # Accepted from Anthropic's clients, without effect here.
    cache_control: Any = None
    container: Any = None
    context_management: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    metadata: Any = None
    service_tier: Any = None
    speed: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None


class CountFields(ConversationFields):
    """The body of a request to count tokens."""


class MessageFields(ConversationFields, EngineFields):
    """The body of a request."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = None
    prediction: PredictionFields | None = None
