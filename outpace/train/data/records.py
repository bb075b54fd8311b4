"""Training records: tokenised conversations as JSON lines under a header. An interrupted file can be continued.

{"format": "outpace-data", "version": 1, "model": {...}, "settings": {...}}
{"id": "...", "prompt": 12, "tokens": [...]}     tokens of the prompt and of the answer; the first 12 are the prompt
{"id": "...", "dropped": "why"}                  tried, but unusable
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outpace.errors import OutpaceError, UsageError
from outpace.storage.appended import claim, whole_lines

FORMAT, VERSION = "outpace-data", 1


class TextRecord(NamedTuple):
    """A conversation that ends with an answer."""

    tokens: Tensor  # [tokens], int32
    prompt: int  # number of tokens before the answer
    id: str = ""

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt :].tolist()


def read(paths: str | Path | Iterable[str | Path], vocab: int | None = None) -> list[TextRecord]:
    """Read the records of one or more files; an incomplete last line is skipped."""
    every = [paths] if isinstance(paths, str | Path) else list(paths)
    found = [record for path in every for record in _records(Path(path), vocab)]
    if not found:
        named = ", ".join(map(str, every)) or "no file"
        raise UsageError(f"there are no records in {named}: write some with `outpace train data`")
    return found


def _records(path: Path, vocab: int | None) -> Iterator[TextRecord]:
    for number, line in _lines(path):
        if "format" in line:
            _known(path, line)
        elif "dropped" not in line:
            record = _record(path, number, line)
            if vocab is not None and int(record.tokens.max()) >= vocab:
                raise UsageError(
                    f"{str(path)!r}, line {number} has token {int(record.tokens.max())}, but the vocabulary of the "
                    f"model ends at {vocab - 1}: the texts were written by another model"
                )
            yield record


def _record(path: Path, number: int, line: dict[str, Any]) -> TextRecord:
    tokens, prompt = line.get("tokens"), line.get("prompt")
    try:
        made = TextRecord(torch.tensor(tokens, dtype=torch.int32), int(prompt or 0), str(line.get("id", "")))
    except (TypeError, ValueError, RuntimeError) as error:
        raise OutpaceError(f"{str(path)!r}, line {number} is no record: {error}") from error
    if made.tokens.dim() != 1 or not 0 <= made.prompt < len(made.tokens) or int(made.tokens.min()) < 0:
        raise OutpaceError(
            f'{str(path)!r}, line {number} is no record: "tokens" must be a list of ids, and "prompt" the number of '
            f"them before the answer"
        )
    return made


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line numbers and JSON objects. A file may be large, so only one line is in memory at a time."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if raw.strip():
                    try:
                        line = json.loads(raw)
                    except ValueError as error:  # invalid JSON or invalid Unicode
                        if not raw.endswith(b"\n"):
                            return  # the run was interrupted while it wrote this line
                        raise OutpaceError(f"{str(path)!r}, line {number} is not JSON: {error}") from error
                    if not isinstance(line, dict):
                        raise OutpaceError(f"{str(path)!r}, line {number} is not a JSON object")
                    yield number, line
    except OSError as error:
        raise OutpaceError(f"cannot read {str(path)!r}: {error}") from error


def _known(path: Path, header: dict[str, Any]) -> None:
    if header["format"] != FORMAT:
        raise UsageError(f"{str(path)!r} is not a file of `outpace train data`")
    if header.get("version", 0) > VERSION:
        newer = f"{str(path)!r} has version {header['version']}, but this Outpace reads only up to {VERSION}"
        raise UsageError(f"{newer}: update Outpace")


class RecordFile:
    """A file that is written record by record, with what it already holds: `records` and `dropped`, by id."""

    def __init__(self, path: str | Path, header: dict[str, Any]):
        self.path = Path(path)
        self.records: dict[str, TextRecord] = {}
        self.dropped: dict[str, str] = {}
        header = {"format": FORMAT, "version": VERSION, **header}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab+")
        except OSError as error:
            raise OutpaceError(f"cannot write the records: {error}") from error
        try:
            claim(self._file, self.path, "give each worker its own --shard, or another --output")
            if self._continues(header):
                self._read()
            else:
                self._write(header)
        except BaseException:
            self._file.close()
            raise

    def add(self, record: TextRecord) -> None:
        self.records[record.id] = record
        self._write({"id": record.id, "prompt": record.prompt, "tokens": record.tokens.tolist()})

    def drop(self, name: str, why: str) -> None:
        self.dropped[name] = why
        self._write({"id": name, "dropped": why})

    def _continues(self, header: dict[str, Any]) -> bool:
        """Cut off an incomplete last line; False if nothing is left. A file of another run is refused."""
        self._file.seek(0)
        start = self._file.readline()
        ours = json.dumps({"format": FORMAT})[:-1].encode()
        if not start.startswith(ours[: len(start)]):
            raise UsageError(f"{str(self.path)!r} is not a file of `outpace train data`: choose another --output")
        if not start.endswith(b"\n"):
            self._file.truncate(0)
            return False
        self._file.truncate(whole_lines(self._file))
        written = json.loads(start)
        _known(self.path, written)
        _same(self.path, written, header)
        return True

    def _read(self) -> None:
        for number, line in _lines(self.path):
            if "dropped" in line:
                self.dropped[line["id"]] = line["dropped"]
            elif "format" not in line:
                record = _record(self.path, number, line)
                self.records[record.id] = record

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _same(path: Path, written: dict[str, Any], header: dict[str, Any]) -> None:
    """Refuse to mix texts of different models or settings in one file."""
    for part in ("model", "settings"):
        before, now = written.get(part, {}), header[part]
        for key in now:
            if not _alike(before.get(key), now[key]):
                what = f"{part} {key}" if part == "model" else key
                raise UsageError(
                    f"{str(path)!r} was started with {what}={before.get(key)!r:.60}, not {now[key]!r:.60}: "
                    f"use the original settings, or choose another --output"
                )


def _alike(before: Any, now: Any) -> bool:
    if (
        isinstance(now, list) and isinstance(before, list) and len(now) == len(before)
    ):  # weight fingerprints, in any precision
        return bool(torch.allclose(torch.tensor(now), torch.tensor(before), rtol=2e-2, atol=1e-3))
    return bool(before == now)
