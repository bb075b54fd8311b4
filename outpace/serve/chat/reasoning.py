"""Reasoning: the marks around it, as a chat template shows them, and a reader that splits text there."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from outpace.serve.chat.parts import ContentText, OutputPart, ReasoningText
from outpace.text import overlap


class ReasoningMarks(NamedTuple):
    """The texts before and after reasoning."""

    open: str
    close: str


MARKS = (ReasoningMarks("<think>", "</think>"), ReasoningMarks("[THINK]", "[/THINK]"))


def marks_of(template: str) -> ReasoningMarks | None:
    """Return the marks that a chat template shows, if any."""
    return next((marks for marks in MARKS if marks.close in template or marks.open in template), None)


class ReadingStage(Enum):
    """Where in the output the next text stands."""

    BEGIN = auto()
    REASONING = auto()
    BETWEEN = auto()
    CONTENT = auto()


class ReasoningReader:
    """Splits text that comes in pieces. Reasoning comes first or not at all; line breaks around it are left out."""

    def __init__(self, marks: ReasoningMarks, inside: bool):
        self.marks = marks
        self._stage = ReadingStage.REASONING if inside else ReadingStage.BEGIN
        self._text = ""  # not given out yet
        self._said = False  # some reasoning was given out

    def push(self, text: str) -> list[OutputPart]:
        self._text += text
        out: list[OutputPart] = []
        while self._step(out):
            pass
        return out

    def finish(self) -> list[OutputPart]:
        """Return what was held back, because it might have become a mark."""
        text, self._text = self._text, ""
        if self._stage is ReadingStage.REASONING:
            text = text.strip("\n") if not self._said else text.rstrip("\n")
            return [ReasoningText(text)] if text else []
        return [ContentText(text)] if text and self._stage is not ReadingStage.BETWEEN else []

    def _step(self, out: list[OutputPart]) -> bool:
        """Take one part from the text, or move to the next stage; return False if more text is needed."""
        if not self._text:
            return False
        if self._stage is ReadingStage.BEGIN:
            return self._begin()
        if self._stage is ReadingStage.REASONING:
            return self._reason(out)
        if self._stage is ReadingStage.BETWEEN:
            self._text = self._text.lstrip("\n")
            if self._text:
                self._stage = ReadingStage.CONTENT
            return bool(self._text)
        out.append(ContentText(self._text))
        self._text = ""
        return False

    def _begin(self) -> bool:
        start = self._text.lstrip()
        if start.startswith(self.marks.open):
            self._text, self._stage = start.removeprefix(self.marks.open), ReadingStage.REASONING
        elif self.marks.open.startswith(start):
            return False
        else:
            self._stage = ReadingStage.CONTENT
        return True

    def _reason(self, out: list[OutputPart]) -> bool:
        if not self._said:
            self._text = self._text.lstrip("\n")
        thought, close, rest = self._text.partition(self.marks.close)
        held = len(thought) - len(thought.rstrip("\n")) if close else 0
        if not close:
            kept = thought[: len(thought) - overlap(thought, self.marks.close)].rstrip("\n")
            held = len(thought) - len(kept)
        said, left = thought[: len(thought) - held], thought[len(thought) - held :]
        if said:
            out.append(ReasoningText(said))
            self._said = True
        self._text = rest if close else left
        if close:
            self._stage = ReadingStage.BETWEEN
        return bool(close)
