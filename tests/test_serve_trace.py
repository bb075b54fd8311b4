"""Traces in streams of chats: the format of trace files, bounded, and without a change of the text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from outpace.api.model import Model
from outpace.serve.settings import ServeLimits
from outpace.tracing.trace import RequestTrace, Trace, read
from tests.serving import Live, live
from tests.test_serve_chat import HELLO, SETTINGS
from tests.tiny_tokenizers import random_model

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model("tiktoken")


@pytest.fixture(scope="module")
def server(model: Model) -> Iterator[Live]:
    with live(model) as found:
        yield found


def body_of(**settings: Any) -> dict[str, Any]:
    own = settings.pop("extra_body", {})
    return {"messages": HELLO, "max_completion_tokens": 24, "temperature": 0, "stream": True, **settings, **own}


def asked(server: Live, **settings: Any) -> list[dict[str, Any]]:
    """The chunks of a stream."""
    reply = server.post(CHAT, body_of(**settings))
    assert reply.status_code == 200, reply.text
    events = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def said(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def lines_of(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for chunk in chunks for line in chunk.get("trace", [])]


def check_text(request: RequestTrace, text: str) -> None:
    """The trace has the text, but for what is held back at the end: it may be a part of a character."""
    told = "".join(text for record in request.passes for text in record.text)
    assert text.startswith(told) and (told == text or text.endswith("\ufffd"))


def trace_of(chunks: list[dict[str, Any]], folder: Path) -> Trace:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines_of(chunks)))
    return read(path)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_trace_changes_no_text(name: str, server: Live) -> None:
    plain = said(asked(server, **SETTINGS[name]))
    for wish in (True, "probs"):
        speculated = SETTINGS[name] | {"return_trace": wish, "speculation": "recycling"}
        assert said(asked(server, **speculated)) == plain


def test_the_lines_are_a_trace_file(server: Live, tmp_path: Path) -> None:
    wish = {"method": "recycling", "options": {"price": 0}}
    chunks = asked(server, return_trace="probs", speculation=wish, return_token_ids=True, temperature=0.3, seed=3)
    trace = trace_of(chunks, tmp_path)
    (request,) = trace.requests
    assert request.tokens == [token for chunk in chunks for c in chunk["choices"] for token in c.get("token_ids", [])]
    check_text(request, said(chunks))
    assert (request.method, request.finish_reason) == ("recycling", "length") and request.lossless
    assert request.sampling["seed"] == 3 and trace.header["probs"]
    drafted = [record for record in request.passes if len(record.tokens) > 1]
    assert drafted and all(record.judged and set(record.by[1:]) == {"recycling"} for record in drafted)
    assert {"draft", "score", "verify"} <= drafted[0].seconds.keys()


def test_each_answer_is_a_request_of_the_trace(server: Live, tmp_path: Path) -> None:
    chunks = asked(server, return_trace=True, n=3, temperature=1.0, seed=9)
    trace = trace_of(chunks, tmp_path)
    for index, request in enumerate(trace.requests):
        check_text(request, said(chunks, index))
        assert not any(record.judged for record in request.passes)
    assert len(trace.requests) == 3


def test_callers_at_the_same_time_have_traces_of_their_own(server: Live, tmp_path: Path) -> None:
    def ask(seed: int) -> list[dict[str, Any]]:
        return asked(server, return_trace=seed % 2 == 0, temperature=1.0, seed=seed)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ask, range(4)))
    for seed, chunks in enumerate(found):
        if seed % 2:
            assert not lines_of(chunks)
        else:
            (request,) = trace_of(chunks, tmp_path).requests
            assert len(request.tokens) == 24
            check_text(request, said(chunks))
        assert said(chunks) == said(asked(server, temperature=1.0, seed=seed))


def test_a_trace_is_bounded(model: Model, tmp_path: Path) -> None:
    with live(model, limits=ServeLimits(traced_nodes=10)) as server:
        chunks = asked(server, return_trace=True)
        assert said(chunks) == said(asked(server))
    kinds = [line["type"] for line in lines_of(chunks)]
    assert kinds.count("cut") == 1 and kinds[-1] == "end"
    (request,) = trace_of(chunks, tmp_path).requests
    assert 1 <= sum(len(record.tokens) for record in request.passes) <= 10
    assert request.finish_reason == "length"


def test_who_gets_no_trace(model: Model, server: Live) -> None:
    whole = server.post(CHAT, body_of(return_trace=True, stream=False))
    assert whole.status_code == 400 and "send stream: true" in whole.json()["error"]["message"]
    assert server.post(CHAT, body_of(return_trace="all")).status_code == 400
    assert (
        server.post("/v1/completions", {"prompt": "x", "return_trace": True}).json()["error"]["code"] == "unknown_field"
    )
    fields = server.get("/openapi.json").json()["components"]["schemas"]["ChatFields"]["properties"]
    assert "return_trace" in fields
    shared: list[dict[str, Any]] = [{"open_without_keys": True}, {"keys": {"ann": "a"}, "share_between_keys": True}]
    for settings in shared:  # a draft may be what another caller wrote
        with live(model, **settings) as found:
            refused = found.post(CHAT, body_of(return_trace=True), headers={"x-api-key": "a"})
            assert refused.status_code == 403 and refused.json()["error"]["code"] == "trace_refused"
    with live(model, keys={"ann": "a"}) as found:
        assert found.post(CHAT, body_of(return_trace=True), headers={"x-api-key": "a"}).status_code == 200
