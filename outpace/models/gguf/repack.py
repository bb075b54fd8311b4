"""Repacking: use a GGUF file's weights as stored, or reordered by llama.cpp for this processor, whichever is faster.

On some processors reordered weights are faster for single tokens. With some weight types, calls of more than three
tokens then round differently, so passes are split into calls of three (`runtime`). Both orders are tried when a file is
first loaded.
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
GAIN = 0.05  # least saving, as a share of a single token's time, for which weights are reordered
ROUNDS = 7
MANY = 48  # tokens that are compared in one call
CONTEXT = 16  # tokens before the timed ones


def load_faster(path: Path, offload: bool | None) -> File:
    """Load the file with its weights in the order that is faster for single tokens."""
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
    if _same_logits(other):
        other.together = BATCH
    _remember(key, RepackTrial(other.together, paired=False))
    return other


def _same_logits(file: File) -> bool:
    """Return whether many tokens get the same logits in one call as in small calls, as with some weight types."""
    entries, results = [BatchEntry(i + 1, i, [0], True) for i in range(MANY)], list[Tensor]()
    for together in (file.together, BATCH):
        runtime = Runtime(file, LEAST, together)
        runtime.decode(entries)
        results.append(torch.stack([runtime.logits(i) for i in range(MANY)]))
    return torch.equal(*results)


def _worth(kept: File, other: File) -> bool:
    """Return whether `other` is faster; single tokens are timed on both files in turns."""
    runtimes = [Runtime(file, LEAST) for file in (kept, other)]
    times: list[list[float]] = [[], []]
    for runtime in runtimes:
        runtime.decode([BatchEntry(i + 1, i, [0]) for i in range(CONTEXT)])
    for position in range(CONTEXT, CONTEXT + ROUNDS):
        for runtime, spent in zip(runtimes, times, strict=True):
            start = time.perf_counter()
            runtime.decode([BatchEntry(1, position, [0], True)])
            runtime.greedy(0)  # waits for the pass
            spent.append(time.perf_counter() - start)
    before, after = (statistics.median(spent) for spent in times)
    logger.info("a token takes %.1f ms, and %.1f ms with reordered weights", 1e3 * before, 1e3 * after)
    return after < (1 - GAIN) * before


def _key(path: Path, offload: bool | None) -> dict[str, str]:
    """Return everything that the result depends on."""
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
    """The result of the trial when a file is first loaded."""

    together: int  # most tokens per call on reordered weights; 0: they are not faster
    paired: bool  # whether no token may be computed alone


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
        logger.warning("could not save which order of weights is faster: %s", error)
