"""API keys: read from a file or the environment, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from pathlib import Path

from outpace.errors import OutpaceError, UsageError

VARIABLE = "OUTPACE_API_KEYS"


class ApiKeys:
    """The owners of a server's keys, by key."""

    def __init__(self, keys: Mapping[str, str]):
        self._digests = [(owner, _digest(key)) for owner, key in keys.items()]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def owner(self, key: str) -> str | None:
        """Return who a key belongs to, in a time that does not depend on the key."""
        given, found = _digest(key), None
        for owner, digest in self._digests:
            if hmac.compare_digest(given, digest):
                found = owner
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def load(file: Path | None) -> dict[str, str]:
    """Read keys from a file or, without one, from the environment: one `KEY` or `NAME KEY` for each line."""
    if file is None:
        return parse(os.environ.get(VARIABLE, ""))
    try:
        found = parse(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise OutpaceError(f"cannot read the API keys: {error}") from error
    if not found:
        raise UsageError(f"{file} has no API key: write one for each line, as KEY or NAME KEY")
    return found


def parse(text: str) -> dict[str, str]:
    """Return the owners and keys of a text; an owner without a name is numbered."""
    found: dict[str, str] = {}
    lines = [line.split() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for number, words in enumerate(lines, 1):
        if len(words) > 2:
            raise UsageError(f"line {number} of the API keys is neither KEY nor NAME KEY")
        owner = words[0] if len(words) == 2 else f"key-{number}"
        if owner in found:
            raise UsageError(f"two API keys have the name {owner!r}")
        found[owner] = words[-1]
    return found
