"""A client for OpenAI-compatible servers.

Servers differ in the fields that they accept. A request contains everything that makes answers comparable: logprobs,
token ids, and neutral values of settings for which a server may have its own defaults. Once a server's error names an
optional field, later requests omit it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from outpace.errors import OutpaceError, UsageError
from outpace.sampling.settings import Sampling
from outpace.verify.servers.reply import Reply, parse

COMPLETIONS, CHAT, MODELS = "/v1/completions", "/v1/chat/completions", "/v1/models"
TOP = 5  # logprobs per token: the maximum of OpenAI's completions
REFUSALS = (400, 422)
NEUTRAL: dict[str, Any] = {
    "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}  # fmt: skip
IDS = {"return_token_ids": True}  # from vLLM; other servers ignore or refuse it
LOGPROBS = {"logprobs", "top_logprobs"}
OPTIONAL = NEUTRAL.keys() | IDS.keys() | LOGPROBS


class HTTPFailure(OutpaceError):
    """The server answered with an error."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status

    @property
    def refusal(self) -> bool:
        """Whether the server refused the request, rather than failed."""
        return self.status in (*REFUSALS, 501)


@dataclass
class ServerTraits:
    """What earlier answers have shown about a server."""

    model: str | None = None
    chat: bool = False
    refused_fields: set[str] = field(default_factory=set)  # fields that the server refuses


@dataclass(frozen=True)
class Server:
    """An OpenAI-compatible server; the fields of `extra` override those of every request."""

    url: str
    model: str | None = None  # None: the first one that the server lists
    api_key: str | None = field(default=None, repr=False)  # None: from OPENAI_API_KEY
    extra: dict[str, Any] = field(default_factory=dict)
    timeout: float = 120.0
    learned: ServerTraits = field(default_factory=ServerTraits, init=False, repr=False, compare=False)

    @property
    def base(self) -> str:
        url = self.url if "://" in self.url else f"http://{self.url}"
        return url.rstrip("/").removesuffix("/v1")

    def complete(self, prompt: str, **fields: Any) -> Reply:
        """Request one answer; `fields` are those of OpenAI's API, and any others that the server accepts."""
        return self.choices(prompt, **fields)[0]

    def many(self, asked: Iterable[tuple[str, dict[str, Any]]], concurrency: int) -> list[Reply]:
        """Request an answer to each prompt with its fields, `concurrency` at a time; answers keep the order."""
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda ask: self.complete(ask[0], **ask[1]), asked))

    def choices(self, prompt: str, **fields: Any) -> list[Reply]:
        """Return all answers of one request, however many the server gives for `n`."""
        while True:
            chat = self.learned.chat
            body = self._body(prompt, fields, chat)
            try:
                replies = parse(self._call(CHAT if chat else COMPLETIONS, body), chat)
            except HTTPFailure as failure:
                self._learn(failure, body.keys() - fields.keys() - self.extra.keys())
                continue
            if not replies:
                raise OutpaceError(f"{self.base} gave no answer (an empty list of choices)")
            return replies

    def _body(self, prompt: str, fields: dict[str, Any], chat: bool) -> dict[str, Any]:
        what: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        optional = {**NEUTRAL, **IDS, **_logprobs(chat)}
        kept = {name: value for name, value in optional.items() if name not in self.learned.refused_fields}
        return {"model": self._model(), **what, **kept, **fields, **self.extra}

    def _learn(self, failure: HTTPFailure, ours: set[str]) -> None:
        """Find which of our own fields to omit from now on; raise the failure if there are none."""
        if failure.status in (404, 405):
            if "messages" in ours:
                hint = f"{COMPLETIONS} is missing too. Give the server's base URL, and a model that it serves"
                raise HTTPFailure(f"{failure}; {hint}", failure.status) from None
            self.learned.chat = True
            return
        refused = {name for name in ours & OPTIONAL if name in str(failure)}
        if failure.status not in REFUSALS or not refused:
            raise failure
        if refused & LOGPROBS:
            refused |= LOGPROBS
        self.learned.refused_fields |= refused

    def _model(self) -> str:
        if self.model is not None:
            return self.model
        if self.learned.model is None:
            listed = self._call(MODELS)
            try:
                self.learned.model = str(listed["data"][0]["id"])
            except (KeyError, IndexError, TypeError) as error:
                raise OutpaceError(f"{self.base}{MODELS} lists no model; give one by name") from error
        return self.learned.model

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the server's JSON answer to a POST, or to a GET if there is no body."""
        requests = _requests()
        key = self.api_key or os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        method = "GET" if body is None else "POST"
        try:
            answer = requests.request(method, self.base + path, json=body, headers=headers, timeout=self.timeout)
        except requests.Timeout as error:
            raise OutpaceError(f"{self.base} did not answer within {self.timeout:g} s") from error
        except (requests.exceptions.InvalidURL, requests.exceptions.InvalidSchema) as error:
            raise UsageError(f"{self.url!r} is not a server URL: {error}") from error
        except requests.RequestException as error:
            raise OutpaceError(f"cannot connect to {self.base}: is the server running? ({error})") from error
        if answer.status_code in (401, 403):
            raise HTTPFailure(
                f"{self.base} refuses the API key (HTTP {answer.status_code}: {_message(answer)}); pass another or set "
                "OPENAI_API_KEY",
                answer.status_code,
            )
        if not answer.ok:
            text = f"{self.base}{path} answered HTTP {answer.status_code}: {_message(answer)}"
            raise HTTPFailure(text, answer.status_code)
        try:
            return answer.json()
        except ValueError as error:
            raise OutpaceError(
                f"{self.base}{path} returned something other than JSON: {answer.text[:200]!r}"
            ) from error


def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """Convert the settings to the servers' fields, without neutral ones, which every request has."""
    fields: dict[str, Any] = {"temperature": sampling.temperature}
    given = {**vars(sampling), "top_k": sampling.top_k or -1}
    fields |= {name: given[name] for name, neutral in NEUTRAL.items() if given[name] != neutral}
    if sampling.typical_p != 1:
        fields["typical_p"] = sampling.typical_p
    if sampling.logit_bias:
        fields["logit_bias"] = {str(token): max(bias, -100.0) for token, bias in sampling.logit_bias.items()}
    return fields


def _logprobs(chat: bool) -> dict[str, Any]:
    return {"logprobs": True, "top_logprobs": TOP} if chat else {"logprobs": TOP}


def _requests() -> ModuleType:
    try:
        import requests
    except ImportError as error:
        raise OutpaceError("requests is not installed: pip install 'outpace[verify]'") from error
    return requests


def _message(answer: Any) -> str:
    """The server's own error message."""
    try:
        data = answer.json()
    except ValueError:
        return str(answer.text)[:300].strip() or str(answer.reason)
    if isinstance(data, dict):
        said = data.get("error") or data.get("message") or data.get("detail") or data
        return str(said.get("message", said) if isinstance(said, dict) else said)[:300]
    return str(data)[:300]
