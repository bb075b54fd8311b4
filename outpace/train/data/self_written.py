"""Prompts that a model writes itself, as in Magpie: it continues its chat template where the user's text begins."""

from __future__ import annotations

from typing import Any, NamedTuple

from outpace.api.model import Model
from outpace.api.stream import Completion
from outpace.errors import UnsupportedModel, UsageError

MARK = "~what the user says~"


class ChatOpening(NamedTuple):
    """The start of a conversation up to the user's text, and what ends the user's turn."""

    tokens: list[int]
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...]
    special: frozenset[int]  # special tokens, which no user writes


def opening(model: Model, system: str | None = None) -> ChatOpening:
    """Return the model's chat template up to the user's text, with this system message."""
    tokenizer: Any = model.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError(
            f"{model.name} has no chat template, so it cannot write prompts itself: pass some with --prompts"
        )
    chat = [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": MARK}]
    spelled = tokenizer.apply_chat_template(chat, add_generation_prompt=False, tokenize=False)
    before, found, after = spelled.partition(MARK)
    tokens = tokenizer.encode(before, add_special_tokens=False)
    if not found or not tokens:
        raise UnsupportedModel(f"the chat template of {model.name} has nothing before the user's text to continue from")
    special = frozenset(token for token, added in tokenizer.added_tokens_decoder.items() if added.special)
    closing = tokenizer.encode(after, add_special_tokens=False)[:1]
    if special.issuperset(closing):
        return ChatOpening(tokens, tuple(closing), (), special)
    return ChatOpening(tokens, (), (after.strip(),) if after.strip() else (), special)


def flaw(written: Completion, start: ChatOpening) -> str | None:
    """Why this text is unusable as a user's message; None if it is usable."""
    if written.error is not None:
        return written.error
    if written.finish_reason != "stop":
        return "does not end"
    if not start.special.isdisjoint(written.tokens[:-1]) or "\ufffd" in written.text:
        return "is not plain text"
    return None if written.text.strip() else "is empty"
