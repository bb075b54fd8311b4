"""What the benchmarks of serving share: clients in a process of their own, and tables."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
CLIENT = Path(__file__).parent / "serving_client.py"


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def free_port() -> int:
    with socket.socket() as free:
        free.bind((HOST, 0))
        return int(free.getsockname()[1])


@dataclass(frozen=True)
class Answered:
    """What came of requests that were sent at once."""

    seconds: float
    texts: list[str]
    tokens: int
    first: list[float]  # seconds until the first text of each


class Clients:
    """Clients that send requests at once."""

    def __init__(self) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, str(CLIENT)], **pipes)

    def ask(self, port: int, bodies: list[dict[str, Any]]) -> Answered:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"host": HOST, "port": port, "bodies": bodies}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("a request failed: the error of the clients is above")
        done = json.loads(line)
        answers = done["answers"]
        return Answered(
            done["seconds"], [each["text"] for each in answers], sum(each["tokens"] or 0 for each in answers),
            [each["first"] for each in answers],
        )  # fmt: skip

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def table(head: Seq[str], rows: Seq[Seq[object]]) -> str:
    """Return a table in Markdown; all columns but the first are numbers."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
