"""CallReader: reads the JSON object of a tool call as it comes, so that its arguments can be streamed."""

from __future__ import annotations

import json
from enum import Enum, auto

NAME = "name"
ARGUMENTS = ("arguments", "parameters")


class JsonPlace(Enum):
    """Where in the object the next character stands."""

    BEFORE = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    AFTER_VALUE = auto()
    END = auto()
    BROKEN = auto()  # this is no call


class CallReader:
    """Reads `{"name": ..., "arguments": {...}}`, in any order and with further members, which are left out.

    With a `name`, only the arguments are read.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.raw = ""  # everything read so far
        self._bare = name is not None
        self._place = JsonPlace.VALUE if self._bare else JsonPlace.BEFORE
        self._key, self._value = ARGUMENTS[0] if self._bare else "", ""
        self._depth = 0  # of brackets inside the value
        self._quoted = self._escaped = False
        self._arguments = ""  # known so far
        self._taken = 0

    @property
    def done(self) -> bool:
        return self._place is JsonPlace.END

    @property
    def broken(self) -> bool:
        return self._place is JsonPlace.BROKEN or (self.done and self.name is None)

    def push(self, text: str) -> str:
        """Read on; return the text after the object."""
        for at, character in enumerate(text):
            if self._place in (JsonPlace.END, JsonPlace.BROKEN):
                return text[at:]
            self.raw += character
            self._read(character)
        return ""

    def take_arguments(self) -> str:
        """Return the arguments that were not taken yet; without any, an empty object at the end."""
        if self.done and not self._arguments:
            self._arguments = "{}"
        start, self._taken = self._taken, len(self._arguments)
        return self._arguments[start:]

    def _read(self, character: str) -> None:
        if self._place is JsonPlace.IN_KEY:
            self._key += character
            if self._ends_string(character):
                self._place = JsonPlace.COLON
        elif self._place is JsonPlace.IN_VALUE:
            self._read_value(character)
        elif character.isspace():
            return
        elif self._place is JsonPlace.BEFORE and character == "{":
            self._place = JsonPlace.KEY
        elif self._place is JsonPlace.KEY and character == '"':
            self._key, self._place, self._quoted = character, JsonPlace.IN_KEY, True
        elif self._place is JsonPlace.KEY and character == "}":
            self._place = JsonPlace.END
        elif self._place is JsonPlace.COLON and character == ":":
            self._place = JsonPlace.VALUE
        elif self._place is JsonPlace.VALUE and character not in ",}]":
            self._value, self._depth, self._quoted, self._place = "", 0, False, JsonPlace.IN_VALUE
            self._read_value(character)
        elif self._place is JsonPlace.AFTER_VALUE and character in ",}":
            self._place = JsonPlace.KEY if character == "," else JsonPlace.END
        else:
            self._place = JsonPlace.BROKEN

    def _ends_string(self, character: str) -> bool:
        """Follow the characters of a string; return whether this one ends it."""
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._quoted = False
        return not self._quoted

    def _read_value(self, character: str) -> None:
        if not self._quoted and not self._depth and character in ",}" and self._value:  # the end of a number or a word
            self._end_value()
            self._place = JsonPlace.KEY if character == "," else JsonPlace.END
            return
        self._value += character
        if self._quoted:
            if self._ends_string(character) and not self._depth:
                self._end_value()
        elif character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if not self._depth:
                self._end_value()
        if self._value[:1] == "{" and self._is_arguments and self._place is JsonPlace.IN_VALUE:
            self._arguments = self._value

    @property
    def _is_arguments(self) -> bool:
        return self._key.strip('"') in ARGUMENTS

    def _end_value(self) -> None:
        self._place = JsonPlace.END if self._bare else JsonPlace.AFTER_VALUE
        try:
            value = json.loads(self._value)
        except ValueError:
            self._place = JsonPlace.BROKEN
            return
        if self._key == f'"{NAME}"' and isinstance(value, str):
            self.name = value
        elif self._is_arguments and value is not None:
            # Some models write the arguments as a string that contains JSON.
            self._arguments = value if isinstance(value, str) else self._value
