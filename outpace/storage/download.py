"""Downloads of pinned files from https:// or file://, checked against their SHA-256 while they are written."""

from __future__ import annotations

import hashlib
import urllib.request as web
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path

from outpace.errors import OutpaceError, UsageError

BLOCK = 1 << 20  # bytes per read
TIMEOUT = 60.0  # seconds without a byte
# No handlers for http and ftp, so that a server cannot redirect to them.
HANDLERS = (
    web.ProxyHandler, web.UnknownHandler, web.HTTPDefaultErrorHandler, web.HTTPRedirectHandler, web.FileHandler,
    web.HTTPSHandler, web.HTTPErrorProcessor,
)  # fmt: skip


def address(given: str, setting: str) -> str:
    """Return the base URL that a setting holds: https://, file://, or a folder."""
    scheme, marked, _ = given.partition("://")
    if not marked:
        return Path(given).expanduser().absolute().as_uri()
    if scheme.lower() not in ("https", "file"):
        reason = " (plain http can be read and changed in transit)" if scheme.lower() == "http" else ""
        raise UsageError(
            f"{setting} is {given!r}, but {scheme}:// is not supported{reason}: use https://, file:// or a folder"
        )
    return given.rstrip("/")


def download(url: str, target: Path, sha256: str, size: int, advance: Callable[[int], object]) -> None:
    """Write the file at `url` to `target`; if its hash is wrong, delete it and raise an error."""
    digest, count = hashlib.sha256(), 0
    with target.open("wb") as out:
        for block in _blocks(url, size + 1):  # one extra byte detects a longer file
            digest.update(block)
            out.write(block)
            count += len(block)
            advance(len(block))
    if digest.hexdigest() != sha256:
        target.unlink()
        found = f"{count} bytes" if count <= size else "of a longer file"
        raise OutpaceError(
            f"{url} is not the file that this version of Outpace needs, so the download was deleted: expected SHA-256 "
            f"{sha256} ({size} bytes), found {digest.hexdigest()} ({found}); use the weights of this version"
        )


def _blocks(url: str, most: int) -> Iterator[bytes]:
    opener = web.OpenerDirector()
    for handler in HANDLERS:
        opener.add_handler(handler())
    try:
        with opener.open(url, timeout=TIMEOUT) as stream:
            while most > 0 and (block := stream.read(min(BLOCK, most))):
                most -= len(block)
                yield block
    except (OSError, HTTPException, ValueError) as error:
        raise OutpaceError(f"cannot fetch {url} ({error}); check the network and the address") from error
