"""Replicas behind a front, without Ray: equal texts, one home for a conversation, and nothing lost with a replica."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message

from outpace.core.engine import Engine
from outpace.serve.replicas import relay
from outpace.serve.replicas.conversation_key import conversation_key
from outpace.serve.replicas.front import ReplicaFront, guarded
from outpace.serve.replicas.metric_texts import merged
from outpace.serve.replicas.relay import ATTEMPTS, Relay
from outpace.serve.replicas.replica import ModelReplica
from outpace.serve.replicas.stream_seam import SeamBroken, StreamSeam
from outpace.serve.settings import ServeSettings
from outpace.serve.telemetry.metrics import ServerMetrics
from outpace.serve.web.event_stream import ServerEvent
from outpace.serve.web.inside import InsideReply, InsideRequest, ask, messages
from outpace.testing import ToyLM
from tests.serving import TOOLS, TURNS, scripted
from tests.test_serve_chat import CALL, WEATHER
from tests.tiny_tokenizers import random_model

CHAT, PLAIN, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
SAID = [{"role": "user", "content": "Say hello to the fox."}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": SAID, "max_tokens": 24},
    PLAIN: {"prompt": "The quick", "max_tokens": 24},
    RESPONSES: {"input": "The quick fox?", "max_output_tokens": 24},
    MESSAGES: {"messages": SAID, "max_tokens": 24},
}
MOST = {
    "logprobs": True,
    "top_logprobs": 2,
    "n": 2,
    "return_token_ids": True,
    "stream_options": {"include_usage": True},
}


class Lost(Exception):
    """The replica is gone."""


class Pool:
    """Two replicas, one of which may be lost after some messages."""

    def __init__(self, replicas: list[ModelReplica], **settings: Any):
        self.replicas = replicas
        self.homes: list[int] = []  # which replica was asked
        self.owners: list[str | None] = []
        self.losses: list[int] = []  # messages before the next loss, once for each request
        given = ServeSettings(("tiny",), "tiny", **settings)
        self.front = ReplicaFront(Relay(self._ask, (Lost,)), given, self._metrics)
        self.app = guarded(self.front, given)

    async def _ask(self, request: InsideRequest, key: str) -> AsyncGenerator[Message, None]:
        self.homes.append(int(key, 16) % len(self.replicas))
        self.owners.append(request.owner)
        if self.losses:
            self.homes[-1] = (len(self.homes) - 1) % len(self.replicas)  # each attempt at another one
        left = self.losses.pop(0) if self.losses else -1
        async with aclosing(self.replicas[self.homes[-1]].answer(request)) as reply:
            async for message in reply:
                if not left:
                    raise Lost
                left -= 1
                yield message
        if not left:
            raise Lost

    async def _metrics(self) -> str:
        return "none"

    async def post(self, path: str, **body: Any) -> InsideReply:
        return await ask(self.app, InsideRequest(path, json.dumps({**BODIES[path], **body}).encode()))

    async def text(self, path: str, **body: Any) -> Any:
        return told(await self.post(path, **body))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "PAUSE", 0.0)


def told(reply: InsideReply) -> Any:
    """What a client reads of a reply that is no matter of chance: its texts, tokens and reasons."""
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return seen(json.loads(reply.body))
    found: dict[Any, Any] = {}
    parts = reply.body.decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    events = [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]
    assert len({event["id"] for event in events}) == len({event["created"] for event in events}) == 1
    for event in events:
        for choice in event["choices"]:
            merge(found.setdefault(choice.pop("index"), {}), choice)
        if not event["choices"]:
            found["usage"] = event["usage"]["completion_tokens"]
    return found


def merge(into: dict[str, Any], new: dict[str, Any]) -> None:
    for name, value in new.items():
        if name == "tool_calls":
            for call in value:
                merge(into.setdefault(("call", call["index"]), {}), {"type": "", **call["function"]})
                into["ids"] = into.get("ids", 0) + ("id" in call)
        elif isinstance(value, dict):
            into[name] = into.get(name) or {}
            merge(into[name], value)
        elif isinstance(value, str | list) and into.get(name) is not None:
            into[name] = into[name] + value
        elif value is not None or name not in into:
            into[name] = value


def seen(body: dict[str, Any]) -> Any:
    return [body.get(name) for name in ("choices", "content")] if "output" not in body else body["output"][0]["content"]


def run(work: Callable[[Pool], Awaitable[None]], make: Callable[[], Any] | None = None, **settings: Any) -> None:
    """Run a test with two replicas."""
    make = make or (lambda: random_model("tiktoken"))

    async def all_of_it() -> None:
        replicas = []
        for _ in range(2):
            replicas.append(ModelReplica.__new__(ModelReplica))
            await replicas[-1].__init__(lambda: (make(), ServeSettings(("tiny",), "tiny", method="suffix")))  # type: ignore[misc]
        await work(Pool(replicas, **settings))
        for replica in replicas:
            while replica.service.admission.running:
                await asyncio.sleep(0.01)
            await replica.service.close()

    asyncio.run(all_of_it())


def key(body: dict[str, Any], owner: str | None = None) -> str:
    return conversation_key(InsideRequest("", json.dumps(body).encode(), owner=owner))


def test_a_conversation_has_one_key() -> None:
    system = {"role": "system", "content": "Be brief."}
    first = [system, {"role": "user", "content": "Hi"}]
    longer = [*first, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Why?"}]
    home = key({"messages": first})
    assert home == key({"messages": longer, "temperature": 0.3})
    others = [
        key({"messages": [system, {"role": "user", "content": "Ho"}]}),
        key({"messages": first}, "ann"),
        key({"messages": first, "tools": [WEATHER]}),
        key({"messages": first[1:], "system": "Be brief."}),
    ]
    assert len({home, *others}) == 5
    assert key({"input": longer}) == key({"input": first}) != key({"input": "Hi"})
    assert key({"prompt": "a" * 2000}) == key({"prompt": "a" * 3000}) != key({"prompt": "b"})
    assert key({"messages": first, "prompt_cache_key": "k"}) == key({"input": "Hi", "prompt_cache_key": "k"})
    for odd in ({}, {"messages": 7}, {"messages": [7]}, {"prompt": None}, {"messages": []}):
        assert key(odd)


def test_texts_are_those_of_a_single_server_and_conversations_stay_at_home() -> None:
    async def work(pool: Pool) -> None:
        alone = pool.replicas[0]
        for path, body in BODIES.items():
            request = InsideRequest(path, json.dumps({**body, "seed": 3}).encode())
            [_, reply] = [message async for message in alone.answer(request)]
            for _ in range(2):
                assert await pool.text(path, seed=3) == seen(json.loads(reply["body"]))
            assert pool.homes[-1] == pool.homes[-2]
        for i in range(20):
            await pool.post(CHAT, messages=[{"role": "user", "content": f"Question {i}"}], max_tokens=1)
        assert set(pool.homes[-20:]) == {0, 1}, "conversations are spread"

    run(work)


@pytest.mark.parametrize("path", BODIES)
def test_a_whole_reply_is_asked_again_elsewhere(path: str) -> None:
    async def work(pool: Pool) -> None:
        wanted = await pool.text(path, seed=5)
        for losses in ([0], [1], [0, 1, 0]):
            pool.losses = list(losses)
            assert await pool.text(path, seed=5) == wanted
            assert not pool.losses
        pool.losses = [1]
        reply = await pool.post(path)
        assert reply.status == 200, "without a seed, the front gives one"
        pool.losses = [0] * ATTEMPTS
        lost = await pool.post(path)
        assert lost.status == 503 and "lost" in lost.body.decode()

    run(work)


def test_a_retried_request_without_a_seed_keeps_the_seed_of_the_front() -> None:
    seeds: list[int] = []

    async def fails(request: InsideRequest, key: str) -> AsyncGenerator[Message, None]:
        seeds.append(request.fields["seed"])
        raise Lost
        yield {}

    async def none() -> str:
        return ""

    settings = ServeSettings(("tiny",), "tiny")
    app = guarded(ReplicaFront(Relay(fails, (Lost,)), settings, none), settings)
    request = InsideRequest(CHAT, json.dumps(BODIES[CHAT]).encode())
    assert asyncio.run(ask(app, request)).status == 503
    assert len(seeds) == ATTEMPTS and len(set(seeds)) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {}),
        (CHAT, MOST),
        (PLAIN, {"echo": True}),
        (PLAIN, {**MOST, "logprobs": 2, "top_logprobs": None, "prompt": ["One", "Two"]}),
    ],
)
def test_a_stream_that_broke_off_goes_on_elsewhere(path: str, body: dict[str, Any]) -> None:
    body = {name: value for name, value in body.items() if value is not None}

    async def work(pool: Pool) -> None:
        given = {**body, "stream": True, "seed": 5}
        whole = await pool.post(path, **given)
        wanted, count = told(whole), whole.body.count(b"\n\n")
        for loss in range(0, count, max(1, count // 6)):
            pool.losses = [loss, loss // 2]
            assert await pool.text(path, **given) == wanted

    run(work)


def test_a_streamed_call_goes_on_elsewhere() -> None:
    async def work(pool: Pool) -> None:
        given = {"stream": True, "tools": [WEATHER], "max_tokens": 200, "temperature": 0}
        wanted = await pool.text(CHAT, **given)
        assert json.loads(wanted[0]["delta"]["call", 0]["arguments"]) == {"city": "Rome", "days": 3}
        for loss in range(0, 24, 3):
            pool.losses = [loss]
            assert await pool.text(CHAT, **given) == wanted

    run(work, lambda: scripted(TOOLS + TURNS, lambda _: f"Let me see. {CALL}"))


def test_streams_of_other_apis_end_with_an_error() -> None:
    async def work(pool: Pool) -> None:
        for path, kind in ((MESSAGES, "event: error"), (RESPONSES, '"code":"replica_lost"')):
            pool.losses = [2]
            reply = await pool.post(path, stream=True)
            assert kind in reply.body.decode() and "ask again" in reply.body.decode()
            pool.losses = [1]  # nothing but the headers has been sent
            assert "ask again" not in (await pool.post(path, stream=True)).body.decode()

    run(work)


def test_another_answer_is_not_sewn_on() -> None:
    def event(text: str) -> bytes:
        choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
        return ServerEvent({"id": "a", "created": 1, "choices": [choice]}).encode()

    seam = StreamSeam(event("The fox") + event(" runs"))
    assert seam.rest(event("The ")) == b""
    assert seam.rest(event("fox runs a")) == event(" a")
    with pytest.raises(SeamBroken):
        StreamSeam(event("The fox")).rest(event("The dog"))


def test_an_error_is_not_sewn_onto_a_stream() -> None:
    start: Message = {
        "type": "http.response.start",
        "status": 200,
        "headers": [(b"content-type", b"text/event-stream")],
    }
    choice = {"index": 0, "delta": {"content": "The"}, "logprobs": None, "finish_reason": None}
    event = ServerEvent({"id": "a", "created": 1, "choices": [choice]}).encode()
    asked = 0

    async def replica(request: InsideRequest, key: str) -> AsyncGenerator[Message, None]:
        nonlocal asked
        asked += 1
        yield start if asked == 1 else {**start, "status": 429, "headers": []}
        yield {"type": "http.response.body", "body": event, "more_body": True}
        raise Lost

    async def none() -> str:
        return ""

    front = ReplicaFront(Relay(replica, (Lost,)), ServeSettings(("tiny",), "tiny"), none)
    reply = asyncio.run(ask(front, InsideRequest(CHAT, json.dumps(BODIES[CHAT]).encode())))
    assert reply.body.startswith(event) and b"replica_lost" in reply.body.removeprefix(event) and asked == 2


def test_metrics_of_replicas_are_one_text() -> None:
    texts = []
    for name in ("a", "b"):
        metrics = ServerMetrics("tiny", Engine(ToyLM()))
        metrics.reply(CHAT, 200)
        texts.append(metrics.text().replace('engine="0"', f'engine="{name}"'))
    families = list(text_string_to_metric_families(merged(texts)))
    assert len({family.name for family in families}) == len(families)
    sums = next(family for family in families if family.name == "vllm:prompt_tokens")
    assert [sample.labels["engine"] for sample in sums.samples] == ["a", "b"]


def test_stored_responses_are_found_where_they_are() -> None:
    async def work(pool: Pool) -> None:
        for i in range(4):
            first = json.loads((await pool.post(RESPONSES, input=f"Question {i}")).body)
            home = pool.homes[-1]
            for body in ({"stream": False}, {"stream": True}):
                then = await pool.post(RESPONSES, input="And then?", previous_response_id=first["id"], **body)
                assert then.status == 200 and pool.homes[-1] == home
            path = f"{RESPONSES}/{first['id']}"
            assert json.loads((await ask(pool.app, InsideRequest(path, b"", "GET"))).body) == first
            assert (await ask(pool.app, InsideRequest(path, b"", "DELETE"))).status == 200
            assert (await ask(pool.app, InsideRequest(path, b"", "GET"))).status == 404

    run(work)


def test_the_rest_of_the_surface_is_that_of_a_server() -> None:
    async def work(pool: Pool) -> None:
        async def status(path: str, data: bytes = b"", method: str = "POST") -> int:
            return (await ask(pool.app, InsideRequest(path, data, method))).status

        assert (
            json.loads((await ask(pool.app, InsideRequest("/v1/models", b"", "GET"))).body)["data"][0]["id"] == "tiny"
        )
        assert await status("/tokenize", b'{"prompt": "a"}') == 200
        assert await status("/metrics", method="GET") == await status("/health", method="GET") == 200
        assert await status("/openapi.json", method="GET") == 200
        assert await status("/nowhere") == 404
        assert await status(CHAT, b"{") == await status(CHAT, b"[]") == await status(CHAT, b"{}") == 400
        unknown = await pool.post(CHAT, temprature=1)
        assert json.loads(unknown.body)["error"]["message"] == "unknown field 'temprature'"
        pool.front.state = "draining"
        assert await status("/health", method="GET") == await status(CHAT, b"{}") == 503

    run(work)


def test_keys_are_checked_at_the_front_and_owners_reach_the_replica() -> None:
    async def work(pool: Pool) -> None:
        assert (await pool.post(CHAT)).status == 401
        for owner in ("ann", "bob"):
            request = InsideRequest(CHAT, json.dumps(BODIES[CHAT]).encode(), owner=owner)
            assert (await ask(pool.front, request)).status == 200
        assert pool.owners == ["ann", "bob"]

    run(work, keys={"ann": "a", "bob": "b"})


def test_a_client_that_goes_away_ends_its_request() -> None:
    async def work(pool: Pool) -> None:
        request = InsideRequest(CHAT, json.dumps({**BODIES[CHAT], "stream": True, "max_tokens": 3000}).encode())
        async with aclosing(messages(pool.app, request)) as reply:
            async for message in reply:
                if b"content" in message.get("body", b""):
                    break
        # `run` waits until no request is left.

    run(work)
