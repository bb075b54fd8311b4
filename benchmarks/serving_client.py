"""Clients of serving.py, as a process of their own, so that reading replies takes no time from the server.

It reads lines of JSON with the address of a server and the bodies of requests for /v1/completions, sends all bodies at
once, and writes a line with what came of each.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

SECONDS = 600


class Connection:
    """A client with one connection."""

    def __init__(self, host: str, port: int):
        self.http = http.client.HTTPConnection(host, port, timeout=SECONDS)
        self.http.connect()

    def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the text, the number of tokens, and the seconds until the first text and until the end."""
        start, first, text, usage = time.perf_counter(), 0.0, "", dict[str, Any]()
        self.http.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = self.http.getresponse()
        if reply.status != 200:
            raise RuntimeError(f"{reply.status} {reply.read().decode()}")
        for data in _events(reply) if body.get("stream") else [json.load(reply)]:
            first = first or time.perf_counter() - start
            text += "".join(choice["text"] for choice in data["choices"])
            usage = data.get("usage") or usage
        return {
            "text": text, "tokens": usage.get("completion_tokens"), "first": first, "all": time.perf_counter() - start
        }  # fmt: skip


def _events(reply: http.client.HTTPResponse) -> Any:
    for line in reply:
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))


def main() -> None:
    for line in sys.stdin:
        given = json.loads(line)
        connections = [Connection(given["host"], given["port"]) for _ in given["bodies"]]
        with ThreadPoolExecutor(len(connections)) as pool:
            start = time.perf_counter()
            done = list(pool.map(Connection.ask, connections, given["bodies"]))
            seconds = time.perf_counter() - start
        for connection in connections:
            connection.http.close()
        print(json.dumps({"seconds": seconds, "answers": done}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
