"""Validation: measure the current weights with the engine, on prompts that training does not see."""

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
    """Figures that the engine measured."""

    tokens_per_pass: float
    acceptance: float  # accepted share of the draft tokens that were reached
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
    """Hold out `count` prompts, with all their answers."""
    prompt_of = [tuple(record.tokens[: record.prompt].tolist()) for record in records]
    prompts = list(dict.fromkeys(prompt_of))
    if count >= len(prompts):
        raise UsageError(
            f"{len(prompts)} prompts are too few to hold out {count} of them: pass more data, or lower validation"
        )
    chosen = set(random.Random(seed).sample(prompts, count))
    kept = [record for record, prompt in zip(records, prompt_of, strict=True) if prompt not in chosen]
    return Split(kept, [list(prompt) for prompt in prompts if prompt in chosen])


def measure(served: ServedModel, prompts: Seq[list[int]], settings: TrainingSettings) -> ValidationFigures:
    """Answer these prompts in one batch, and return the figures."""
    given: dict[str, Any] = {
        "max_tokens": settings.validation_tokens,
        "temperature": settings.validation_temperature,
        "seed": settings.seed,
        **served.settings,
    }
    done = served.model.generate([list(prompt) for prompt in prompts], **given)
    failed = [completion.error for completion in done if completion.error is not None]
    if failed:
        raise OutpaceError(f"a held-out prompt could not be answered: {failed[0]}")
    return ValidationFigures.from_stats(reduce(Stats.merge, (completion.stats for completion in done)))
