"""Launch: run a service under uvicorn, and let it drain when it is told to stop."""

from __future__ import annotations

from collections.abc import Callable
from socket import socket
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from outpace.api.model import Model
from outpace.errors import OutpaceError
from outpace.serve.app import build_app
from outpace.serve.service import Service
from outpace.serve.settings import ServeSettings
from outpace.serve.telemetry.log_lines import say

KEEP_ALIVE = 30  # seconds that an idle connection is kept


class ListeningServer(uvicorn.Server):
    """uvicorn, but it tells the port that it listens on."""

    def __init__(self, config: uvicorn.Config):
        super().__init__(config)
        self.on_start: Callable[[int], None] | None = None  # called with the port

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self.on_start is not None:
            self.on_start(self.servers[0].sockets[0].getsockname()[1])


class DrainingServer(ListeningServer):
    """uvicorn, but from the first signal on it refuses new requests on open connections. It ends if the model fails."""

    def __init__(self, config: uvicorn.Config, service: Service):
        super().__init__(config)
        self.service = service

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self.service.state == "failed"

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.service.state = "draining"
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Wait for what runs, then stop."""
        self.service.state = "draining"
        admission = self.service.admission
        say("draining", running=admission.running, waiting=admission.pending)
        await super().shutdown(sockets)


def server_of(model: Model, settings: ServeSettings) -> DrainingServer:
    """Return a server that is ready to run."""
    service = Service(model, settings)
    return DrainingServer(config_of(build_app(service), settings), service)


def config_of(app: ASGIApp, settings: ServeSettings) -> uvicorn.Config:
    """Return how uvicorn serves an application."""
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        access_log=False,
        log_config=None,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
        server_header=False,
    )


def serve(model: Model, settings: ServeSettings, on_start: Callable[[int], None] | None = None) -> None:
    """Serve until a signal stops it; `on_start` is called with the port."""
    server = server_of(model, settings)
    server.on_start = on_start
    server.run()
    if (failure := server.service.failure) is not None:
        raise OutpaceError(f"the model cannot run: {type(failure).__name__}: {failure}") from failure
