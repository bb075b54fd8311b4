"""Fields of /tokenize and /detokenize, by vLLM's names."""

from __future__ import annotations

from typing import Any

from outpace.serve.surfaces.chat_fields import ChatMessage, ToolFields
from outpace.serve.surfaces.engine_fields import StrictFields


class TokenizeFields(StrictFields):
    """A text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[ToolFields] | None = None
    add_special_tokens: bool | None = None  # default: true for a text
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = False


class DetokenizeFields(StrictFields):
    """Tokens."""

    model: str | None = None
    tokens: list[int]
