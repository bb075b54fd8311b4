"""OutputReader: turns the text of a reply into parts as it comes: reasoning, content, tool calls."""

from __future__ import annotations

from dataclasses import dataclass

from outpace.serve.chat.parts import ContentText, OutputPart
from outpace.serve.chat.reasoning import ReasoningMarks, ReasoningReader
from outpace.serve.chat.tool_formats import ToolFormat
from outpace.serve.chat.tool_readers import ToolReader


@dataclass(frozen=True)
class TextReading:
    """How the text of a reply is to be read; by default all of it is content."""

    marks: ReasoningMarks | None = None
    inside: bool = False  # the reply begins with reasoning, without the first mark
    tools: ToolFormat | None = None
    names: frozenset[str] = frozenset()  # of the tools


class OutputReader:
    """Reads the text of one reply."""

    def __init__(self, reading: TextReading):
        self._reasoning = None if reading.marks is None else ReasoningReader(reading.marks, reading.inside)
        self._tools = None if reading.tools is None else reading.tools.reader(reading.names)

    def push(self, text: str) -> list[OutputPart]:
        parts: list[OutputPart] = [ContentText(text)] if text else []
        if self._reasoning is not None:
            parts = self._reasoning.push(text)
        return parts if self._tools is None else _with_calls(self._tools, parts)

    def finish(self) -> list[OutputPart]:
        """Return what was held back."""
        parts = [] if self._reasoning is None else self._reasoning.finish()
        return parts if self._tools is None else [*_with_calls(self._tools, parts), *self._tools.finish()]


def _with_calls(tools: ToolReader, parts: list[OutputPart]) -> list[OutputPart]:
    out: list[OutputPart] = []
    for part in parts:
        out += tools.push(part.text) if isinstance(part, ContentText) else [part]
    return out
