"""A run from its settings: the target, the texts, the recipe, and the loop over them."""

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
    """Whether the run can begin, or go on, in its folder; nothing that is not ours is overwritten."""
    for name in ("model", "data", "output"):
        if not getattr(settings, name):
            raise UsageError(f"a run needs {name}")
    heads.loss_of(settings)
    folder = Path(settings.output)
    there = (folder / checkpoint.FILE).exists()
    if resume and not there:
        raise UsageError(f"{str(folder)!r} holds no checkpoint to go on from")
    if there and not resume:
        raise UsageError(f"{str(folder)!r} holds a run already: go on with --resume, or name another folder")
    if folder.exists() and any(folder.iterdir()) and not (folder / log.FILE).exists():
        raise UsageError(f"{str(folder)!r} is not empty, and holds no training run: name another folder")


def prepare(settings: TrainingSettings, model: Model, world: Distributed | None = None, resume: bool = False) -> Loop:
    """The loop of a run on this target; iterate over its `run`."""
    check(settings, resume)
    records = read(settings.data, model.lm.vocab)
    texts = split(records, settings.validation, settings.seed)
    loop = Loop(heads.build(settings, model, texts.records), settings, texts, world)
    if resume:
        loop.resume()
    return loop
