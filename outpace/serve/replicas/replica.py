"""ModelReplica: a model and its application, in a process of its own; a front sends it requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from starlette.types import Message

from outpace.serve.app import build_app
from outpace.serve.ray_cluster import Load
from outpace.serve.service import Service
from outpace.serve.settings import LOOPBACK, ServeSettings
from outpace.serve.web.inside import InsideRequest, messages


class ModelReplica:
    """Answers requests of a front, which has checked hosts and keys."""

    async def __init__(self, load: Load) -> None:  # type: ignore[misc]
        model, settings = await asyncio.to_thread(load)
        self.service = Service(model, inner_settings(settings))
        self._app = build_app(self.service)
        await self.service.warm_up()

    async def answer(self, request: InsideRequest) -> AsyncGenerator[Message, None]:
        """Yield the messages of a reply. The request ends when nobody reads them any more."""
        async with aclosing(messages(self._app, request)) as reply:
            async for message in reply:
                yield message

    def metrics(self, name: str) -> str:
        """Return the metrics, with the name of this replica."""
        return self.service.metrics.text().replace('engine="0"', f'engine="{name}"')


def inner_settings(settings: ServeSettings) -> ServeSettings:
    """Return the settings of an application that only its front talks to."""
    shares = settings.shares_text  # so traces are given where a single server would give them
    return replace(settings, host=LOOPBACK[0], keys={}, cors_origins=(), open_without_keys=shares)
