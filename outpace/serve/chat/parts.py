"""Parts: the pieces of which the output of a chat consists, in the order in which they come."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ContentText:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True)
class ReasoningText:
    """Text between the marks of reasoning."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """The beginning of a tool call, once its name is known."""

    index: int  # among the calls of the answer
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


OutputPart = ContentText | ReasoningText | CallStart | CallArguments


@dataclass
class ToolCall:
    """A whole call."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Output:
    """Everything that an answer contains."""

    parts: list[OutputPart] = field(default_factory=list)

    @property
    def content(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, ContentText))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, ReasoningText))

    @property
    def calls(self) -> list[ToolCall]:
        found: list[ToolCall] = []
        for part in self.parts:
            if isinstance(part, CallStart):
                found.append(ToolCall(part.id, part.name))
            elif isinstance(part, CallArguments):
                found[part.index].arguments += part.text
        return found
