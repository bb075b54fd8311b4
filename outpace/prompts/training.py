"""Training prompts from files in Outpace's format, or as GSM8K, MBPP, Alpaca, UltraChat and ShareGPT publish them.

Answers in a file are ignored: training uses the target's own answers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from outpace.errors import UsageError
from outpace.prompts import tasks
from outpace.prompts.tasks import Prompt

TEXTS = ("question", "instruction", "problem", "query", "text")  # other datasets' names for "prompt"
CHATS = ("messages", "conversations")
ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's


class Shard(NamedTuple):
    """One worker's share of the work: every `of`-th item, starting with item `number`."""

    number: int = 1
    of: int = 1

    @classmethod
    def parse(cls, given: str) -> Shard:
        number, slash, of = given.partition("/")
        if not slash or not (number.isdecimal() and of.isdecimal()) or not 1 <= int(number) <= int(of):
            raise UsageError(f"{given!r} is not a shard: 2/8 is the second of eight")
        return cls(int(number), int(of))

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def share(self, count: int) -> int:
        """Return how many of `count` items belong to this worker."""
        return len(range(self.number - 1, count, self.of))


def load(paths: Iterable[str | Path], limit: int | None = None) -> list[Prompt]:
    """Load the prompts of these files without duplicates, at most `limit` of each file."""
    found = {digest(prompt): prompt for path in paths for prompt in tasks.read(path, _prompt)[:limit]}
    return list(found.values())


def digest(prompt: Prompt) -> str:
    """Return an id that depends only on the prompt's text, so prompts may be added to a file or reordered any time."""
    content = json.dumps([list(map(dict, prompt.messages)), prompt.turns], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _prompt(given: dict[str, Any], number: int) -> Prompt:
    named = [key for key in ("prompt", "turns", *CHATS, *TEXTS) if key in given]
    if not named:
        known = ", ".join(f'"{key}"' for key in ("prompt", "turns", *CHATS, *TEXTS))
        raise ValueError(f"has none of the fields that hold a prompt ({known})")
    if named[0] in CHATS:
        return _chat(given[named[0]], number)
    content = given[named[0]]
    if isinstance(more := given.get("input"), str) and more.strip():  # Alpaca's input to the instruction
        content = f"{content}\n\n{more}"
    return tasks.prompt_of({"turns" if named[0] == "turns" else "prompt": content, "id": number}, number)


def _chat(messages: Any, number: int) -> Prompt:
    """Make a prompt from the system and user messages of a chat."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("a chat must be a list of objects with a role and a text")
    pairs = [_role_and_text(message) for message in messages]
    turns = [text for role, text in pairs if role == "user"]
    system = tuple({"role": role, "content": text} for role, text in pairs if role == "system")
    return replace(tasks.prompt_of({"turns": turns}, number), messages=system)


def _role_and_text(message: dict[str, Any]) -> Seq[str]:
    role, text = message.get("role", message.get("from")), message.get("content", message.get("value"))
    role = ROLES.get(str(role), role)
    if role not in ("system", "user", "assistant") or not isinstance(text, str):
        raise ValueError(f'a chat message needs a text and the role "system", "user" or "assistant": {message!r:.80}')
    return role, text
