"""What the server costs: the same requests to the engine alone and over HTTP, in turns, on one model.

    python benchmarks/serving.py --requests 8
    python benchmarks/serving.py --model my-model --requests 64 --tokens 256 --method plain

Clients are a process of their own, and read streams or whole replies over loopback. A round is one call of `generate`
with all prompts, then the same prompts over HTTP; the ratio of its tokens per second is what counts, because both sides
of a round see the same machine. Where others use the machine too, the ratio of processor time tells more: with
OMP_NUM_THREADS=1, waiting costs none. Texts must be equal.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from typing import Any, NamedTuple

import outpace
from outpace.api.model import Model
from outpace.serve.launch import server_of
from outpace.serve.settings import ServeSettings

# Reads lines with a URL and bodies, sends all bodies at once, and writes the seconds and the texts.
CLIENT = """
import asyncio, json, sys, time
from openai import AsyncOpenAI

async def ask(client, body):
    if not body["stream"]:
        return (await client.completions.create(**body)).choices[0].text
    return "".join([chunk.choices[0].text async for chunk in await client.completions.create(**body)])

async def run():
    for line in sys.stdin:
        given = json.loads(line)
        async with AsyncOpenAI(base_url=given["url"], api_key="none", timeout=600) as client:
            await client.models.list()
            start = time.perf_counter()
            texts = await asyncio.gather(*(ask(client, body) for body in given["bodies"]))
        print(json.dumps([time.perf_counter() - start, texts]), flush=True)

asyncio.run(run())
"""


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


class Ratio(NamedTuple):
    """Time of the engine alone as a share of its time in a server."""

    tokens_per_second: float
    processor_time: float

    def __str__(self) -> str:
        return f"{self.tokens_per_second:.3f} (by processor time {self.processor_time:.3f})"


class Served:
    """A server in a thread, and its clients in a process."""

    def __init__(self, model: Model, method: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.server = server_of(model, ServeSettings(("model",), "model", port=port, method=method))
        self.url = f"http://127.0.0.1:{port}/v1"
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.clients = subprocess.Popen([sys.executable, "-c", CLIENT], **pipes)
        while self.server.service.state != "ready":
            time.sleep(0.01)

    def ask(self, bodies: list[dict[str, Any]]) -> tuple[float, list[str]]:
        assert self.clients.stdin is not None and self.clients.stdout is not None
        self.clients.stdin.write(json.dumps({"url": self.url, "bodies": bodies}) + "\n")
        self.clients.stdin.flush()
        seconds, texts = json.loads(self.clients.stdout.readline())
        return seconds, texts

    def close(self) -> None:
        self.clients.kill()
        self.clients.communicate()
        self.server.should_exit = True
        self.thread.join()


def measure(model: Model, given: argparse.Namespace) -> dict[str, list[Ratio]]:
    """Return the ratios of each round."""
    prompts = [f"{i}. Tell a story about the number {i}:" for i in range(given.requests)]
    settings: dict[str, Any] = {"max_tokens": given.tokens, "temperature": 0.0, "ignore_eos": True}
    served = Served(model, given.method)
    ratios: dict[str, list[Ratio]] = {"whole": [], "streamed": []}
    try:
        for round in range(given.rounds + 1):  # the first one warms up
            start, used = time.perf_counter(), time.process_time()
            done = model.generate(prompts, method=given.method, **settings)
            alone, used_alone = time.perf_counter() - start, time.process_time() - used
            for way in ratios:
                same = {"model": "model", "max_tokens": given.tokens, "temperature": 0, "stream": way == "streamed"}
                bodies = [{**same, "prompt": prompt, "extra_body": {"ignore_eos": True}} for prompt in prompts]
                used = time.process_time()
                seconds, texts = served.ask(bodies)
                used = time.process_time() - used
                assert texts == [each.text for each in done], "the texts differ"
                if round:
                    ratios[way].append(Ratio(alone / seconds, used_alone / used))
                    say(f"round {round}, {way}: {ratios[way][-1]} of {given.requests * given.tokens / alone:.1f}/s")
    finally:
        served.close()
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--method", default="plain")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    model = outpace.load(given.model)
    model.max_batch = max(model.max_batch, given.requests)
    for way, ratios in measure(model, given).items():
        middle = Ratio(*(statistics.median(values) for values in zip(*ratios, strict=True)))
        say(f"{way}: {middle} of the engine alone (median of {len(ratios)} rounds)")


if __name__ == "__main__":
    main()
