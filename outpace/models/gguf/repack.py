"""Order: weights as they lie in a file, or in the order that llama.cpp likes on this processor, whichever is faster.

Reordered weights are read faster by single tokens on some processors. Calls of more than three tokens on some of them
round differently, so there passes come in calls of three (`runtime`). Both are tried when a file is first loaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import statistics
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.models.gguf.runtime import BATCH, FEW, LEAST, BatchEntry, File, Runtime, identity
from outpace.models.memory import free
from outpace.storage.files import cache_dir, write_whole

logger = logging.getLogger(__name__)
GAIN = 0.05  # of a single token, that is worth it
ROUNDS = 7
MANY = 48  # tokens that are tried together
CONTEXT = 16  # tokens in front of those that are timed


def faster(path: Path, offload: bool | None) -> File:
    """The file, with its weights in the order in which single tokens take less time."""
    key = _key(path, offload) if path.is_file() else {}
    known = _remembered(key)
    if known is not None:
        return File(path, offload, together=known.together or None, paired=known.paired)
    kept = File(path, offload)
    if 2 * kept.model.size > free(torch.device("cpu")):
        return kept
    if kept.paired:
        _remember(key, RepackTrial(0, paired=True))
        return kept
    other = File(path, offload, together=FEW)
    if other.paired or not _worth(kept, other):
        _remember(key, RepackTrial(0, paired=False))
        return kept
    if _alike(other):
        other.together = BATCH
    _remember(key, RepackTrial(other.together, paired=False))
    return other


def _alike(file: File) -> bool:
    """Whether many tokens say the same together as in small calls: for some kinds of numbers they do."""
    entries, said = [BatchEntry(i + 1, i, [0], True) for i in range(MANY)], list[Tensor]()
    for together in (file.together, BATCH):
        runtime = Runtime(file, LEAST, together)
        runtime.decode(entries)
        said.append(torch.stack([runtime.logits(i) for i in range(MANY)]))
    return torch.equal(*said)


def _worth(kept: File, other: File) -> bool:
    """By single tokens, in turns."""
    runtimes = [Runtime(file, LEAST) for file in (kept, other)]
    times: list[list[float]] = [[], []]
    for runtime in runtimes:
        runtime.decode([BatchEntry(i + 1, i, [0]) for i in range(CONTEXT)])
    for position in range(CONTEXT, CONTEXT + ROUNDS):
        for runtime, spent in zip(runtimes, times, strict=True):
            start = time.perf_counter()
            runtime.decode([BatchEntry(1, position, [0], True)])
            runtime.greedy(0)  # waits
            spent.append(time.perf_counter() - start)
    before, after = (statistics.median(spent) for spent in times)
    logger.info("a token takes %.1f ms, %.1f on reordered weights", 1e3 * before, 1e3 * after)
    return after < (1 - GAIN) * before


def _key(path: Path, offload: bool | None) -> dict[str, str]:
    """What the answer depends on."""
    return {
        "file": identity(path),
        "offload": str(offload),
        "processor": f"{_processor()}, {torch.get_num_threads()} threads",
        "library": version("cyllama"),
    }


def _processor() -> str:
    with suppress(OSError), open("/proc/cpuinfo") as lines:
        return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    return platform.processor()


def _place(key: dict[str, str]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_dir() / "costs" / f"order-{digest[:16]}.json"


class RepackTrial(NamedTuple):
    """What was tried when a file was first loaded."""

    together: int  # tokens of a call on reordered weights; 0: they are not faster
    paired: bool  # whether no token may come alone


def _remembered(key: dict[str, str]) -> RepackTrial | None:
    try:
        found = json.loads(_place(key).read_text(encoding="utf-8"))
        return RepackTrial(int(found["together"]), bool(found["paired"])) if found["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(key: dict[str, str], known: RepackTrial) -> None:
    path = _place(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"key": key, **known._asdict()}))
    except OSError as error:
        logger.warning("which order of weights is faster could not be kept: %s", error)
