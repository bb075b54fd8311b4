"""Files that grow line by line and are continued after a kill: one writer at a time, and no torn last line."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from outpace.errors import UsageError

BLOCK = 1 << 16


def whole_lines(file: IO[bytes]) -> int:
    """Return the number of bytes up to the end of the last complete line."""
    at = file.seek(0, 2)
    while at > 0:
        start = max(0, at - BLOCK)
        file.seek(start)
        found = file.read(at - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        at = start
    return 0


def claim(file: IO[bytes], path: Path, instead: str) -> None:
    """Lock the file against other writers, where the system supports locks; `instead` says what else to do."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"another process is writing {str(path)!r}: {instead}") from None
    except OSError:
        return  # a file system without locks
