"""The Ray cluster that batches and replicas run in."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

from outpace.api.model import Model
from outpace.serve.settings import ServeSettings

Load = Callable[[], tuple[Model, ServeSettings]]  # called in the process that answers
# How an error of ours ends a stack trace.
OWN = re.compile(r"^outpace\.errors\.\w+: (.*)", re.MULTILINE)


def connect() -> None:
    """Join the cluster that RAY_ADDRESS or this machine knows, or start one here."""
    import ray

    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level=logging.WARNING)
    for name in ("ray.data", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)


def gpus_each() -> int:
    """Return how many GPUs a model takes: one, if the cluster has any."""
    import ray

    return 1 if ray.cluster_resources().get("GPU") else 0


def cause_of(text: str) -> str:
    """Return the message of our error in the stack trace of another process or, without one, its last line."""
    found = OWN.findall(text)
    return found[-1] if found else text.strip().rpartition("\n")[2]
