"""The log of a training run: a header and one line per step, to watch, plot and resume the run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from outpace.storage.json_lines import read_lines
from outpace.train.settings import TrainingSettings
from outpace.train.validate import ValidationFigures
from outpace.version import __version__

FILE, FORMAT, VERSION = "log.jsonl", "outpace-train", 1


@dataclass(frozen=True)
class LogPoint:
    """One step of the log; step 0 is the state before training."""

    step: int
    loss: float | None = None
    acceptance: list[float] = field(default_factory=list)  # as the loss computes it, for each token ahead
    norm: float | None = None  # of the gradient, before clipping
    rate: float | None = None  # learning rate
    tokens: int = 0  # tokens that counted in the loss
    seconds: float = 0.0
    measured: ValidationFigures | None = None  # after this step

    @classmethod
    def from_line(cls, line: dict[str, Any]) -> LogPoint:
        measured = line.pop("measured", None)
        return cls(**line, measured=ValidationFigures(**measured) if measured else None)


class Log:
    """The log file of a run."""

    def __init__(self, folder: Path, settings: TrainingSettings):
        self.path, self.settings = folder / FILE, settings

    def begin(self, step: int) -> None:
        """Start a new file, or cut the existing one off after this step: later steps are run again."""
        kept = [point for point in read(self.path.parent) if point.step <= step] if step else []
        self.path.parent.mkdir(parents=True, exist_ok=True)
        header = {
            "format": FORMAT, "version": VERSION, "settings": self.settings.to_dict(), "outpace": __version__,
            "torch": torch.__version__, "transformers": version("transformers"),
            "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        }  # fmt: skip
        lines = [header, *(asdict(point) for point in kept)]
        self.path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

    def add(self, point: LogPoint) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(point)) + "\n")


def read(folder: Path) -> list[LogPoint]:
    return [LogPoint.from_line(line) for line in _lines(folder)[1:]]


def settings(folder: Path) -> dict[str, Any]:
    """Return the settings that the run in this folder started with, by name."""
    found: dict[str, Any] = _lines(folder)[0]["settings"]
    return found


def _lines(folder: Path) -> list[dict[str, Any]]:
    return read_lines(folder / FILE, FORMAT, VERSION, "the log of a training run")
