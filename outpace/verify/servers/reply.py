"""Parsing of an OpenAI-compatible server's answers, from the completions or the chat endpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outpace.errors import OutpaceError

TOKEN_ID = "token_id:"  # prefix of vLLM's tokens when ids are requested in place of strings


@dataclass(frozen=True)
class Token:
    """One token of an answer, and the logprobs of the other tokens at its position."""

    text: str
    logprob: float | None
    top: dict[str, float]  # logprobs of the likeliest tokens there, by their text

    @property
    def blank(self) -> bool:
        """Whether the logprob was not filled in: 0.0, and no other token beside it."""
        return self.logprob is None or (self.logprob == 0 and not any(self.top.values()))


@dataclass(frozen=True)
class Reply:
    """One answer."""

    text: str
    tokens: list[Token] | None  # None: the server shows no tokens
    ids: list[int] | None
    prompt_ids: list[int] | None
    finish_reason: str | None
    counted: int | None  # tokens of the answer, by the server's own count
    chat: bool  # whether it came from the chat endpoint
    accepted: int | None = None  # accepted draft tokens, if the server reports them

    @property
    def logprobs(self) -> list[float | None]:
        """Logprobs of the chosen tokens; None if not filled in."""
        return [None if token.blank else token.logprob for token in self.tokens or []]

    @property
    def length(self) -> int | None:
        """Number of tokens of the answer, if the server shows it."""
        shown = self.ids if self.ids is not None else self.tokens
        return self.counted if shown is None else len(shown)


def parse(data: Any, chat: bool) -> list[Reply]:
    """All answers of a response."""
    try:
        counted = (data.get("usage") or {}).get("completion_tokens")
        choices = data["choices"]
        return [_reply(choice, data, counted if len(choices) == 1 else None, chat) for choice in choices]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise OutpaceError(f"the answer does not follow OpenAI's API: {str(data)[:200]}") from error


def _reply(choice: dict[str, Any], data: dict[str, Any], counted: int | None, chat: bool) -> Reply:
    if chat:
        message = choice["message"]
        parts = [message.get("reasoning_content") or message.get("reasoning"), message.get("content")]
        text = "".join(part for part in parts if part)
    else:
        text = choice["text"]
    if not isinstance(text, str):
        raise TypeError("the text is not a string")
    tokens, ids = _tokens(choice.get("logprobs") or {})
    ids = choice.get("token_ids") or ids
    if ids is not None and tokens is not None and len(ids) != len(tokens):
        ids = None  # ids and tokens cannot be paired by position
    prompt_ids = choice.get("prompt_token_ids") or data.get("prompt_token_ids")
    return Reply(text, tokens, ids, prompt_ids, choice.get("finish_reason"), counted, chat, _accepted(data))


def _accepted(data: dict[str, Any]) -> int | None:
    """Read the accepted tokens from llama.cpp, or from vLLM with --per-request-spec-decode-metrics."""
    vllm = (data.get("metrics") or {}).get("speculative_decoding") or {}
    return (data.get("timings") or {}).get("draft_n_accepted", vllm.get("num_accepted_draft_tokens"))


def _tokens(shown: dict[str, Any]) -> tuple[list[Token] | None, list[int] | None]:
    """Parse the tokens and, if shown, their ids."""
    if shown.get("content"):  # format of chats; llama.cpp uses it for completions too
        entries = shown["content"]
        tops = [{other["token"]: other["logprob"] for other in entry.get("top_logprobs") or []} for entry in entries]
        tokens = [Token(e["token"], e["logprob"], top) for e, top in zip(entries, tops, strict=True)]
        ids = [entry.get("id") for entry in entries]
    elif shown.get("tokens"):
        every = shown.get("top_logprobs") or [{}] * len(shown["tokens"])
        rows = zip(shown["tokens"], shown["token_logprobs"], every, strict=True)
        tokens = [Token(text, logprob, top or {}) for text, logprob, top in rows]
        ids = [None] * len(tokens)
    else:
        return None, None
    if all(token.text.startswith(TOKEN_ID) for token in tokens):
        ids = [int(token.text.removeprefix(TOKEN_ID)) for token in tokens]
    return tokens, ids if all(token is not None for token in ids) else None
