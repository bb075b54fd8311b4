"""The benchmark record, runs.jsonl: first the machine and settings, then all groups of prompts, then each run."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from outpace.api.model import Model
from outpace.bench.run import AnswerSettings, Condition, Group, Run
from outpace.core.stats import Stats
from outpace.errors import OutpaceError
from outpace.sampling.settings import Sampling
from outpace.storage.json_lines import read_lines
from outpace.version import __version__

FORMAT, VERSION = "outpace-bench", 1


@dataclass
class BenchRecord:
    """The contents of a runs.jsonl file."""

    header: dict[str, Any]
    groups: list[Group] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # contestants that could not take part, and why
    interrupted: bool = False


def provenance(model: Model, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return what is needed to repeat the measurement."""
    parameter = next(iter(getattr(model.lm, "model", torch.nn.Module()).parameters()), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    return {
        "model": model.name,
        "dtype": None if parameter is None else str(parameter.dtype).removeprefix("torch."),
        "command": command,
        "arguments": arguments,
        "versions": {
            "outpace": __version__,
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "python": platform.python_version(),
        },
        "commit": _commit(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def _commit() -> str | None:
    """Return the commit of the checkout that contains this package, marked if files differ from it."""
    folder = Path(__file__).parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"],
            cwd=folder, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


class Writer:
    """Writes each line at once, so that an interrupted run keeps what it measured."""

    def __init__(self, path: Path, header: dict[str, Any], groups: Seq[Group]):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise OutpaceError(f"cannot write the runs: {error}") from error
        self._write("header", {"format": FORMAT, "version": VERSION, **header})
        for group in groups:
            self._write("group", asdict(group))

    def run(self, run: Run) -> None:
        stats = None if run.stats is None else run.stats.to_dict()
        self._write("run", asdict(run) | {"stats": stats})

    def left_out(self, name: str, why: str) -> None:
        self._write("left_out", {"contestant": name, "why": why})

    def _write(self, kind: str, fields: dict[str, Any]) -> None:
        self._file.write(json.dumps({"type": kind, **fields}, ensure_ascii=False, separators=(",", ":")) + "\n")
        self._file.flush()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read(path: Path) -> BenchRecord:
    """Read a file; an incomplete last line is skipped."""
    header, *lines = read_lines(path, FORMAT, VERSION, "a runs.jsonl of `outpace bench`")
    record = BenchRecord({key: value for key, value in header.items() if key not in ("type", "format", "version")})
    for number, line in enumerate(lines, start=2):
        try:
            _take(record, line.pop("type"), line)
        except (KeyError, TypeError, ValueError) as error:
            raise OutpaceError(f"{str(path)!r}, line {number} is not of this format: {error!r}") from error
    return record


def _take(record: BenchRecord, kind: str, line: dict[str, Any]) -> None:
    """Add one line to the record; kinds that a later version may add are skipped."""
    if kind == "group":
        settings = line.pop("settings")
        sampling = settings["sampling"]
        bias = {int(token): value for token, value in sampling["logit_bias"].items()}
        settings = AnswerSettings(settings["max_tokens"], Sampling(**sampling | {"logit_bias": bias}))
        record.groups.append(Group(**line | {"condition": Condition(**line["condition"]), "settings": settings}))
    elif kind == "run":
        counted = line.pop("stats")
        stats = None if counted is None else Stats(**{name: counted[name] for name in Stats.__dataclass_fields__})
        record.runs.append(Run(**line | {"condition": Condition(**line["condition"]), "stats": stats}))
    elif kind == "left_out":
        record.left_out[line["contestant"]] = line["why"]
