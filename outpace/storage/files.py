"""Atomic file writes, and the cache folder."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically; until then, readers see the old file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def cache_dir() -> Path:
    """Return the cache folder: OUTPACE_CACHE, or else `outpace` in the user's cache folder."""
    if own := os.environ.get("OUTPACE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "outpace"
