"""Conversation: what a chat asks for, whatever the API; the messages are those that chat templates read."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class ToolSpec:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)  # as a JSON schema

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of its arguments."""
        return self.parameters or {"type": "object", "properties": {}}

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates read it."""
        function = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolUse:
    """Whether tools must be called, which ones, and how many."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None  # only this tool
    several: bool = True  # whether more than one call is allowed


@dataclass(frozen=True)
class OutputRule:
    """What the content must follow: one of three kinds of source."""

    json_schema: dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The rule as fields of a request."""
        return {name: source for name, source in vars(self).items() if source is not None}


@dataclass(frozen=True)
class Conversation:
    """Messages with tools and rules for the reply."""

    messages: list[dict[str, Any]]
    tools: list[ToolSpec] = field(default_factory=list)
    tool_use: ToolUse = field(default_factory=ToolUse)
    rule: OutputRule | None = None
    continues: bool = False  # the reply continues the last message
    opens: bool = True  # the prompt ends with the opening of a reply
    template_values: dict[str, Any] = field(default_factory=dict)  # further variables of the template
    hints: dict[str, Any] = field(default_factory=dict)  # more of them, for templates that know them

    @property
    def offered(self) -> list[ToolSpec]:
        """The tools that this reply may call."""
        if self.tool_use.mode == "none":
            return []
        return [tool for tool in self.tools if self.tool_use.name in (None, tool.name)]


def call_for_template(id: str | None, name: str, given: str | dict[str, Any] | None) -> dict[str, Any]:
    """Return a call as chat templates read it, with its arguments as an object."""
    arguments: Any = given or {}
    if isinstance(arguments, str):
        with suppress(ValueError):  # otherwise the model wrote them so, and the template shows them so
            arguments = json.loads(arguments)
    return {"id": id or "", "type": "function", "function": {"name": name, "arguments": arguments}}
