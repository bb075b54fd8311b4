"""JSON Lines files that begin with a header: traces and benchmark runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outpace.errors import OutpaceError


def read_lines(path: str | Path, kind: str, version: int, hint: str) -> list[dict[str, Any]]:
    """Return all lines, the header first, without a truncated last line. `hint` says what the file should be."""
    name = repr(str(path))
    try:
        lines = (
            Path(path).read_text(encoding="utf-8").split("\n")
        )  # not splitlines(): texts may contain other separators
    except (OSError, UnicodeDecodeError) as error:
        raise OutpaceError(f"cannot read {name}: {error}") from error
    found = list(_objects(lines, name))
    if not found or found[0].get("format") != kind:
        raise OutpaceError(f"{name} is not {hint}")
    if found[0]["version"] > version:
        newer = f"{name} has version {found[0]['version']}, but this Outpace reads up to {version}"
        raise OutpaceError(f"{newer}: update Outpace")
    return found


def _objects(lines: list[str], name: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            found = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines) > 1:
                return  # the run was interrupted while writing this line
            raise OutpaceError(f"{name}, line {number} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise OutpaceError(f"{name}, line {number} is not a JSON object")
        yield found
