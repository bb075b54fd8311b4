"""The server of the soak as a process: started, watched, broken and stopped."""

from __future__ import annotations

import asyncio
import subprocess
import time
from pathlib import Path

import httpx2
from soak_report import SoakSettings
from soak_server import KEYS

READY = 300.0  # seconds until a server answers
SETTLE = 30.0  # seconds until what clients left has ended


class ServerProcess:
    """The server, which is started, watched, broken and stopped."""

    def __init__(self, command: list[str], port: int, given: SoakSettings):
        self.command = [*command, str(port), str(given.slots)]
        self.url = f"http://127.0.0.1:{port}"
        given.log.parent.mkdir(parents=True, exist_ok=True)
        self._log = given.log.open("a")
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    async def start(self) -> None:
        """Start, and wait until it answers."""
        self.process = subprocess.Popen(self.command, stdout=self._log, stderr=self._log)
        end = time.monotonic() + READY
        async with httpx2.AsyncClient(base_url=self.url) as http:
            while not await _healthy(http):
                if self.process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"the server did not start: see {self._log.name}")
                await asyncio.sleep(0.2)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def wait(self, seconds: float) -> int | None:
        """Return the exit status; None if it still runs."""
        assert self.process is not None
        with_end = asyncio.to_thread(self.process.wait, seconds)
        try:
            return await with_end
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self._log.close()

    async def held(self) -> dict[str, float]:
        """Return what it holds now, seen from inside and from outside; call it while no client asks."""
        async with httpx2.AsyncClient(base_url=self.url, timeout=SETTLE) as http:
            inside = (await http.get("/soak", headers={"X-API-Key": KEYS["ann"]})).json()
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines() if ":" in line
        )
        files = len(list(Path(f"/proc/{self.pid}/fd").iterdir()))
        megabytes = round(int(status["VmRSS"].split()[0]) / 1024, 1)
        return {**inside, "open files": files, "threads": int(status["Threads"]), "memory, MB": megabytes}


async def _healthy(http: httpx2.AsyncClient) -> bool:
    try:
        return (await http.get("/health")).status_code == 200
    except httpx2.TransportError:
        return False
