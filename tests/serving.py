"""A server on a real port with a tiny model, for the tests of `outpace serve`."""

from __future__ import annotations

import copy
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2

from outpace.api.model import Model
from outpace.serve.launch import DrainingServer, server_of
from outpace.serve.settings import ServeSettings
from tests.tiny_tokenizers import Reciter, tiktoken

NAME = "tiny"
START = "<|im_start|>assistant\n"
TOOLS = (  # in a template: Hermes' form of calls
    '{% if tools %}<|im_start|>system\nCall as <tool_call>{"name": ..., "arguments": ...}</tool_call>: '
    "{{ tools | tojson }}<|im_end|>\n{% endif %}"
)
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = "{% if add_generation_prompt and thinking is not false %}<think>\n{% endif %}{# </think> #}"


def with_template(template: str) -> Any:
    """The tokenizer of tests with another chat template."""
    tokenizer = copy.deepcopy(tiktoken())
    tokenizer.chat_template = template
    return tokenizer


class Scripted(Reciter):
    """Answers each chat with what a script makes of its prompt."""

    def __init__(self, tokenizer: Any, script: Callable[[str], str]):
        super().__init__(tokenizer, "")
        self.script = script
        self.start = tokenizer.encode(START, add_special_tokens=False)

    def following(self, tokens: list[int]) -> int:
        size, tokenizer = len(self.start), self.pieces.tokenizer
        begin = max((i for i in range(len(tokens)) if tokens[i : i + size] == self.start), default=0) + size
        said = self.script(tokenizer.decode(tokens[:begin]))
        if tokenizer.chat_template.endswith(THINKING):
            said = "<think>\n" + said
        reply, done = tokenizer.encode(said, add_special_tokens=False), len(tokens) - begin
        known = 0 <= done < len(reply) and tokens[begin:] == reply[:done]
        return reply[done] if known else tokenizer.eos_token_id


def scripted(template: str, script: Callable[[str], str]) -> Model:
    tokenizer = with_template(template)
    return Model(Scripted(tokenizer, script), tokenizer, [tokenizer.eos_token_id], name="scripted")


PATIENCE = 60.0  # seconds to wait for a condition; only a failing test waits so long


class Live:
    """A server that runs in a thread."""

    def __init__(self, server: DrainingServer, port: int):
        self.server, self.port = server, port
        self.service = server.service
        self.url = f"http://127.0.0.1:{port}"
        self.thread = threading.Thread(target=server.run, daemon=True)

    def client(self, **settings: Any) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=PATIENCE, **settings)

    def post(self, path: str, body: dict[str, Any], **settings: Any) -> httpx2.Response:
        with self.client() as client:
            return client.post(path, json=body, **settings)

    def get(self, path: str, **settings: Any) -> httpx2.Response:
        with self.client() as client:
            return client.get(path, **settings)

    @property
    def idle(self) -> bool:
        """Whether no request is left anywhere."""
        scheduler = self.service.model.engine.scheduler
        admission = self.service.admission
        return scheduler.idle and not admission.running and not admission.pending


def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.002)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def live(model: Model, **settings: Any) -> Iterator[Live]:
    """Serve a model for a while."""
    given = {"names": (NAME,), "root": NAME, "port": free_port(), **settings}
    server = server_of(model, ServeSettings(**given))
    found = Live(server, given["port"])
    found.thread.start()
    try:
        until(lambda: server.started and server.service.state == "ready")
        yield found
    finally:
        server.should_exit = True
        found.thread.join(PATIENCE)
        assert not found.thread.is_alive()
