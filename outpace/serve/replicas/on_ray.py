"""Replicas in a Ray cluster: how many there are, which one is asked, and how they are replaced."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from time import monotonic
from types import FrameType
from typing import Any

from starlette.types import Message

from outpace.errors import OutpaceError
from outpace.serve.launch import ListeningServer, config_of
from outpace.serve.ray_cluster import Load, cause_of, connect, gpus_each
from outpace.serve.replicas.front import ReplicaFront, guarded
from outpace.serve.replicas.metric_texts import merged
from outpace.serve.replicas.relay import Relay
from outpace.serve.replicas.replica import ModelReplica
from outpace.serve.settings import ServeSettings
from outpace.serve.telemetry.log_lines import write_to_stderr
from outpace.serve.web.failures import queue_full
from outpace.serve.web.inside import InsideRequest

logger = logging.getLogger("outpace.serve")
APP = "outpace"
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
TARGET = 0.75  # of the requests that a replica may have: with more on average, another one is started
SHOW_SECONDS = 2.0  # between two looks at the metrics of a replica
GONE_SECONDS = 10.0  # after which a replica that has shown nothing is gone
STARTS = 2  # attempts to start a replica
RETRY = 1  # seconds after which a refused client may ask again


@dataclass(frozen=True)
class ReplicaPlan:
    """How many replicas there are, and what each of them takes."""

    least: int = 1
    most: int = 1
    ongoing: int = 16  # requests that a replica has at a time; further ones go to another one, or wait
    cpus: float = 1.0


class MetricsBoard:
    """An actor that keeps the latest metrics of each replica: a replica that is full would not answer for them."""

    def __init__(self) -> None:
        self._texts: dict[str, tuple[str, float]] = {}

    def put(self, name: str, text: str) -> None:
        self._texts[name] = (text, monotonic())

    def texts(self) -> list[str]:
        """Return the texts of the replicas that are there."""
        now = monotonic()
        self._texts = {name: kept for name, kept in self._texts.items() if now - kept[1] < GONE_SECONDS}
        return [text for text, _ in self._texts.values()]


class RayReplica(ModelReplica):
    """A replica that shows its metrics on a board."""

    async def __init__(self, load: Load, board: Any) -> None:  # type: ignore[misc]
        write_to_stderr()  # Ray keeps it in its logs
        await super().__init__(load)  # type: ignore[misc]
        self._showing = asyncio.create_task(self._show(board))

    async def _show(self, board: Any) -> None:
        from ray import serve

        name = serve.get_replica_context().replica_id.unique_id
        while True:
            await board.put.remote(name, self.metrics(name))
            await asyncio.sleep(SHOW_SECONDS)


class RayPool:
    """The replicas of a model."""

    def __init__(self, load: Load, settings: ServeSettings, plan: ReplicaPlan):
        import ray
        from ray import serve

        self._load, self._settings, self._plan = load, settings, plan
        connect()
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})  # the front is the proxy
        self._board: Any = ray.remote(num_cpus=0)(MetricsBoard).remote()
        self.deploy()

    def deploy(self) -> None:
        """Start the replicas; or, if there are some, replace them one after the other by new ones."""
        from ray import serve
        from ray.serve.config import AutoscalingConfig, RequestRouterConfig

        plan = self._plan
        made: Any = serve.deployment(
            RayReplica,
            name="model",
            autoscaling_config=AutoscalingConfig(
                min_replicas=plan.least, max_replicas=plan.most, target_ongoing_requests=TARGET * plan.ongoing
            ),
            max_ongoing_requests=plan.ongoing,
            max_queued_requests=self._settings.limits.waiting,
            max_constructor_retry_count=STARTS,
            graceful_shutdown_timeout_s=self._settings.drain_seconds,
            ray_actor_options={"num_cpus": plan.cpus, "num_gpus": gpus_each()},
            request_router_config=RequestRouterConfig(
                request_router_class=ROUTER, request_router_kwargs={"num_fallback_replicas": plan.most}
            ),
        )
        try:
            self._handle = serve.run(made.bind(self._load, self._board), name=APP, route_prefix=None)
        except RuntimeError as error:
            why = serve.status().applications[APP].deployments["model"].message
            raise OutpaceError(f"the replicas did not start: {cause_of(why)}") from error

    async def ask(self, request: InsideRequest, key: str) -> AsyncGenerator[Message, None]:
        """Yield the reply of the replica that is at home for this key or, if it is full, of the next one."""
        from ray.serve.exceptions import BackPressureError

        reply = self._handle.options(method_name="answer", stream=True, session_id=key).remote(request)
        try:
            async for message in reply:
                yield message
        except BackPressureError as error:
            raise queue_full(RETRY) from error
        finally:
            reply.cancel()

    async def metrics(self) -> str:
        """Return the metrics of all replicas."""
        return merged(await self._board.texts.remote())

    def close(self) -> None:
        from ray import serve

        serve.delete(APP)


class FrontServer(ListeningServer):
    """uvicorn, but new requests on open connections are refused from the first signal on."""

    def __init__(self, pool: RayPool, settings: ServeSettings):
        from ray.exceptions import RayActorError
        from ray.serve.exceptions import ReplicaUnavailableError

        lost = (RayActorError, ReplicaUnavailableError)
        self.front = ReplicaFront(Relay(pool.ask, lost), settings, pool.metrics)
        super().__init__(config_of(guarded(self.front, settings), settings))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.front.state = "draining"
        super().handle_exit(sig, frame)


def _replace(pool: RayPool) -> None:
    try:
        pool.deploy()
    except OutpaceError as error:
        logger.error("%s", error)


def serve(pool: RayPool, settings: ServeSettings, on_start: Callable[[int], None]) -> None:
    """Serve replicas until a signal stops it. SIGHUP replaces them one by one, while the others answer."""
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, lambda *_: threading.Thread(target=_replace, args=[pool], daemon=True).start())
    try:
        server = FrontServer(pool, settings)
        server.on_start = on_start
        server.run()
    finally:
        pool.close()
