"""Prepare a training run from its settings: the target, the texts, the recipe, and the loop over them."""

from __future__ import annotations

from pathlib import Path

from outpace.api.model import Model
from outpace.errors import UsageError
from outpace.train import checkpoint, log
from outpace.train.data.records import read
from outpace.train.distributed import Distributed
from outpace.train.loop import Loop
from outpace.train.recipes import heads
from outpace.train.settings import TrainingSettings
from outpace.train.validate import split


def check(settings: TrainingSettings, resume: bool) -> None:
    """Check that the run can start or resume in its folder; only files of a training run are overwritten."""
    for name in ("model", "data", "output"):
        if not getattr(settings, name):
            raise UsageError(f"a training run needs {name}")
    heads.loss_of(settings)
    folder = Path(settings.output)
    there = (folder / checkpoint.FILE).exists()
    if resume and not there:
        raise UsageError(f"{str(folder)!r} holds no checkpoint to resume from")
    if there and not resume:
        raise UsageError(f"{str(folder)!r} already holds a run: continue it with --resume, or choose another folder")
    if folder.exists() and any(folder.iterdir()) and not (folder / log.FILE).exists():
        raise UsageError(f"{str(folder)!r} is not empty, and holds no training run: choose another folder")


def prepare(settings: TrainingSettings, model: Model, world: Distributed | None = None, resume: bool = False) -> Loop:
    """Build the loop of a run on this target; iterate over its `run`."""
    check(settings, resume)
    records = read(settings.data, model.lm.vocab)
    texts = split(records, settings.validation, settings.seed)
    loop = Loop(heads.build(settings, model, texts.records), settings, texts, world)
    if resume:
        loop.resume()
    return loop
