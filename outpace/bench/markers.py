"""Markers: the place in a Markdown file where a summary goes."""

from __future__ import annotations

from pathlib import Path

from outpace.errors import OutpaceError, UsageError
from outpace.storage.files import write_whole


def around(path: Path, name: str) -> tuple[str, str]:
    """What a Markdown file has before and after the text between the markers of this name, markers included."""
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
    """Replace what is between the markers; all around them stays."""
    before, after = around(path, name)
    write_whole(path, f"{before}\n\n{text}\n\n{after}")
