"""Many clients at once: each gets the text that it gets alone; a full queue, aborts, slow readers, and the end."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI
from starlette.requests import Request as HTTPRequest

from outpace.api.model import Model
from outpace.core.lm import Scores
from outpace.core.sequence import Sequence
from outpace.errors import OutpaceError
from outpace.serve.jobs.admission import Admission
from outpace.serve.jobs.run import JobRun
from outpace.serve.launch import serve
from outpace.serve.service import PREPARING, Service
from outpace.serve.settings import ServeLimits, ServeSettings
from outpace.serve.surfaces.chat import ChatSurface
from outpace.serve.surfaces.chat_fields import ChatFields
from outpace.serve.surfaces.surface import answer
from outpace.serve.web.failures import APIFailure
from outpace.testing import ToyLM
from tests.serving import NAME, PATIENCE, Live, free_port, live, until
from tests.tiny_tokenizers import random_model, tiktoken

CHAT = "/v1/chat/completions"


class Held(ToyLM):
    """A model whose passes wait while the gate is closed; it closes before pass `last`."""

    def __init__(self) -> None:
        super().__init__(layers=1, vocab=len(tiktoken()))
        self.gate = threading.Event()
        self.gate.set()
        self.passes, self.last = 0, 0

    def score(self, *given: Any, **settings: Any) -> list[Scores]:
        self.passes += 1
        if self.passes == self.last:
            self.gate.clear()
        self.gate.wait(PATIENCE)
        return super().score(*given, **settings)


@contextmanager
def held(**settings: Any) -> Iterator[tuple[Live, Held]]:
    lm = Held()
    model = Model(lm, tiktoken(), name="held")
    model.max_batch = 2
    with live(model, **settings) as server:
        try:
            yield server, lm
        finally:
            lm.gate.set()


def body(**settings: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hello, fox."}], "max_tokens": 30, "temperature": 0, **settings}


# Same seed, same text


WISHES: list[Any] = ["off", "auto", {"method": "suffix"}, {"method": "recycling", "options": {"price": 0}}, "lookahead"]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 0.9, "presence_penalty": 0.6, "logit_bias": {"70": 2.0}},
    {"temperature": 1.0, "stop": ["the"]},
    {"temperature": 0.7, "structured_outputs": {"regex": "(fox|dog| )+"}},
    {"temperature": 1.1, "repetition_penalty": 1.2, "top_k": 30},
    {"temperature": 0.0, "prediction": {"type": "content", "content": "the quick brown fox"}},
]


def test_32_clients_with_different_settings_get_the_texts_that_they_get_alone() -> None:
    model = random_model("tiktoken")
    requests = [
        body(
            messages=[{"role": "user", "content": f"Question {i % 5} about the fox."}],
            seed=i,
            max_tokens=16 + i % 7,
            speculation=WISHES[i % len(WISHES)],
            **KINDS[i % len(KINDS)],
        )
        for i in range(32)
    ]

    async def ask(client: AsyncOpenAI, request: dict[str, Any], stream: bool) -> str:
        own = {name: request[name] for name in ("messages", "max_tokens", "seed", "temperature")}
        extra = {name: value for name, value in request.items() if name not in own}
        if not stream:
            done: Any = await client.chat.completions.create(model=NAME, **own, extra_body=extra)
            return str(done.choices[0].message.content)
        chunks: Any = await client.chat.completions.create(model=NAME, stream=True, **own, extra_body=extra)
        return "".join([c.delta.content or "" async for chunk in chunks for c in chunk.choices])

    async def all_at_once(url: str) -> list[str]:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, request, i % 2 == 0) for i, request in enumerate(requests)))

    with live(model) as server:
        together = [asyncio.run(all_at_once(server.url)) for _ in range(2)]
        with server.client() as client:
            for wish in ("off", None):
                alone = [
                    client.post(CHAT, json={**request, **({"speculation": wish} if wish else {})})
                    for request in requests
                ]
                texts = [reply.json()["choices"][0]["message"]["content"] for reply in alone]
                assert [texts, texts] == together
        until(lambda: server.idle)


def test_keys_learn_nothing_of_each_other() -> None:
    keys = {"ann": "key-a", "bob": "key-b"}

    def ask(server: Live, owner: str) -> Any:
        reply = server.post(CHAT, body(speculation="suffix"), headers={"Authorization": f"Bearer {keys[owner]}"})
        return reply.json()

    def figures(reply: Any) -> tuple[Any, Any]:
        spec = reply["metrics"]["speculative_decoding"] or {}
        return reply["usage"]["prompt_tokens_details"], (spec.get("num_draft_tokens"), spec.get("num_spec_steps"))

    with live(random_model("tiktoken"), keys=keys) as server:
        first = ask(server, "ann")
        again = ask(server, "ann")
        assert figures(again) != figures(first), "a key learns of itself"
        assert figures(ask(server, "bob")) == figures(first), "another key learns nothing"
    with live(random_model("tiktoken"), keys=keys, share_between_keys=True) as server:
        assert figures(ask(server, "ann")) == figures(first)
        assert figures(ask(server, "bob")) == figures(again)


# The queue


def test_a_full_queue_refuses_with_a_time_to_retry() -> None:
    with held(limits=ServeLimits(waiting=2)) as (server, lm), ThreadPoolExecutor(8) as pool:
        lm.gate.clear()
        capacity = server.service.admission.capacity
        running = []
        for i in range(capacity):  # one after the other: those that are prepared count as waiting, too
            running.append(pool.submit(server.post, CHAT, body()))
            until(lambda i=i: server.service.admission.running > i)
        waiting = [pool.submit(server.post, CHAT, body()) for _ in range(2)]
        until(lambda: server.service.admission.pending == 2)
        text = server.get("/metrics").text
        assert 'vllm:num_requests_waiting{engine="0",model_name="tiny"}' in text
        refused = server.post(CHAT, body())
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        anthropic = server.post("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2})
        assert anthropic.json()["error"]["type"] == "rate_limit_error"
        lm.gate.set()
        texts = {job.result().json()["choices"][0]["message"]["content"] for job in (*running, *waiting)}
        assert len(texts) == 1
        until(lambda: server.idle)


def test_nobody_keeps_another_owner_out_of_the_queue() -> None:
    async def fill() -> None:
        admission = Admission(capacity=1, most_waiting=2)
        places = [admission.take("ann", size=3), admission.take("bob")]  # more than fits, but none of theirs waits
        for owner in ("ann", "bob"):
            with pytest.raises(APIFailure, match="too many"):
                admission.take(owner)
        for place in places:
            place.leave()
        assert admission.pending == 0
        admission.take("ann").leave()

    asyncio.run(fill())


def test_a_request_that_no_thread_prepares_in_time_is_asked_to_come_again() -> None:
    """Threads that compile slow grammars are no fault of the request that waits for one."""
    with held(limits=ServeLimits(prepare_seconds=0.2)) as (server, _):
        free = threading.Event()
        blocked = [server.service._preparing.submit(free.wait, PATIENCE) for _ in range(PREPARING)]
        late = server.post(CHAT, body())
        free.set()
        assert late.status_code == 429 and "retry-after" in late.headers
        for each in blocked:
            each.result()
        assert server.post(CHAT, body()).status_code == 200
        until(lambda: server.idle)


def test_the_owner_with_the_fewest_running_requests_is_next() -> None:
    keys = {"ann": "a", "bob": "b"}
    order: list[str] = []

    def ask(server: Live, key: str) -> None:
        assert server.post(CHAT, body(max_tokens=2), headers={"X-API-Key": key}).status_code == 200
        order.append(key)

    with held(keys=keys) as (server, lm), ThreadPoolExecutor(16) as pool:
        lm.gate.clear()
        admission = server.service.admission
        jobs = []
        for i in range(admission.capacity + 4):
            jobs.append(pool.submit(ask, server, "a"))
            until(lambda i=i: admission.running + admission.pending > i)
        jobs.append(pool.submit(ask, server, "b"))
        until(lambda: admission.pending == 5)
        until(lambda: sum(len(line) for line in admission._lines.values()) == 5)
        lm.gate.set()
        for job in jobs:
            job.result()
    assert order.index("b") < len(order) - 1, "the last to come was not the last to go"


# Clients that go away, and clients that do not read


def sent(server: Live, request: dict[str, Any]) -> socket.socket:
    """A connection on which a request has been sent, and nothing read."""
    data = json.dumps(request).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    head = ("Host: 127.0.0.1", "Content-Type: application/json", f"Content-Length: {len(data)}")
    connection.sendall("\r\n".join((f"POST {CHAT} HTTP/1.1", *head, "", "")).encode() + data)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_place(stream: bool) -> None:
    with held() as (server, lm):
        lm.last = lm.passes + 3  # the first request runs, and others wait
        first = sent(server, body(stream=stream, max_tokens=3000))
        if stream:
            first.recv(10)
        until(lambda: not lm.gate.is_set())
        gone = [first, *(sent(server, body(stream=stream, max_tokens=3000)) for _ in range(4))]
        admission = server.service.admission
        until(lambda: admission.running == admission.capacity and admission.pending == 5 - admission.capacity)
        for connection in gone:
            connection.close()
        lm.gate.set()
        until(lambda: server.idle)
        assert not any(slot.busy for slot in lm.slots)
        assert server.post(CHAT, body()).status_code == 200
        ends = [line for line in server.get("/metrics").text.splitlines() if 'finished_reason="abort"' in line]
        assert any(line.startswith("outpace:request_success_total") for line in ends)


def test_a_run_that_starts_as_its_request_ends_is_cancelled() -> None:
    """A deadline, or the end of the server, may come just when the engine has taken the job."""

    async def cancelled_at_its_start(model: Model) -> JobRun:
        service = Service(model, ServeSettings((NAME,), NAME))
        await service.warm_up()
        usual, runs = service.start, list[JobRun]()

        async def start(*given: Any) -> JobRun:
            runs.append(await usual(*given))
            asking.cancel()
            return runs[0]

        service.start = start  # type: ignore[method-assign]
        app = SimpleNamespace(state=SimpleNamespace(service=service))
        http = HTTPRequest({"type": "http", "app": app, "headers": []}, asyncio.Event().wait)  # type: ignore[arg-type]
        asking = asyncio.create_task(answer(ChatSurface(), ChatFields(**body(max_tokens=3000)), http))
        with suppress(asyncio.CancelledError):
            await asking
        await service.close()
        return runs[0]

    run = asyncio.run(cancelled_at_its_start(random_model("tiktoken")))
    assert run.ended and len(run.seqs[0].generated) < 3000


def test_a_client_that_does_not_read_holds_no_slot_and_stops_nobody() -> None:
    with held() as (server, _):
        admission = server.service.admission
        unread = [sent(server, body(stream=True, max_tokens=60, logprobs=True, top_logprobs=20)) for _ in range(6)]
        until(lambda: server.idle)
        assert server.post(CHAT, body()).status_code == 200
        for connection in unread:
            text = b""
            while b"[DONE]" not in text:
                text += connection.recv(65536)
            connection.close()
        assert admission.running == 0


# Time


def test_a_request_that_takes_too_long_ends_with_an_error() -> None:
    with held() as (server, lm):
        lm.gate.clear()
        late = server.post(CHAT, body(timeout=0.1))
        assert late.status_code == 504 and late.headers["x-should-retry"] == "false"
        assert late.json()["error"]["code"] == "timeout"
        lm.gate.set()
        until(lambda: server.idle)
        lm.last = lm.passes + 3  # the stream has begun by then
        with server.client() as client, client.stream("POST", CHAT, json=body(timeout=0.5, stream=True)) as stream:
            text = "".join(stream.iter_text())
        assert '"content":' in text
        assert '"code":"timeout"' in text and text.endswith("data: [DONE]\n\n")
        lm.gate.set()
        until(lambda: server.idle)
        assert not any(slot.busy for slot in lm.slots)


# Failures


def test_the_failure_of_one_request_touches_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose log-probabilities cannot be computed fails, whole or streamed; those beside it do not."""
    usual = Sequence.push

    def broken(self: Sequence, *given: Any) -> bool:
        if self.limits.logprobs == 7 and len(self.generated) == 3:
            raise ZeroDivisionError("secret detail")
        return usual(self, *given)

    monkeypatch.setattr(Sequence, "push", broken)
    with live(random_model("tiktoken")) as server, ThreadPoolExecutor(8) as pool:
        wanted = server.post(CHAT, body()).json()["choices"][0]["message"]["content"]
        good = [pool.submit(server.post, CHAT, body()) for _ in range(4)]
        bad = [pool.submit(server.post, CHAT, body(logprobs=True, top_logprobs=7, stream=s)) for s in (True, False)]
        assert {job.result().json()["choices"][0]["message"]["content"] for job in good} == {wanted}
        streamed, whole = (job.result() for job in bad)
        assert whole.status_code == 500 and whole.json()["error"]["code"] == "internal_error"
        assert '"code":"internal_error"' in streamed.text and streamed.text.endswith("data: [DONE]\n\n")
        assert "secret" not in whole.text + streamed.text
        until(lambda: server.idle)


# The end


def test_a_server_that_is_told_to_stop_finishes_what_it_has_begun() -> None:
    with held() as (server, lm), ThreadPoolExecutor(4) as pool:
        lm.gate.clear()
        before = lm.passes
        with server.client() as kept:
            assert kept.get("/health").json() == {"status": "ready"}
            running = [pool.submit(server.post, CHAT, body(stream=s)) for s in (True, False)]
            until(lambda: server.service.admission.running == 2 and lm.passes > before)
            server.server.handle_exit(signal.SIGTERM, None)
            assert server.service.state == "draining"
        lm.gate.set()
        streamed, whole = (job.result() for job in running)
        assert whole.json()["choices"][0]["finish_reason"] == "length"
        assert streamed.text.endswith("data: [DONE]\n\n")
        server.thread.join(PATIENCE)
        assert not server.thread.is_alive()


def test_requests_that_outlast_the_drain_are_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "outpace.serve")
    with held(drain_seconds=1) as (server, lm):
        lm.gate.clear()
        connection = sent(server, body(max_tokens=3000))
        until(lambda: server.service.admission.running == 1)
        server.server.handle_exit(signal.SIGTERM, None)
        server.thread.join(PATIENCE)
        assert not server.thread.is_alive()
        lm.gate.set()
        connection.close()
        until(lambda: server.service.model.engine.idle)
        assert not any(slot.busy for slot in lm.slots)
        told = [json.loads(record.message) for record in caplog.records if record.name == "outpace.serve"]
        (line,) = [line for line in told if line["event"] == "request"]
        assert line["status"] == 503, "the log tells of them"


PROGRAM = """
from outpace.serve.launch import serve
from outpace.serve.settings import ServeSettings
from tests.tiny_tokenizers import random_model

serve(random_model("tiktoken"), ServeSettings(("tiny",), "tiny", port={port}))
"""


def test_a_process_drains_on_sigterm() -> None:
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", PROGRAM.format(port=port)], stderr=subprocess.PIPE)
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
            until(lambda: _answers(client) and client.get("/health").status_code == 200)
            with client.stream("POST", CHAT, json=body(max_tokens=100, stream=True)) as stream:
                pieces = stream.iter_text()
                text = next(pieces)
                process.send_signal(signal.SIGTERM)
                text += "".join(pieces)
        assert text.endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in text
        assert process.wait(PATIENCE) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.communicate()


def test_a_server_is_not_ready_before_it_is_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    warm = threading.Event()
    model = random_model("tiktoken")
    monkeypatch.setattr(model, "warm_up", lambda: warm.wait(PATIENCE))
    seen: list[Any] = []

    def look(url: str) -> None:
        with httpx2.Client(base_url=url, timeout=PATIENCE) as client:
            until(lambda: _answers(client))
            seen.extend([client.get("/health"), client.post(CHAT, json=body())])
        warm.set()

    port = free_port()
    looking = threading.Thread(target=look, args=(f"http://127.0.0.1:{port}",))
    looking.start()
    with live(model, port=port) as server:
        looking.join(PATIENCE)
        assert server.get("/health").status_code == 200
    health, chat = seen
    assert (health.status_code, health.json()) == (503, {"status": "starting"})
    assert (
        chat.status_code == 503 and chat.json()["error"]["code"] == "not_ready" and chat.headers["retry-after"] == "1"
    )


def test_a_server_whose_model_cannot_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever started it sees why, and may start it again."""
    model = random_model("tiktoken")
    monkeypatch.setattr(model, "warm_up", lambda: [][0])
    with pytest.raises(OutpaceError, match="the model cannot run: IndexError"):
        serve(model, ServeSettings((NAME,), NAME, port=free_port()))


def _answers(client: httpx2.Client) -> bool:
    try:
        client.get("/health")
    except httpx2.TransportError:
        time.sleep(0.01)
        return False
    return True
