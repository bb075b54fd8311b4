"""The training loop: weight updates from batches, with measurements by the engine in between. All kinds share it.

All random draws depend on the seed and the step, so an interrupted run resumes as if it had never stopped.
"""

from __future__ import annotations

import dataclasses
import math
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from outpace.errors import OutpaceError, UsageError
from outpace.train import checkpoint
from outpace.train.checkpoint import Checkpoint, TrainingProgress
from outpace.train.data.batches import Batch, batches
from outpace.train.distributed import Distributed, TrainedRecipe
from outpace.train.log import Log, LogPoint
from outpace.train.recipes.heads import Recipe
from outpace.train.settings import TrainingSettings
from outpace.train.validate import Split, measure

BETAS = (0.9, 0.95)
WARMUP = 0.03  # share of all steps
LOWEST = 0.1  # share of the learning rate at the end of the cosine schedule


def rate(settings: TrainingSettings, step: int) -> float:
    """Return the learning rate of an update; the first update is step 0."""
    warmup = math.ceil(settings.steps * WARMUP) if settings.warmup < 0 else settings.warmup
    if step < warmup:
        return settings.rate * (step + 1) / warmup
    if settings.schedule == "constant":
        return settings.rate
    done = (step - warmup) / max(settings.steps - warmup, 1)
    return settings.rate * (LOWEST + (1 - LOWEST) * (1 + math.cos(math.pi * min(done, 1))) / 2)


@dataclass(frozen=True)
class DrawnBatch:
    """A batch, with the epoch and the number of its batches used once this one is done."""

    batch: Batch
    epoch: int
    batches: int


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Let the current step finish before Ctrl-C stops the run; a second Ctrl-C stops it at once."""
    received: list[int] = []

    def ask(number: int, frame: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    here = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM) if here}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


class Loop:
    """One training run. Iterate over `run`, which yields a log point for each step."""

    def __init__(self, recipe: Recipe, settings: TrainingSettings, texts: Split, world: Distributed | None = None):
        self.recipe, self.settings, self.texts, self.world = recipe, settings, texts, world or Distributed()
        self.folder, self.reached = Path(settings.output), TrainingProgress()
        self.parameters = recipe.parameters()
        self.device = self.parameters[0].device
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=settings.rate, betas=BETAS, weight_decay=settings.weight_decay
        )
        self.module = self.world.wrap(TrainedRecipe(recipe))
        self.log = Log(self.folder, settings)

    def resume(self) -> None:
        """Continue from the checkpoint in the folder."""
        found = checkpoint.read(self.folder)
        changed = self.settings.differences(found.settings)
        if changed:
            was = ", ".join(f"{name} was {getattr(found.settings, name)!r}" for name in changed)
            raise UsageError(f"these settings differ from those of the run in {str(self.folder)!r}, where {was}")
        self.recipe.restore(found.weights)
        self.optimizer.load_state_dict(found.optimizer)
        self.reached = found.reached

    def run(self) -> Iterator[LogPoint]:
        """Train, and yield a log point before the first step and after each one. Ctrl-C leaves a checkpoint."""
        settings = self.settings
        if self.world.first:
            self.log.begin(self.reached.step)
        with deferred_interrupt() as interrupted:
            if not self.reached.step:
                yield self._logged(self._measured(LogPoint(0)))
            drawn, stop = self._drawn(), False
            while self.reached.step < settings.steps and not stop:
                point = self._update([next(drawn) for _ in range(settings.accumulate)])
                last = self.reached.step == settings.steps
                if last or self.reached.step % settings.measured_every == 0:
                    point = self._measured(point)
                    stop = 0 < settings.patience <= self.reached.stale
                cancelled = self.world.sum([float(interrupted())], self.device)[0] > 0
                self._logged(point)
                if last or stop or cancelled or self.reached.step % settings.save_every == 0:
                    self._keep()
                yield point
                if cancelled:
                    raise KeyboardInterrupt

    def _drawn(self) -> Iterator[DrawnBatch]:
        """Yield batches endlessly, from where the run stands."""
        settings, epoch, used = self.settings, self.reached.epoch, self.reached.batches
        while True:
            found = batches(self.texts.records, settings.batch, settings.length, settings.seed, epoch)
            for count, batch in enumerate(found, start=1):
                if count > used:
                    yield DrawnBatch(batch, epoch, count)
            epoch, used = epoch + 1, 0

    def _update(self, group: list[DrawnBatch]) -> LogPoint:
        """Make one weight update, on the mean over all positions that count in the batches of a group."""
        start, step, world = time.perf_counter(), self.reached.step, self.world
        parts = [world.share(drawn.batch) for drawn in group]
        (total,) = world.sum([float(sum(count for _, count in parts))], self.device)
        summed = torch.zeros(1, dtype=torch.float64)  # loss, then acceptance of each token ahead
        with self._seeded(step):
            for index, (part, count) in enumerate(parts):
                ours, share = self._placed(part), count / max(total, 1)
                with world.without_averaging(self.module, index + 1 < len(parts)):
                    result = self.module(ours, step, self.settings.steps)
                    (result.loss * share * world.size).backward()
                found = torch.cat([result.loss.detach()[None], result.acceptance.nan_to_num()]).double().cpu()
                summed = summed + share * found
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.clip))
        if not math.isfinite(norm):
            raise OutpaceError(f"the gradient of step {step + 1} is not finite: try a lower lr or another loss")
        now = rate(self.settings, step)
        for group_ in self.optimizer.param_groups:
            group_["lr"] = now
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.reached = replace(self.reached, step=step + 1, epoch=group[-1].epoch, batches=group[-1].batches)
        loss, *acceptance = world.sum(summed.tolist(), self.device)
        return LogPoint(step + 1, loss, acceptance, norm, now, int(total), time.perf_counter() - start)

    def _placed(self, part: Batch) -> Batch:
        if self.device.type == "cuda":
            part = part.filled(self.settings.batch // self.world.size, self.settings.length)
        return part.to(self.device)

    @contextmanager
    def _seeded(self, step: int) -> Iterator[None]:
        """Seed the random draws of this step, whatever was drawn before, and restore the caller's random state."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(random.Random(f"{self.settings.seed}/{step}/{self.world.rank}").getrandbits(63))
            yield

    def _measured(self, point: LogPoint) -> LogPoint:
        """Measure with the engine, and save the weights if they are the best so far."""
        if not self.texts.held_out:
            return point
        figures = measure(self.recipe.serve(), self.texts.held_out, self.settings) if self.world.first else None
        figures = self.world.broadcast(figures)
        assert figures is not None
        better = self.reached.best is None or figures.tokens_per_pass > self.reached.best
        best = figures.tokens_per_pass if better else self.reached.best
        self.reached = replace(self.reached, best=best, stale=0 if better else self.reached.stale + 1)
        point = replace(point, measured=figures)
        if better and self.world.first:
            self._save(point)
        return point

    def _save(self, point: LogPoint) -> None:
        measured = point.measured and dataclasses.asdict(point.measured)
        self.recipe.save(self.folder, {"steps": point.step, "measured": measured, "settings": self.settings.to_dict()})

    def _logged(self, point: LogPoint) -> LogPoint:
        if self.world.first:
            self.log.add(point)
        return point

    def _keep(self) -> None:
        """Write a checkpoint; without measurements, also save the current weights as the best."""
        if not self.world.first:
            return
        if not self.texts.held_out:
            self._save(LogPoint(self.reached.step))
        Checkpoint(self.settings, self.reached, self.recipe.state(), self.optimizer.state_dict()).write(self.folder)
