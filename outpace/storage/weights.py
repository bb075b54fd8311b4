"""Trained weights by name: those of a checkout, those in the cache, or fetched once from where OUTPACE_WEIGHTS says."""

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
    """One file of a set of weights, and what it must hash to."""

    name: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class TrainedWeights:
    """One entry of the manifest: what was trained, for which model, and which files hold it."""

    name: str  # of its folder
    kind: str
    model: str  # what it was trained for, by its name on the shelf
    target: dict[str, Any]  # the same model by its sizes and some of its numbers, as in head.json
    licence: str
    command: str  # that made it
    files: tuple[WeightsFile, ...]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def kept(self) -> Path:
        """Its folder in the cache, which is another one as soon as a file is another one."""
        together = hashlib.sha256("".join(file.sha256 for file in self.files).encode())
        return cache_dir() / "weights" / f"{self.name}-{together.hexdigest()[:12]}"


@cache
def manifest() -> dict[str, TrainedWeights]:
    """All weights that belong to this version, whether or not they are on this machine."""
    found = {}
    for name, entry in json.loads(MANIFEST.read_text(encoding="utf-8")).items():
        files = tuple(WeightsFile(file, **pinned) for file, pinned in entry["files"].items())
        found[name] = TrainedWeights(**{**entry, "name": name, "files": files})
    return found


def local(name: str) -> Path | None:
    """The folder of these weights if it is on this machine: nothing is fetched."""
    entry = _entry(name)
    if all((CHECKOUT / name / file.name).is_file() for file in entry.files):
        return CHECKOUT / name
    kept = [(entry.kept / file.name, file.bytes) for file in entry.files]
    return entry.kept if all(path.is_file() and path.stat().st_size == size for path, size in kept) else None


def fetch(name: str) -> Path:
    """The folder of these weights, fetched and checked if it is not on this machine."""
    if (found := local(name)) is not None:
        return found
    entry = _entry(name)
    start = _source(entry)
    try:
        entry.kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=entry.kept.parent) as place:
            _download(entry, f"{start}/{name}", Path(place))
            entry.kept.mkdir(exist_ok=True)
            for file in entry.files:  # what another process puts there meanwhile is the same
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
        f"no {entry.kind} head for this model is on this machine: {entry.name} ({entry.bytes / 1e6:.1f} MB) is not a "
        f"part of the package, and {SETTING} does not say where it is; run from a clone of the repository, or set "
        f"{SETTING} to a copy of its folder weights (https://..., file://... or a folder), or train a head with "
        f"`outpace train {entry.kind} {entry.model}` and pass it as head=FOLDER"
    )


def _download(entry: TrainedWeights, start: str, into: Path) -> None:
    """All files, with a bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bars:
        task = bars.add_task(f"fetching {entry.name} ({entry.bytes / 1e6:.1f} MB)", total=entry.bytes)
        for file in entry.files:
            download(f"{start}/{file.name}", into / file.name, file.sha256, file.bytes, partial(bars.advance, task))
