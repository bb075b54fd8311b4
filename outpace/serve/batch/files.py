"""BatchFiles: the input, the output and the errors of a batch, and what of the input is still to be answered.

The output is the only memory of a batch. Each line is handed to the system whole before the next one is written, so a
killed process loses no answer that it had; at most its last line is torn, and the next run drops it.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path
from time import monotonic

from outpace.errors import OutpaceError, UsageError
from outpace.serve.batch.lines import LONGEST, BadLine, BatchLine, parse, raw_lines
from outpace.serve.batch.records import BatchRecord, bad_record
from outpace.storage.appended import claim, whole_lines

SYNC_SECONDS = 1.0  # the most work that is lost if the power fails
MOST_PROBLEMS = 5  # that are kept, to be shown


class BatchFiles:
    """Opens the files of a batch, for one process at a time. The errors of an earlier run are tried again."""

    def __init__(self, source: Path, output: Path):
        self.source, self.output = source, output
        self.errors = output.with_name(f"{output.stem}.errors{output.suffix}")
        self.pending = array("Q")  # where the lines begin that are to be answered
        self.done = self.answered = self.failed = 0  # lines: by earlier runs, by this one, without an answer
        self.problems: list[str] = []  # the first ones
        if any(path.exists() and path.samefile(source) for path in (output, self.errors)):
            raise UsageError(f"{str(source)!r} is the input: give another output than {str(output)!r}")
        with ExitStack() as opened:
            self._answers = opened.enter_context(WholeLines(output, "ab+"))
            claim(self._answers.file, output, "wait for it, or give another output")
            size = whole_lines(self._answers.file)
            answered = set(_answered(output, size))
            self._errors = opened.enter_context(WholeLines(self.errors, "wb"))
            self._plan(answered)
            self._answers.file.truncate(size)
            self._opened = opened.pop_all()

    @property
    def total(self) -> int:
        """The number of lines in the input, without blank ones."""
        return self.done + len(self.pending) + self.bad

    def lines(self) -> Iterator[BatchLine]:
        """Yield the requests that are to be answered."""
        with self.source.open("rb") as file:
            for offset in self.pending:
                file.seek(offset)
                yield parse(file.readline(LONGEST + 1))

    def add(self, record: BatchRecord) -> None:
        """Write what has come of a line: an answer to the output, all else to the errors."""
        if record.answered:
            self.answered += 1
            self._answers.write(record.data)
            return
        self.failed += 1
        self._errors.write(record.data)
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(record.problem)

    def _plan(self, answered: set[str]) -> None:
        """Read the whole input once: what is bad, what is done, what is to do."""
        first: dict[str, int] = {}  # the number of the line that has an id
        for raw in raw_lines(self.source):
            try:
                line = parse(raw.data)
                if line.custom_id in first:
                    before = first[line.custom_id]
                    raise BadLine(f"custom_id {line.custom_id!r} stands in line {before} already", line.custom_id)
            except BadLine as bad:
                self.add(bad_record(raw.number, bad))
                continue
            first[line.custom_id] = raw.number
            if line.custom_id not in answered:
                self.pending.append(raw.offset)
        if strange := answered - first.keys():
            raise UsageError(
                f"{str(self.output)!r} has an answer to {min(strange)!r}, which is not in {str(self.source)!r}: it "
                "belongs to another input; give another output"
            )
        self.done, self.bad = len(answered), self.failed

    def __enter__(self) -> BatchFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()
        if not self.failed:
            self.errors.unlink()


class WholeLines:
    """Writes lines: the system has each one whole before the next, and the disk soon after."""

    def __init__(self, path: Path, mode: str):
        self.path, self._synced = path, monotonic()
        with self._reported():
            self.file = FileIO(path, mode)

    def write(self, line: bytes) -> None:
        with self._reported():
            rest = memoryview(line)
            while rest:
                rest = rest[self.file.write(rest) :]
            if monotonic() - self._synced > SYNC_SECONDS:
                os.fsync(self.file.fileno())
                self._synced = monotonic()

    def __enter__(self) -> WholeLines:
        return self

    def __exit__(self, *_: object) -> None:
        with self._reported():
            os.fsync(self.file.fileno())
            self.file.close()

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutpaceError(f"cannot write {str(self.path)!r}: {error.strerror}") from error


def _answered(path: Path, size: int) -> Iterator[str]:
    """Yield the ids of the answers in the first `size` bytes of an output."""
    with path.open("rb") as file:
        for number, data in enumerate(file, 1):
            if file.tell() > size:
                return
            try:
                found = json.loads(data)
                found["response"]["body"]
                yield str(found["custom_id"])
            except (ValueError, KeyError, TypeError) as error:
                raise UsageError(
                    f"{str(path)!r}, line {number} is no answer of a batch: give another output"
                ) from error
