"""Compute threads: OpenMP gives every thread that computes a set of its own, and keeps it.

Where two sets are more than there are cores, OpenMP lets all of them sleep between two pieces of work, and small passes
on a CPU take four times as long. So a thread that hands its work to another one gives its set back; it gets a new one,
in 60 microseconds, when it computes again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

SOFT = 1  # as OpenMP numbers it: what was set stays set
LIBRARIES = ("libgomp*", "libomp*", "libiomp*")


@cache
def _pause() -> Callable[[int], int] | None:
    """OpenMP's own function for it, from the library that torch computes with."""
    folder = Path(torch.__file__).parent / "lib"
    for path in (found for pattern in LIBRARIES for found in sorted(folder.glob(pattern))):
        try:
            return ctypes.CDLL(str(path)).omp_pause_resource_all
        except (OSError, AttributeError):
            continue
    return None


def give_back() -> None:
    """The calling thread does without compute threads, until it computes again."""
    pause = _pause()
    if pause is not None:
        pause(SOFT)
