"""Measure: contestants answer groups of prompts in turn, so that a change in the machine's speed hits all alike."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from outpace.core.stats import Stats
from outpace.errors import OutpaceError
from outpace.sampling.settings import Sampling

T = TypeVar("T")


@dataclass(frozen=True)
class AnswerSettings:
    """How an answer is made."""

    max_tokens: int = 64
    sampling: Sampling = field(default_factory=Sampling)

    @property
    def greedy(self) -> bool:
        return self.sampling.temperature == 0


@dataclass(frozen=True)
class Condition:
    """What figures are reported for, apart from each other."""

    task: str
    batch: int = 1
    context: int | None = None  # tokens of the prompt, for a task that is made to a length
    temperature: float = 0.0


@dataclass(frozen=True)
class Group:
    """Prompts that are answered as one batch."""

    number: int
    condition: Condition
    names: list[str]
    prompts: list[list[int]]
    settings: AnswerSettings = AnswerSettings()


@dataclass(frozen=True)
class Run:
    """One contestant's answers to one group, once."""

    contestant: str
    tokens: list[list[int]]  # of each answer
    seconds: float
    stats: Stats | None = None  # None: the contestant does not count
    memory: int | None = None  # most bytes in use; None: unknown here
    compared: bool = True  # False: it may answer otherwise than plain decoding
    group: int = 0
    round: int = 0
    condition: Condition = Condition("")

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens))


class Contestant(Protocol):
    """Who takes part."""

    name: str

    def fresh(self) -> None:
        """Forget what was learned from earlier prompts."""

    def run(self, prompts: list[list[int]], settings: AnswerSettings) -> Run:
        """Answer these prompts as one batch, on the clock, with an empty cache."""


def order(contestants: Seq[T], shift: int) -> list[T]:
    """The same ones, beginning with another."""
    start = shift % len(contestants)
    return [*contestants[start:], *contestants[:start]]


def warm_up(contestants: Seq[Contestant], group: Group, done: Callable[[], object]) -> dict[str, str]:
    """Each one once, untimed. Returns who cannot take part, and why."""
    failed = {}
    for contestant in contestants:
        contestant.fresh()
        try:
            contestant.run(group.prompts, group.settings)
        except OutpaceError:
            raise
        except (ValueError, NotImplementedError, RuntimeError) as error:  # how Transformers refuses a model
            failed[contestant.name] = str(error).strip().partition("\n")[0] or type(error).__name__
        done()
    return failed


def measure(
    contestants: Seq[Contestant], groups: Seq[Group], rounds: int, progress: Callable[[Run], object] | None = None
) -> list[Run]:
    """Every contestant on every group, `rounds` times; `progress` gets each run as soon as it is there.

    What a contestant learns it keeps while new prompts come: to the end of a round, or until the same prompts come
    again at another batch size or temperature. Having seen a prompt before, it would know the answer.
    """
    runs = []
    with _settled():
        for turn in range(rounds):
            sweep = None
            for group in groups:
                if sweep != (sweep := (group.condition.batch, group.condition.temperature)):
                    for contestant in contestants:
                        contestant.fresh()
                for contestant in order(contestants, group.number + turn):
                    found = contestant.run(group.prompts, group.settings)
                    runs.append(replace(found, group=group.number, round=turn, condition=group.condition))
                    if progress is not None:
                        progress(runs[-1])
    return runs


@contextmanager
def _settled() -> Iterator[None]:
    """What exists already, above all the libraries, is not looked at by the collections before each run."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
