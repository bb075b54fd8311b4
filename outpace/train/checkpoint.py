"""Checkpoints of a training run: one file, written atomically, with everything needed to resume the run exactly."""

from __future__ import annotations

import dataclasses
import os
import pickle
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.errors import OutpaceError
from outpace.train.settings import TrainingSettings, make

FILE = "checkpoint.pt"


@dataclass(frozen=True)
class TrainingProgress:
    """How far a run has come. All random draws depend only on the seed and these numbers."""

    step: int = 0  # updates made
    epoch: int = 0
    batches: int = 0  # batches of this epoch used so far
    best: float | None = None  # most tokens per pass measured so far
    stale: int = 0  # measurements since the best one


@dataclass(frozen=True)
class Checkpoint:
    """The full state of a run after one step."""

    settings: TrainingSettings
    reached: TrainingProgress
    weights: dict[str, Tensor]
    optimizer: dict[str, Any]

    def write(self, folder: Path) -> None:
        given = {
            "settings": self.settings.to_dict(),
            "reached": dataclasses.asdict(self.reached),
            "weights": self.weights,
            "optimizer": self.optimizer,
        }
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{FILE}-", dir=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                torch.save(given, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, folder / FILE)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def read(folder: Path) -> Checkpoint:
    """Read the checkpoint in `folder`; no code in the file is run."""
    try:
        found = torch.load(folder / FILE, map_location="cpu", weights_only=True)
        given = dict(found["settings"])
        settings = make(given.pop("kind"), given)
        return Checkpoint(settings, TrainingProgress(**found["reached"]), found["weights"], found["optimizer"])
    except (OSError, KeyError, TypeError, RuntimeError, pickle.UnpicklingError) as error:
        raise OutpaceError(f"{str(folder / FILE)!r} is no checkpoint that can be resumed: {error}") from error
