"""Markers in a Markdown file, between which a summary is inserted."""

from __future__ import annotations

from pathlib import Path

from outpace.errors import OutpaceError, UsageError
from outpace.storage.files import write_whole


def around(path: Path, name: str) -> tuple[str, str]:
    """Return the parts of a Markdown file before and after the text between these markers, markers included."""
    start, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    try:
        before, found, rest = path.read_text(encoding="utf-8").partition(start)
    except OSError as error:
        raise OutpaceError(f"cannot update: {error}") from error
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise UsageError(f"{path} has no {start} followed by {end}")
    return before + start, end + after


def update(path: Path, name: str, text: str) -> None:
    """Replace the text between the markers, and nothing else."""
    before, after = around(path, name)
    write_whole(path, f"{before}\n\n{text}\n\n{after}")
