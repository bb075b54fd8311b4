"""What torchrun tells the processes that it starts. Reading it needs no torch."""

from __future__ import annotations

import os


def size() -> int:
    """Return how many processes torchrun has started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Return the number of this process; 0 leads."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Return the number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))
