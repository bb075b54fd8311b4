"""BatchEngine: answers the lines of a batch with a model, through the routes of the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from itertools import islice

from outpace.api.model import Model
from outpace.serve.app import build_app
from outpace.serve.batch.lines import BatchLine
from outpace.serve.batch.records import BatchRecord, answer_record
from outpace.serve.service import Service
from outpace.serve.settings import ServeSettings
from outpace.serve.web.inside import InsideRequest, ask

AHEAD = 8  # lines that are prepared while the engine is full
ENOUGH = 2**31  # a batch asks for no more at a time than the engine takes, so nothing is refused


class BatchEngine:
    """A model and the routes of its server."""

    def __init__(self, model: Model, settings: ServeSettings):
        limits = replace(settings.limits, waiting=ENOUGH, connections=ENOUGH)
        self.service = Service(model, replace(settings, limits=limits))
        self.app = build_app(self.service)
        self.at_once = self.service.admission.capacity + AHEAD
        self._room = asyncio.Semaphore(self.at_once)

    async def warm_up(self) -> None:
        await self.service.warm_up()

    async def answers(self, lines: Iterable[BatchLine]) -> AsyncIterator[BatchRecord]:
        """Yield the records of lines as they are there."""
        coming = iter(lines)
        running = {asyncio.create_task(self.answer(line)) for line in islice(coming, self.at_once)}
        try:
            while running:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                running |= {asyncio.create_task(self.answer(line)) for line in islice(coming, len(done))}
                for each in done:
                    yield each.result()
        finally:
            for each in running:
                each.cancel()
            if running:
                await asyncio.wait(running)

    async def answer(self, line: BatchLine) -> BatchRecord:
        """Return the record of one line. No more lines are asked for at a time than keep the engine full."""
        async with self._room:
            reply = await ask(self.app, InsideRequest(line.url, json.dumps(line.body).encode()))
        return answer_record(line.custom_id, reply.status, reply.headers.get("x-request-id"), reply.body)

    async def aclose(self) -> None:
        await self.service.close()
