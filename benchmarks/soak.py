"""A soak: minutes of mixed load on a server in a process of its own, with all that goes wrong in a life.

    python benchmarks/soak.py --minutes 30
    python benchmarks/soak.py --minutes 2 --seed 7 --json build/soak.json

Clients of three owners ask by all four APIs, whole and streamed, with different methods and settings. They go away,
read slowly, send what cannot be answered, and hold idle connections. Requests fail by errors of their own code, passes
break, the process is killed and started again, and drains in the end. Every answer must be the one that the Python API
computed before (soak_plan.py). A text that was cut off must begin it. When the clients pause, the server must hold no
more than it held earlier. The same seed gives the same load; how much of it fits into the time depends on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import signal
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from random import Random

from soak_clients import Gate, SoakClient, Tally, Weather
from soak_plan import Ask, plan
from soak_process import SETTLE, ServerProcess
from soak_report import Check, SoakReport, SoakSettings
from soak_server import DRAIN_SECONDS

import outpace
from outpace.api.model import Model

KILLED, WARM = 0.1, 0.4  # shares of the time: until the kill; until the server is compared with its later self
STALL = 5000.0  # milliseconds that a busy machine may hold up a request for no reason of the server's
BETWEEN_BREAKS = 4  # answers to each client between two passes that break
INTERRUPTED = 130  # exit status
TELL = 15.0  # seconds between two lines
SERVER = Path(__file__).parent / "soak_server.py"


class Soak:
    """One run: the phases in order, then the checks."""

    def __init__(self, server: ServerProcess, asks: list[Ask], given: SoakSettings):
        self.server, self.given = server, given
        self.weather, self.tally, self.gate = Weather(), Tally(), Gate(left=given.requests)
        self.samples: list[dict[str, float]] = []
        self._told = 0  # violations
        self.clients = [
            SoakClient(server.url, asks, Random(f"{given.seed}-{i}"), self.weather, self.tally, given.think)
            for i in range(given.clients)
        ]

    async def run(self) -> SoakReport:
        """Run all phases."""
        seconds = 60 * self.given.minutes
        await self._up()
        tasks = [asyncio.create_task(client.run(self.gate)) for client in self.clients]
        try:
            self.gate.open.set()
            await asyncio.sleep(seconds * KILLED)
            await self._killed()
            await self._load(seconds * (WARM - KILLED))
            before = await self._settled()
            await self._load(seconds * (1 - WARM))
            after = await self._settled()
            self.gate.open.set()
            status = await self._drained()
        finally:
            self.weather.over = True
            await self.gate.close()
            for task, client in zip(tasks, self.clients, strict=True):
                task.cancel()
                await client.http.aclose()
        checks = [*self._leaks(before, after), *self._answers(), self._queue(), _drain(status)]
        return SoakReport(self.given.seed, dict(self.tally.counts), checks, self.tally.violations, self.samples)

    async def _up(self) -> None:
        await self.server.start()
        self.weather.down, self.weather.up_at = False, time.monotonic()

    async def _killed(self) -> None:
        """Kill the process under load, and start it again; clients ask again."""
        self.weather.down = True
        self.server.signal(signal.SIGKILL)
        await self.server.wait(SETTLE)
        await self._up()
        self.tally.counts["processes killed"] += 1

    async def _load(self, seconds: float) -> None:
        """Let clients ask; break a pass after every few answers, and tell how it goes."""
        self.gate.open.set()
        end = time.monotonic() + seconds
        answers, told = self.tally.counts["answers"], time.monotonic()
        while (left := end - time.monotonic()) > 0 and self.gate.left > 0:
            await asyncio.sleep(min(left, 0.5))
            if self.tally.counts["answers"] - answers > BETWEEN_BREAKS * self.given.clients:
                answers = self.tally.counts["answers"]
                self.server.signal(signal.SIGUSR1)
                self.weather.broken_passes += 1
            if time.monotonic() - told > TELL:
                told = time.monotonic()
                self._tell(left)

    def _tell(self, left: float) -> None:
        violations = self.tally.violations
        _say(f"{left:.0f} s left: {self.tally.counts['answers']} answers, {len(violations)} violations")
        for each in violations[self._told :]:
            _say(f"  {each[:2000]}")
        self._told = len(violations)

    async def _settled(self) -> dict[str, float]:
        """Pause the clients; return what the server holds when what they left has ended."""
        await self.gate.close()
        for client in self.clients:
            await client.reconnect()
        end = time.monotonic() + SETTLE
        while _busy(held := await self.server.held()) and time.monotonic() < end:
            await asyncio.sleep(0.2)
        self.samples.append(held)
        _say(json.dumps(held))
        return held

    async def _drained(self) -> int | None:
        """Stop the server under load; return its exit status."""
        await asyncio.sleep(1.0)
        self.weather.draining = self.weather.down = True
        self.server.signal(signal.SIGTERM)
        return await self.server.wait(DRAIN_SECONDS + SETTLE)

    def _leaks(self, before: dict[str, float], after: dict[str, float]) -> list[Check]:
        """Without requests the server holds none of them, and no more than it held when it was warm."""
        checks = []
        for name, found in after.items():
            most = before[name] if name in GROWING else 1 if name == TASKS else 0
            bound = most + GROWING.get(name, 0)
            if name == MEMORY:
                bound = round(most + self.given.growth, 1)
            checks.append(Check(name, found, f"≤ {bound}", found <= bound))
        return checks

    def _answers(self) -> list[Check]:
        counts, passes = self.tally.counts, self.weather.broken_passes
        most = passes * self.given.slots
        wrong, lost, other = counts["wrong answers"], counts["lost to broken passes"], counts["violations"]
        return [
            Check("answers that differ from the reference", wrong, "0", wrong == 0),
            Check("answers that were compared", counts["answers"], "> 0", counts["answers"] > 0),
            Check(f"requests lost to {passes} broken passes", lost, f"≤ {most}", lost <= most),
            Check("violations", other, "0", other == 0),
        ]

    def _queue(self) -> Check:
        """A request waits for those before it: with c clients and s slots, for at most c / s of them in turn.

        The bound is twice as much of the p99 of run times, as owners with fewer requests may overtake.
        """
        queue, run = (_p99([getattr(each, name) for each in self.tally.timings]) for name in ("queue", "run"))
        rounds = math.ceil(self.given.clients / self.given.slots)
        bound = 2 * rounds * run + STALL
        name = f"p99 of queue time, ms ({rounds} × p99 of run time {run:.0f} ms)"
        return Check(name, round(queue), f"≤ {bound:.0f}", queue <= bound)


TASKS, MEMORY = "asyncio tasks", "memory, MB"
# What may differ between two pauses by a little: pools start threads when they need them.
GROWING = {"open files": 4, "threads": 48, TASKS: 2, MEMORY: 0}


def _busy(held: dict[str, float]) -> bool:
    return any(count for name, count in held.items() if name not in GROWING)


def _drain(status: int | None) -> Check:
    return Check("exit status after SIGTERM", status, "0 or -15", status in (0, -signal.SIGTERM))


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[-1] if len(values) > 1 else 0.0


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def soak(model: Model, command: list[str], port: int, given: SoakSettings) -> SoakReport:
    """Compute the answers, then run the soak against the server that a command starts, given a port and slots."""
    asks = plan(model, given.seed, given.asks, given.tokens, given.long)
    server = ServerProcess(command, port, given)
    try:
        return asyncio.run(Soak(server, asks, given).run())
    finally:
        server.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--json", type=Path, help="write the report to this file, too")
    for name, value in asdict(SoakSettings()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    given = vars(parser.parse_args())
    model, port, file = given.pop("model"), given.pop("port"), given.pop("json")
    settings = SoakSettings(**given)
    _say(f"seed {settings.seed}, {settings.minutes:g} minutes, {settings.clients} clients")
    command = [sys.executable, str(SERVER), model]
    report = soak(outpace.load(model), command, port, settings)
    _say(report.table())
    if file is not None:
        file.write_text(json.dumps(asdict(report), indent=1, default=str))
    return 0 if report.sound else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
