"""Who may ask a server, and how much: keys, hosts, sizes, times; and what it makes of bodies that are no requests."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outpace.api.model import Model
from outpace.errors import OutpaceError, UsageError
from outpace.sampling.grammar import GrammarCompiler
from outpace.serve.settings import ServeLimits, ServeSettings
from outpace.serve.web import keys
from outpace.serve.web.keys import ApiKeys
from tests.serving import PATIENCE, Live, live, until
from tests.tiny_tokenizers import random_model

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
LIMITS = ServeLimits(
    body=20_000, body_seconds=0.5, prepare_seconds=0.5, grammar=5000, tools=2, messages=10, biases=5, connections=8
)


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model("tiktoken")


@pytest.fixture(scope="module")
def server(model: Model) -> Iterator[Live]:
    with live(model, limits=LIMITS) as found:
        yield found


@pytest.fixture(scope="module")
def locked(model: Model) -> Iterator[Live]:
    with live(model, keys={"ann": "key-a", "bob": "key-b"}, cors_origins=("https://page.example",)) as found:
        yield found


def test_a_key_is_asked_for_everywhere_but_for_health(locked: Live) -> None:
    assert locked.get("/health").status_code == 200
    for path in ("/v1/models", "/metrics", "/openapi.json", "/v1/responses/x", "/nothing"):
        assert locked.get(path).status_code == 401
    missing = locked.post(CHAT, HELLO)
    assert missing.status_code == 401 and missing.json()["error"]["code"] == "invalid_api_key"
    assert missing.headers["www-authenticate"] == "Bearer"
    for headers in ({"Authorization": "Bearer key-a"}, {"authorization": "bearer key-b"}, {"x-api-key": "key-a"}):
        assert locked.post(CHAT, HELLO, headers=headers).status_code == 200
    for headers in ({"Authorization": "Bearer key-c"}, {"Authorization": "key-a"}, {"x-api-key": ""}):
        assert locked.post(CHAT, HELLO, headers=headers).status_code == 401
    wrong = locked.post("/v1/messages", HELLO).json()
    assert wrong["type"] == "error" and wrong["error"]["type"] == "authentication_error"


def test_a_stored_response_belongs_to_its_key(locked: Live) -> None:
    ann, bob = ({"Authorization": f"Bearer key-{name}"} for name in "ab")
    made = locked.post("/v1/responses", {"input": "Hello", "max_output_tokens": 2}, headers=ann).json()
    assert locked.get(f"/v1/responses/{made['id']}", headers=ann).status_code == 200
    assert locked.get(f"/v1/responses/{made['id']}", headers=bob).status_code == 404
    go_on = {"input": "And?", "previous_response_id": made["id"], "max_output_tokens": 2}
    assert locked.post("/v1/responses", go_on, headers=bob).status_code == 404


def test_pages_of_other_origins_may_call_only_if_listed(locked: Live, server: Live) -> None:
    def preflight(found: Live, origin: str) -> Any:
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        with found.client() as client:
            return client.options(CHAT, headers=asked).headers.get("access-control-allow-origin")

    assert preflight(locked, "https://page.example") == "https://page.example"
    assert preflight(locked, "https://evil.example") is None
    assert preflight(server, "https://page.example") is None


def test_only_known_host_names_are_answered(server: Live, model: Model) -> None:
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", ""):
        refused = server.get("/health", headers={"Host": host})
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "host_not_allowed"
    for host in ("localhost", f"LOCALHOST:{server.port}", "127.0.0.1", f"[::1]:{server.port}"):
        assert server.get("/health", headers={"Host": host}).status_code == 200
    with live(model, allowed_hosts=("my.example",)) as found:
        assert found.get("/health", headers={"Host": "my.example"}).status_code == 200
    with live(model, allowed_hosts=("*",)) as found:
        assert found.get("/health", headers={"Host": "evil.example"}).status_code == 200


def test_other_machines_are_served_only_with_keys_or_on_request() -> None:
    given: dict[str, Any] = {"names": ("x",), "root": "x", "host": "0.0.0.0"}
    with pytest.raises(UsageError, match="--api-keys FILE, or --open-without-keys"):
        ServeSettings(**given)
    assert ServeSettings(**given, keys={"ann": "a"}).host == "0.0.0.0"
    assert ServeSettings(**given, open_without_keys=True).host == "0.0.0.0"
    with pytest.raises(UsageError, match="needs a name"):
        ServeSettings((), "x")
    with pytest.raises(UsageError, match="waiting=0 must be above 0"):
        ServeLimits(waiting=0)


def test_keys_are_read_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# a comment\nann  secret-1\n\nsecret-2\n")
    assert keys.load(file) == {"ann": "secret-1", "key-2": "secret-2"}
    found = ApiKeys(keys.load(file))
    assert found.owner("secret-1") == "ann" and found.owner("secret-2") == "key-2"
    assert found.owner("") is None and found.owner("ann") is None and found and not ApiKeys({})
    assert keys.load(None) == {}
    monkeypatch.setenv("OUTPACE_API_KEYS", "one\nbob two")
    assert keys.load(None) == {"key-1": "one", "bob": "two"}
    for text, why in (("a b c", "neither KEY nor NAME KEY"), ("a 1\na 2", "have the name 'a'"), ("", "has no API key")):
        file.write_text(text)
        with pytest.raises(UsageError, match=why):
            keys.load(file)
    with pytest.raises(OutpaceError, match="cannot read the API keys"):
        keys.load(tmp_path / "none")


def test_bodies_are_bounded(server: Live) -> None:
    large = {"messages": [{"role": "user", "content": "x" * 30_000}]}
    refused = server.post(CHAT, large)
    assert refused.status_code == 413 and refused.json()["error"]["code"] == "body_too_large"

    def pieces() -> Iterator[bytes]:  # without a declared length
        for _ in range(300):
            yield b"x" * 100

    with server.client() as client:
        assert client.post(CHAT, content=pieces()).status_code == 413


def test_a_body_that_does_not_come_is_not_waited_for(server: Live) -> None:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{{".encode())
    assert b"408" in connection.recv(1000)
    connection.close()
    gone = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    gone.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{{".encode())
    gone.close()
    assert server.post(CHAT, HELLO).status_code == 200


def test_requests_at_a_time_are_bounded(server: Live) -> None:
    idle = [socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) for _ in range(8)]
    for connection in idle:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n".encode())

    def refused() -> bool:
        reply = server.get("/health")
        return reply.status_code == 429 and reply.json()["error"]["code"] == "too_many_requests"

    until(refused)
    for connection in idle:
        connection.close()
    until(lambda: server.get("/health").status_code == 200)


BODIES: dict[str, bytes] = {
    "empty": b"",
    "no JSON": b"hello",
    "half": b'{"messages": [',
    "no UTF-8": b'{"messages": "\xff\xfe"}',
    "a list": b"[]",
    "null": b"null",
    "deep": b"[" * 9000 + b"]" * 9000,
    "deep content": b'{"messages": [{"role": "user", "content": ' + b"[" * 3000 + b"]" * 3000 + b"}]}",
    "NaN": b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    "Infinity": b'{"messages": [{"role": "user", "content": "x"}], "presence_penalty": Infinity}',
    "long number": b'{"messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 6000 + b"}",
    "lone surrogate": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "surrogate in a stop": b'{"messages": [{"role": "user", "content": "x"}], "stop": "\\udfff"}',
    "surrogate in a name": b'{"messages": [{"role": "user", "content": "x"}], "\\ud800": 1}',
    "surrogate in a schema": b'{"messages": [], "structured_outputs": {"json": {"const": "\\ud800"}}}',
    "surrogate in values": b'{"messages": [], "chat_template_kwargs": {"x": "\\ud800"}}',
}


@pytest.mark.parametrize("name", BODIES)
def test_what_is_no_request_is_refused_in_the_shape_of_the_api(server: Live, name: str) -> None:
    with server.client() as client:
        for path in (CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize"):
            reply = client.post(path, content=BODIES[name], headers={"Content-Type": "application/json"})
            assert reply.status_code == 400, (path, reply.text)
            error = reply.json()["error"]
            assert error["type"] == "invalid_request_error" and error["message"]
            assert "Traceback" not in reply.text and "File " not in reply.text


def test_other_paths_and_methods_are_refused_in_the_same_shape(server: Live) -> None:
    missing, wrong = server.get("/v1/nothing"), server.get(CHAT)
    assert (missing.status_code, wrong.status_code) == (404, 405)
    for reply in (missing, wrong):
        assert reply.json()["error"]["type"] == "invalid_request_error"
    lines = server.get("/metrics").text.splitlines()
    assert any(line.startswith('outpace:http_replies_total{path="other",status="404"}') for line in lines)
    assert any(line.startswith(f'outpace:http_replies_total{{path="{CHAT}",status="400"}}') for line in lines)


LONG = {"type": "object", "properties": {f"name {i}": {"type": "string"} for i in range(300)}}
SIZES: dict[str, dict[str, Any]] = {
    "messages": {"messages": [{"role": "user", "content": "x"}] * 11},
    "tools": {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(3)]},
    "tool schemas": {"tools": [{"type": "function", "function": {"name": "f", "parameters": LONG}}]},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": LONG}}},
    "regex": {"structured_outputs": {"regex": "a" * 6000}},
    "choices": {"structured_outputs": {"choice": ["a" * 100] * 60}},
    "logit_bias": {"logit_bias": {str(i): 1 for i in range(6)}},
    "stop_token_ids": {"stop_token_ids": [1, 2, 3, 4, 5, 6]},
    "bad_words": {"bad_words": ["a"] * 6},
}


@pytest.mark.parametrize("name", SIZES)
def test_parts_of_requests_are_bounded(server: Live, name: str) -> None:
    assert server.post(CHAT, {**HELLO, **SIZES[name]}).status_code == 400


HOSTILE: dict[str, dict[str, Any]] = {
    "nested repetition": {"regex": "((((a{1,99}){1,99}){1,99}){1,99}){1,99}"},
    "alternatives": {"regex": "(a|b|ab|ba|aa|bb)*(a|b)[ab]{500}c"},
    "many items": {"json": {"type": "array", "items": {"enum": list(range(200))}, "minItems": 10**6}},
    "long string": {"json": {"type": "string", "minLength": 10**7}},
    "a schema that contains itself": {"json": {"$ref": "#"}},
    "empty loop": {"grammar": "start: a*\na: b*\nb: a | b"},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_grammars_that_are_too_complex_end_in_time_and_harm_nobody(server: Live, name: str) -> None:
    reply = server.post(CHAT, {**HELLO, "structured_outputs": HOSTILE[name]})
    assert reply.status_code in (200, 400, 500)
    assert reply.status_code == 200 or reply.json()["error"]["code"] in (
        "invalid_value",
        "too_complex",
        "request_failed",
    )
    assert server.post(CHAT, HELLO).status_code == 200


def test_a_grammar_that_takes_too_long_to_compile_is_refused(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    done = threading.Event()
    monkeypatch.setattr(GrammarCompiler, "compile", lambda self, **given: done.wait(PATIENCE))
    reply = server.post(CHAT, {**HELLO, "structured_outputs": {"regex": "a"}})
    done.set()
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "too_complex"


def test_the_log_has_figures_and_no_texts_unless_asked(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    for shown in (False, True):
        caplog.clear()
        with live(model, log_prompts=shown) as found, caplog.at_level("INFO", "outpace.serve"):
            text = found.post(CHAT, HELLO).json()["choices"][0]["message"]["content"]
            found.post(CHAT, {**HELLO, "colour": 1})
            found.post(CHAT, {**HELLO, "logit_bias": {"9999": 1}})
        lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == "outpace.serve"]
        good, bad = (next(line for line in lines if line["status"] == status) for status in (200, 400))
        assert good["api"] == "chat" and good["completion_tokens"] == 4 and good["prompt_tokens"] > 4
        assert bad["id"] != good["id"]
        assert ("prompts" in good) == shown and ("Hello" in json.dumps(lines)) == shown
        assert not shown or good["answers"] == [text]
