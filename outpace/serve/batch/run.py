"""Runs a batch in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import aclosing

from outpace.serve.batch.engine import BatchEngine
from outpace.serve.batch.lines import BatchLine
from outpace.serve.batch.records import BatchRecord

Take = Callable[[BatchRecord], None]


def run(engine: BatchEngine, lines: Iterator[BatchLine], take: Take) -> None:
    """Answer lines; `take` gets each record as it is there."""
    asyncio.run(_run(engine, lines, take))


async def _run(engine: BatchEngine, lines: Iterator[BatchLine], take: Take) -> None:
    async with aclosing(engine):
        await engine.warm_up()
        async for record in engine.answers(lines):
            take(record)
