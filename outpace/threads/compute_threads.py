"""Compute threads: releases the OpenMP thread pool of a thread that no longer computes.

OpenMP creates a pool for every thread that computes, and keeps it. If two pools together have more threads than the
machine has cores, OpenMP lets all of them sleep between two parallel regions, and small passes on a CPU take four times
as long. So a thread that hands its work to another thread releases its pool. It gets a new one, in 60 microseconds,
when it computes again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

SOFT = 1  # OpenMP's constant for a soft pause, which keeps settings
LIBRARIES = ("libgomp*", "libomp*", "libiomp*")


@cache
def _pause() -> Callable[[int], int] | None:
    """Return OpenMP's function that releases pools, from the library that torch uses."""
    folder = Path(torch.__file__).parent / "lib"
    for path in (found for pattern in LIBRARIES for found in sorted(folder.glob(pattern))):
        try:
            return ctypes.CDLL(str(path)).omp_pause_resource_all
        except (OSError, AttributeError):
            continue
    return None


def release_threads() -> None:
    """Release the compute threads of the calling thread until it computes again."""
    pause = _pause()
    if pause is not None:
        pause(SOFT)
