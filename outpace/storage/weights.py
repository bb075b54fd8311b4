"""Trained weights by name: from a checkout, from the cache, or downloaded once from the address in OUTPACE_WEIGHTS."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from outpace.errors import HeadNotFound, OutpaceError, unknown
from outpace.storage.download import address, download
from outpace.storage.files import cache_dir

SETTING = "OUTPACE_WEIGHTS"
MANIFEST = Path(__file__).with_name("weights.json")
CHECKOUT = Path(__file__).parents[2] / "weights"


@dataclass(frozen=True)
class WeightsFile:
    """One file of a set of weights, with its expected hash and size."""

    name: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class TrainedWeights:
    """One entry of the manifest: what was trained, for which model, and which files hold it."""

    name: str  # of the folder
    kind: str
    model: str  # name of the shelf model that it was trained for
    target: dict[str, Any]  # sizes and some weights of the same model, as in head.json
    licence: str
    command: str  # that trained it
    files: tuple[WeightsFile, ...]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def kept(self) -> Path:
        """The folder in the cache, which changes if any of the files changes."""
        together = hashlib.sha256("".join(file.sha256 for file in self.files).encode())
        return cache_dir() / "weights" / f"{self.name}-{together.hexdigest()[:12]}"


@cache
def manifest() -> dict[str, TrainedWeights]:
    """Return all weights of this version, whether or not they are on this machine."""
    found = {}
    for name, entry in json.loads(MANIFEST.read_text(encoding="utf-8")).items():
        files = tuple(WeightsFile(file, **pinned) for file, pinned in entry["files"].items())
        found[name] = TrainedWeights(**{**entry, "name": name, "files": files})
    return found


def local(name: str) -> Path | None:
    """Return the folder of these weights if it is on this machine; download nothing."""
    entry = _entry(name)
    if all((CHECKOUT / name / file.name).is_file() for file in entry.files):
        return CHECKOUT / name
    kept = [(entry.kept / file.name, file.bytes) for file in entry.files]
    return entry.kept if all(path.is_file() and path.stat().st_size == size for path, size in kept) else None


def fetch(name: str) -> Path:
    """Return the folder of these weights, downloaded and checked if it is not on this machine."""
    if (found := local(name)) is not None:
        return found
    entry = _entry(name)
    start = _source(entry)
    try:
        entry.kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=entry.kept.parent) as place:
            _download(entry, f"{start}/{name}", Path(place))
            entry.kept.mkdir(exist_ok=True)
            for file in entry.files:  # another process may put the same files there
                os.replace(Path(place) / file.name, entry.kept / file.name)
    except OSError as error:
        raise OutpaceError(
            f"cannot write to the cache ({error}); set OUTPACE_CACHE to a folder that you own"
        ) from error
    return entry.kept


def _entry(name: str) -> TrainedWeights:
    if name not in manifest():
        raise unknown("set of weights", name, manifest())
    return manifest()[name]


def _source(entry: TrainedWeights) -> str:
    if given := os.environ.get(SETTING, "").strip():
        return address(given, SETTING)
    raise HeadNotFound(
        f"no {entry.kind} head for this model is on this machine: {entry.name} ({entry.bytes / 1e6:.1f} MB) is not "
        f"part of the package, and {SETTING} is not set. Run from a clone of the repository, or set {SETTING} to a "
        f"copy of its folder weights (https://..., file://... or a path), or train a head with "
        f"`outpace train {entry.kind} {entry.model}` and pass it as head=FOLDER"
    )


def _download(entry: TrainedWeights, start: str, into: Path) -> None:
    """Download all files, with a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bars:
        task = bars.add_task(f"Downloading {entry.name} ({entry.bytes / 1e6:.1f} MB)", total=entry.bytes)
        for file in entry.files:
            download(f"{start}/{file.name}", into / file.name, file.sha256, file.bytes, partial(bars.advance, task))
