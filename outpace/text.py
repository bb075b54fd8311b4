"""Prompts to tokens, tokens to text."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence as Seq
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol, TypeAlias

from outpace.errors import UsageError

Message: TypeAlias = Mapping[str, Any]  # {"role": "user", "content": "..."}
Prompt: TypeAlias = str | Seq[Message] | Seq[int]  # text, a chat, or token ids
WINDOW = 8  # tokens decoded together; moving the window at every token would decode each token twice


class Tokenizer(Protocol):
    """The methods of a Transformers tokenizer that Outpace uses."""

    chat_template: Any

    def __len__(self) -> int: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str: ...


def is_chat(prompt: Any) -> bool:
    """Return True for a list of messages."""
    return isinstance(prompt, Seq) and bool(prompt) and all(isinstance(p, Mapping) for p in prompt)


def is_ids(prompt: Any) -> bool:
    """Return True for a list of token ids."""
    return isinstance(prompt, Seq) and not isinstance(prompt, str) and all(isinstance(p, Integral) for p in prompt)


def encode(prompt: Prompt, tokenizer: Tokenizer | None, vocab: int) -> list[int]:
    """Return the token ids of a prompt: text, a chat, or token ids."""
    if isinstance(prompt, str) or is_chat(prompt):
        if tokenizer is None:
            raise UsageError("this model has no tokenizer: pass token ids, or pass a tokenizer to wrap()")
        tokens = tokenizer.encode(prompt) if isinstance(prompt, str) else _encode_chat(prompt, tokenizer)
    elif is_ids(prompt):
        tokens = [int(token) for token in prompt]  # type: ignore[arg-type]
    else:
        raise UsageError(f"a prompt must be text, messages or a list of token ids, not {type(prompt).__name__}")
    if not tokens:
        raise UsageError("the prompt is empty: the model needs at least one token to start from")
    wrong = [token for token in tokens if not 0 <= token < vocab]
    if wrong:
        raise UsageError(f"the prompt contains token {wrong[0]}, but the vocabulary ends at {vocab - 1}")
    return tokens


def _encode_chat(messages: Any, tokenizer: Any) -> list[int]:
    if not tokenizer.chat_template:
        raise UsageError("this model has no chat template: pass the prompt as text")
    out = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=True)
    return list(out["input_ids"] if isinstance(out, Mapping) else out)


class Detokenizer:
    """Turn tokens into text one by one; the bytes of an incomplete character are held back."""

    def __init__(self, tokenizer: Tokenizer, hidden: Collection[int] | None = None):
        self.tokenizer = tokenizer
        self.hidden = hidden  # tokens without text; None: all special tokens
        self.tokens: list[int] = []
        self.start = 0  # decoding starts here, early enough for tokens whose text depends on the previous one
        self.done = 0  # the text of all tokens before this one has been returned
        self._last = 0  # first of the tokens whose text was returned last
        self._given = ""  # text from `start` to `done`

    def push(self, token: int) -> str:
        """Add a token and return the text that it completes."""
        self.tokens.append(token)
        text = self._decode(self.start, len(self.tokens))
        if len(text) <= len(self._given) or text.endswith("\ufffd"):
            return ""
        new = text[len(self._given) :]
        self._last, self.done, self._given = self.done, len(self.tokens), text
        if self.done - self.start >= WINDOW:
            self.start, self._given = self._last, self._decode(self._last, self.done)
        return new

    def flush(self) -> str:
        """Return the remaining text at the end, incomplete characters included."""
        text, given = self._decode(self.start, len(self.tokens)), self._given
        self.start = self.done = self._last = len(self.tokens)
        self._given = ""
        return text[len(given) :]

    def _decode(self, start: int, end: int) -> str:
        tokens = self.tokens[start:end]
        if self.hidden is None:
            return self.tokenizer.decode(tokens, skip_special_tokens=True)
        return self.tokenizer.decode([token for token in tokens if token not in self.hidden])


@dataclass(frozen=True)
class TextSpan:
    """A piece of text and the index of the generated token that completed it."""

    text: str
    token: int


class TextStream:
    """The text of a sequence, cut just before a stop string; `take` holds back text that may become a stop string."""

    def __init__(
        self, tokenizer: Tokenizer, stops: Seq[str] = (), min_tokens: int = 0, hidden: Collection[int] | None = None
    ):
        if any(not stop for stop in stops):
            raise UsageError("a stop string is empty")
        self.detokenizer = Detokenizer(tokenizer, hidden)
        self.stops = tuple(stops)
        self.min_tokens = min_tokens
        self.text = ""
        self.stopped = False
        self.stop: str | None = None  # the stop string that ended the text
        self._checked = 0  # no stop string ends at or before this character
        self._taken = 0
        self._ends: list[int] = []  # length of the text after each token

    def push(self, token: int) -> None:
        if not self.stopped:
            self._extend(self.detokenizer.push(token))
        self._ends.append(len(self.text))

    def tokens_in(self, characters: int) -> int:
        """Return how many tokens complete the first characters of the text."""
        return bisect_left(self._ends, characters) + 1 if characters else 0

    def texts(self, start: int, end: int) -> list[str]:
        """Return the text that each of these tokens completed; a character belongs to the token of its last byte."""
        ends = [0, *self._ends]
        return [self.text[ends[i] : ends[i + 1]] for i in range(start, end)]

    def finish(self) -> None:
        """End the stream: text that was held back becomes final."""
        if not self.stopped:
            self._extend(self.detokenizer.flush())
            self.stops = ()
        if self._ends:
            self._ends[-1] = len(self.text)

    def _extend(self, piece: str) -> None:
        self.text += piece
        if len(self.detokenizer.tokens) < self.min_tokens:
            self._checked = len(self.text)
            return
        found = []
        for stop in self.stops:
            at = self.text.find(stop, max(0, self._checked - len(stop) + 1))
            if at >= 0:
                found.append((at + len(stop), at, stop))
        self._checked = len(self.text)
        if found:
            # The stop string that was completed first cuts the text, as it would when checked after every token.
            _, at, self.stop = min(found)
            self.text, self.stopped = self.text[:at], True

    def take(self) -> list[TextSpan]:
        """Return the final text not yet taken, split by the token that completed each part."""
        held = 0 if self.stopped else max((overlap(self.text, stop) for stop in self.stops), default=0)
        start, end = self._taken, max(self._taken, len(self.text) - held)
        spans = []
        for token in range(bisect_right(self._ends, start), len(self._ends)):
            upto = min(end, self._ends[token])
            if upto > start:
                spans.append(TextSpan(self.text[start:upto], token))
                start = upto
        self._taken = end
        return spans


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def first_difference(a: Seq[Any], b: Seq[Any]) -> int | None:
    """Return the first index at which two texts or token lists differ; None if they are equal."""
    if len(a) == len(b) and all(x == y for x, y in zip(a, b, strict=True)):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
