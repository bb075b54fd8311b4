"""Measurement: contestants answer groups of prompts in turn, so a change in the machine's speed affects all alike."""

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
    """How an answer is generated."""

    max_tokens: int = 64
    sampling: Sampling = field(default_factory=Sampling)

    @property
    def greedy(self) -> bool:
        return self.sampling.temperature == 0


@dataclass(frozen=True)
class Condition:
    """A condition of the measurement; each has its own figures."""

    task: str
    batch: int = 1
    context: int | None = None  # tokens of the prompt, for a task that is generated to a length
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
    stats: Stats | None = None  # None: the contestant reports none
    memory: int | None = None  # peak bytes in use; None: unknown
    compared: bool = True  # False: answers may differ from plain decoding's
    group: int = 0
    round: int = 0
    condition: Condition = Condition("")

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens))


class Contestant(Protocol):
    """A method or loop that is measured."""

    name: str

    def fresh(self) -> None:
        """Forget what was learned from earlier prompts."""

    def run(self, prompts: list[list[int]], settings: AnswerSettings) -> Run:
        """Answer these prompts as one batch, timed, with an empty cache."""


def order(contestants: Seq[T], shift: int) -> list[T]:
    """Rotate the contestants by `shift`."""
    start = shift % len(contestants)
    return [*contestants[start:], *contestants[:start]]


def warm_up(contestants: Seq[Contestant], group: Group, done: Callable[[], object]) -> dict[str, str]:
    """Run each contestant once, untimed. Return those that cannot take part, with the reason."""
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
    """Run every contestant on every group, `rounds` times; `progress` gets each run as soon as it ends.

    A contestant keeps what it learns until the end of a round, or until the same prompts come again at another batch
    size or temperature: with a prompt that it has seen before, it would know the answer.
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
    """Exclude existing objects, mostly those of libraries, from the garbage collections before each run."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
