"""Runs a batch in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing

from outpace.api.model import Model
from outpace.serve.batch.engine import BatchEngine
from outpace.serve.batch.lines import BatchLine
from outpace.serve.batch.records import BatchRecord
from outpace.serve.settings import ServeSettings

Lines = Iterator[BatchLine]
Take = Callable[[BatchRecord], None]


def run(model: Model, settings: ServeSettings, lines: Lines, take: Take) -> None:
    """Answer lines; `take` gets each record as it is there."""
    asyncio.run(_run(model, settings, lines, take))


async def _run(model: Model, settings: ServeSettings, lines: Lines, take: Take) -> None:
    with closing(BatchEngine(model, settings)) as engine:
        await engine.warm_up()
        async for record in engine.answers(lines):
            take(record)
