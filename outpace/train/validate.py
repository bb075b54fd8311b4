"""Validation: what the engine gets out of what has been trained, on prompts that training does not see."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

from outpace.core.stats import Stats
from outpace.errors import OutpaceError, UsageError
from outpace.train.data.records import TextRecord
from outpace.train.recipes.heads import ServedModel
from outpace.train.settings import TrainingSettings


@dataclass(frozen=True)
class ValidationFigures:
    """Measured by the engine."""

    tokens_per_pass: float
    acceptance: float  # of the guesses that were reached, how many were right
    by_depth: list[float]

    @classmethod
    def from_stats(cls, stats: Stats) -> ValidationFigures:
        acceptance = sum(stats.matched) / max(sum(stats.offered), 1)
        return cls(stats.tokens_per_pass, acceptance, stats.acceptance_by_depth)


class Split(NamedTuple):
    """Texts to train on, and prompts to measure on; no prompt is in both."""

    records: list[TextRecord]
    held_out: list[list[int]]


def split(records: Seq[TextRecord], count: int, seed: int) -> Split:
    """Hold out so many prompts, with all their answers."""
    asked = [tuple(record.tokens[: record.prompt].tolist()) for record in records]
    prompts = list(dict.fromkeys(asked))
    if count >= len(prompts):
        raise UsageError(
            f"{len(prompts)} prompts are too few to hold out {count} of them: pass more data, or a lower validation"
        )
    chosen = set(random.Random(seed).sample(prompts, count))
    kept = [record for record, prompt in zip(records, asked, strict=True) if prompt not in chosen]
    return Split(kept, [list(prompt) for prompt in prompts if prompt in chosen])


def measure(served: ServedModel, prompts: Seq[list[int]], settings: TrainingSettings) -> ValidationFigures:
    """Answer these prompts in one batch."""
    given: dict[str, Any] = {
        "max_tokens": settings.validation_tokens,
        "temperature": settings.validation_temperature,
        "seed": settings.seed,
        **served.settings,
    }
    done = served.model.generate([list(prompt) for prompt in prompts], **given)
    failed = [completion.error for completion in done if completion.error is not None]
    if failed:
        raise OutpaceError(f"a prompt that was held out could not be answered: {failed[0]}")
    return ValidationFigures.from_stats(reduce(Stats.merge, (completion.stats for completion in done)))
