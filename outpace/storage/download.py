"""Downloads of pinned files: from https:// or file://, hashed while they are written, refused when they are others."""

from __future__ import annotations

import hashlib
import urllib.request as web
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path

from outpace.errors import OutpaceError, UsageError

BLOCK = 1 << 20  # bytes per read
TIMEOUT = 60.0  # seconds without a byte
# Neither http nor ftp, to which a server could send us on.
HANDLERS = (
    web.ProxyHandler, web.UnknownHandler, web.HTTPDefaultErrorHandler, web.HTTPRedirectHandler, web.FileHandler,
    web.HTTPSHandler, web.HTTPErrorProcessor,
)  # fmt: skip


def address(given: str, setting: str) -> str:
    """The beginning of addresses that a setting holds: https://, file://, or a folder."""
    scheme, marked, _ = given.partition("://")
    if not marked:
        return Path(given).expanduser().absolute().as_uri()
    if scheme.lower() not in ("https", "file"):
        reason = " (what comes over plain http can be read and changed on its way)" if scheme.lower() == "http" else ""
        raise UsageError(
            f"{setting} is {given!r}, and {scheme}:// is not used{reason}: give https://, file:// or a folder"
        )
    return given.rstrip("/")


def download(url: str, target: Path, sha256: str, size: int, advance: Callable[[int], object]) -> None:
    """Write the file at `url` to `target`, or raise and leave none when it is not the one that is meant."""
    digest, count = hashlib.sha256(), 0
    with target.open("wb") as out:
        for block in _blocks(url, size + 1):  # one byte more tells a longer file
            digest.update(block)
            out.write(block)
            count += len(block)
            advance(len(block))
    if digest.hexdigest() != sha256:
        target.unlink()
        found = f"{count} bytes" if count <= size else "of a file that is longer"
        raise OutpaceError(
            f"{url} is not the file that this version of Outpace needs, and was deleted: expected SHA-256 {sha256} "
            f"({size} bytes), found {digest.hexdigest()} ({found}); fetch from the weights of this version"
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
        raise OutpaceError(
            f"cannot fetch {url} ({error}); check the network, and that the address is the one you mean"
        ) from error
