"""Calibration files: what `outpace calibrate` found out, one section for each method that reads it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from outpace.errors import OutpaceError, UsageError

FORMAT, VERSION = "outpace-calibration", 1
METHODS = ("graft", "via_sd")  # that read it


def section(path: str | Path, name: str) -> dict[str, Any]:
    """The part of the file that is for this method."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the calibration {str(path)!r}: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise UsageError(f"{str(path)!r} is no calibration; `outpace calibrate TRACE... --output FILE` makes one")
    if found["version"] > VERSION:
        raise UsageError(f"{str(path)!r} has version {found['version']}, and this Outpace reads up to {VERSION}")
    if name not in found:
        known = ", ".join(key for key in METHODS if key in found)
        raise UsageError(f"the calibration {str(path)!r} has nothing for {name!r}, only for {known or 'nobody'}")
    return found[name]


def write(path: str | Path, sections: dict[str, dict[str, Any]]) -> None:
    """All of it or, if that fails, what was there before."""
    text = json.dumps({"format": FORMAT, "version": VERSION, **sections}, indent=1)
    half = Path(f"{path}.{os.getpid()}")
    try:
        half.write_text(text, encoding="utf-8")
        half.replace(path)
    except OSError as error:
        half.unlink(missing_ok=True)
        raise OutpaceError(f"cannot write the calibration: {error}") from error
