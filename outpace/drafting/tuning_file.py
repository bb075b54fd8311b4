"""Calibration files: the results of `outpace calibrate`, with one section for each method that reads them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from outpace.errors import OutpaceError, UsageError

FORMAT, VERSION = "outpace-calibration", 1
METHODS = ("graft", "via_sd")  # methods that read the file


def section(path: str | Path, name: str) -> dict[str, Any]:
    """Read this method's section of the file."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the calibration file {str(path)!r}: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise UsageError(
            f"{str(path)!r} is no calibration file; make one with `outpace calibrate TRACE... --output FILE`"
        )
    if found["version"] > VERSION:
        raise UsageError(f"{str(path)!r} has version {found['version']}, but this Outpace reads up to {VERSION}")
    if name not in found:
        known = ", ".join(key for key in METHODS if key in found)
        raise UsageError(
            f"the calibration file {str(path)!r} has no section for {name!r}, only for {known or 'no method'}"
        )
    return found[name]


def write(path: str | Path, sections: dict[str, dict[str, Any]]) -> None:
    """Write the whole file; if that fails, the previous file stays."""
    text = json.dumps({"format": FORMAT, "version": VERSION, **sections}, indent=1)
    half = Path(f"{path}.{os.getpid()}")
    try:
        half.write_text(text, encoding="utf-8")
        half.replace(path)
    except OSError as error:
        half.unlink(missing_ok=True)
        raise OutpaceError(f"cannot write the calibration file: {error}") from error
