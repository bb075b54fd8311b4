"""ChatFormat: the chat template of a served model: prompts from conversations, and how to read the replies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outpace.api.model import Model
from outpace.errors import UsageError
from outpace.serve.chat.constraint import request_fields
from outpace.serve.chat.conversation import Conversation
from outpace.serve.chat.output import TextReading
from outpace.serve.chat.reasoning import marks_of
from outpace.serve.chat.tool_formats import format_of
from outpace.serve.web.failures import bad_field

# What a request may not set: these are parameters of the renderer, or decided by other fields.
RESERVED = frozenset({
    "conversation", "conversations", "chat_template", "tools", "documents", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "sanitize_control_tokens", "tokenizer_kwargs", "messages",
})  # fmt: skip


@dataclass(frozen=True)
class ChatPrompt:
    """The tokens of a prompt, how to read what follows it, and further fields of its request."""

    tokens: list[int]
    text: str
    reading: TextReading
    fields: dict[str, Any]


class ChatFormat:
    """What the chat template of a model shows."""

    def __init__(self, model: Model, tool_format: str | None = None):
        self.model = model
        self.template = _source(getattr(model.tokenizer, "chat_template", None))
        self.has_tools = "tools" in self.template
        self.marks = marks_of(self.template)
        self.tools = format_of(self.template, tool_format)

    def prompt(self, conversation: Conversation) -> ChatPrompt:
        """Render a conversation, and say how its reply is to be read."""
        if conversation.tools:
            self._check_tools(conversation)
        text = self._render(conversation)
        tokenizer: Any = self.model.tokenizer
        reading = self._reading(conversation, text)
        compiler = self.model.grammar_compiler(self.model.stop_token_ids)
        fields = request_fields(conversation, reading, compiler)
        if self._hides_marks(reading):
            fields["skip_special_tokens"] = False
        return ChatPrompt(tokenizer.encode(text, add_special_tokens=False), text, reading, fields)

    def _check_tools(self, conversation: Conversation) -> None:
        names = [tool.name for tool in conversation.tools]
        if len(set(names)) < len(names):
            raise bad_field("tools", "two tools have the same name")
        if conversation.tool_use.name not in (None, *names):
            raise bad_field("tool_choice", f"there is no tool {conversation.tool_use.name!r}")
        if not self.has_tools:
            raise bad_field("tools", "this model's chat template has no tools")
        if self.tools is None:
            raise bad_field("tools", "the chat template shows no known tool format; serve the model with --tool-format")

    def _render(self, conversation: Conversation) -> str:
        if self.model.tokenizer is None or not self.template:
            raise UsageError("this model has no chat template: use /v1/completions")
        reserved = sorted(RESERVED & conversation.template_values.keys())
        if reserved:
            raise bad_field("chat_template_kwargs", f"{reserved[0]!r} cannot be set by a request")
        tools = [tool.for_template() for tool in conversation.tools] if conversation.tool_use.mode != "none" else []
        tokenizer: Any = self.model.tokenizer
        try:
            text = tokenizer.apply_chat_template(
                conversation.messages,
                tokenize=False,
                add_generation_prompt=conversation.opens and not conversation.continues,
                **({"continue_final_message": True} if conversation.continues else {}),
                **({"tools": tools} if tools else {}),
                **self._hints(conversation),
                **conversation.template_values,
            )
        except Exception as error:  # whatever a template's own code raises about messages that it does not take
            raise bad_field("messages", f"the chat template refuses them: {error}") from error
        return str(text)

    def _hints(self, conversation: Conversation) -> dict[str, Any]:
        hints = conversation.hints.items()
        return {k: v for k, v in hints if k in self.template and k not in conversation.template_values}

    def _reading(self, conversation: Conversation, text: str) -> TextReading:
        tools = self.tools if conversation.offered else None
        names = frozenset(tool.name for tool in conversation.offered)
        if self.marks is None:
            return TextReading(tools=tools, names=names)
        end = text.rstrip()
        if conversation.continues:
            inside = text.rfind(self.marks.open) > text.rfind(self.marks.close)
            marks = self.marks if inside else None  # what is continued is past its reasoning
            return TextReading(marks, inside, tools, names)
        marks = None if end.endswith(self.marks.close) else self.marks  # reasoning is switched off in this prompt
        return TextReading(marks, end.endswith(self.marks.open), tools, names)

    def _hides_marks(self, reading: TextReading) -> bool:
        """Whether a mark that the reader looks for is a special token, which the text would leave out."""
        marks = [*(reading.marks or ()), *(reading.tools.marks if reading.tools else ())]
        tokenizer: Any = self.model.tokenizer
        special = set(getattr(tokenizer, "all_special_ids", ()))
        return any(
            len(tokens := tokenizer.encode(mark, add_special_tokens=False)) == 1 and tokens[0] in special
            for mark in marks
        )


def _source(template: Any) -> str:
    """Return the text of a template; of several named ones, the one with tools."""
    if isinstance(template, Mapping):
        return str(template.get("tool_use") or template.get("default") or "")
    return str(template or "")
