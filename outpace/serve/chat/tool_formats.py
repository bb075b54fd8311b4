"""Tool formats: how models write calls. Each is recognised by what the chat template shows.

A format has a reader of calls, and a grammar for replies that must contain some.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Collection, Sequence as Seq
from dataclasses import dataclass
from typing import Any

from outpace.errors import unknown
from outpace.serve.chat.conversation import ToolSpec
from outpace.serve.chat.tool_readers import LeadingReader, ListReader, MarkedReader, ToolReader

Term = Callable[[str], str]  # a text as a term of a Lark grammar
Texts = tuple[str, ...]
# As templates write calls: without it, a model may write white space for ever.
SPACING = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
SHORT_ID = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolFormat:
    """A way to write calls. A mark that may be a token of its own is a text of its own here."""

    name: str
    shown_by: Texts  # texts of a chat template, any of which shows this format
    reader_class: type[ToolReader]
    unless: str = "\0"  # a text that shows another format
    opening: Texts = ()  # before all calls
    begin: Texts = ()  # of each call
    end: Texts = ()
    between: Texts = ()
    closing: Texts = ()
    arguments: str = "arguments"  # the name of this member
    apart: Texts = ()  # between name and arguments, if they are not members of an object
    id_length: int | None = None  # None: ids like OpenAI's

    def shows(self, template: str) -> bool:
        return any(text in template for text in self.shown_by) and self.unless not in template

    def reader(self, names: Collection[str]) -> ToolReader:
        return self.reader_class(names, self.new_id)

    def new_id(self) -> str:
        if self.id_length is None:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(SHORT_ID) for _ in range(self.id_length))

    @property
    def marks(self) -> Texts:
        """The texts that a decoder might leave out, because they are special tokens."""
        return tuple(text for text in (*self.opening, *self.begin, *self.apart, *self.end) if len(text) > 1)

    def rules(self, tools: Seq[ToolSpec], several: bool, term: Term) -> str:
        """Return the rules of a Lark grammar for the rule `calls`."""

        def spelled(texts: Texts) -> str:
            return " ".join(map(term, texts))

        call = self._apart(tools, spelled) if self.apart else f"%json {json.dumps(self._schema(tools))}"
        more = f"({spelled(self.between)} call)*" if several else ""
        return (
            f"calls: {spelled(self.opening)} call {more} {spelled(self.closing)}\n"
            f"call: {spelled(self.begin)} made {spelled(self.end)}\nmade: {call}\n"
        )

    def _apart(self, tools: Seq[ToolSpec], spelled: Callable[[Texts], str]) -> str:
        each = [f"{spelled((tool.name, *self.apart))} %json {json.dumps(tool.schema | SPACING)}" for tool in tools]
        return " | ".join(each)

    def _schema(self, tools: Seq[ToolSpec]) -> dict[str, Any]:
        each: list[dict[str, Any]] = [
            {
                "type": "object",
                "properties": {"name": {"const": tool.name}, self.arguments: tool.schema},
                "required": ["name", self.arguments],
                "additionalProperties": False,
            }
            for tool in tools
        ]
        return (each[0] if len(each) == 1 else {"anyOf": each}) | SPACING


_FORMATS = (
    ToolFormat(
        "mistral", ("[ARGS]",), ListReader, begin=("[TOOL_CALLS]",), apart=("[ARGS]",), id_length=9,
    ),
    ToolFormat(
        "mistral_list", ("[TOOL_CALLS]",), ListReader, opening=("[TOOL_CALLS]", "["), between=(", ",), closing=("]",),
        id_length=9,
    ),
    ToolFormat(
        "hermes", ("<tool_call>",), MarkedReader, unless="<function=", begin=("<tool_call>", "\n"),
        end=("\n", "</tool_call>"), between=("\n",),
    ),
    ToolFormat(
        "llama3", ("<|python_tag|>", '"parameters": dictionary'), LeadingReader, between=("; ",),
        arguments="parameters",
    ),
)  # fmt: skip
TOOL_FORMATS = {known.name: known for known in _FORMATS}


def format_of(template: str, name: str | None = None) -> ToolFormat | None:
    """Return the format of this name, or the one that a chat template shows; None if it shows no known one."""
    if name is not None and name not in TOOL_FORMATS:
        raise unknown("tool format", name, TOOL_FORMATS)
    if name is not None:
        return TOOL_FORMATS[name]
    return next((known for known in TOOL_FORMATS.values() if known.shows(template)), None)
