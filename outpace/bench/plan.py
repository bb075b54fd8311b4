"""Benchmark plan: what is measured. Prompts are encoded, then grouped into batches by condition."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path
from typing import TYPE_CHECKING

from outpace.bench.run import AnswerSettings, Condition, Group
from outpace.errors import UsageError
from outpace.prompts import tasks
from outpace.sampling.settings import Sampling

if TYPE_CHECKING:
    from outpace.api.model import Model

MIXED = "mixed"  # task name of a batch with prompts of several tasks
OWN_COUNT = 4  # copy prompts of each length, unless a limit is set


@dataclass(frozen=True)
class BenchPlan:
    """Which prompts are measured, under which conditions."""

    tasks: tuple[str, ...] = ()  # empty: all
    prompts: Path | None = None  # a file; None: Outpace's own set
    limit: int | None = None  # prompts of each task
    batches: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = (512,)
    temperatures: tuple[float, ...] = (0.0,)
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    max_tokens: int = 64

    def __post_init__(self) -> None:
        counts = {"batch": self.batches, "context": self.contexts, "max-tokens": [self.max_tokens]}
        for name, values in (counts | {"limit": [] if self.limit is None else [self.limit]}).items():
            if any(value < 1 for value in values):
                raise UsageError(f"--{name} must be at least 1")
        for temperature in self.temperatures:
            self.settings(temperature)

    def settings(self, temperature: float) -> AnswerSettings:
        return AnswerSettings(self.max_tokens, Sampling(temperature, self.top_k, self.top_p, seed=self.seed))

    @property
    def copies(self) -> bool:
        return tasks.COPY in self.tasks or (not self.tasks and self.prompts is None)


@dataclass(frozen=True)
class Turn:
    """One turn of a prompt, encoded for the model."""

    task: str
    context: int | None
    name: str
    tokens: list[int]


def load(plan: BenchPlan) -> list[tasks.Prompt]:
    """Load the plan's prompts, except those of the copy task, whose length depends on the tokenizer."""
    return tasks.load(plan.prompts, plan.tasks, plan.limit)


def encode_turns(plan: BenchPlan, model: Model, prompts: Seq[tasks.Prompt], done: Callable[[], None]) -> list[Turn]:
    """Encode every turn of every prompt; later turns follow plain, greedy answers, the same under every condition."""
    found = []
    answers: list[list[str]] = [[] for _ in prompts]
    for turn in range(max((len(prompt.turns) for prompt in prompts), default=0)):
        # First turns come before second ones, so that no batch holds a prompt and its continuation.
        for prompt, earlier in zip(prompts, answers, strict=True):
            if turn >= len(prompt.turns):
                continue
            tokens = tasks.encode(prompt, model, earlier)
            name = prompt.id if len(prompt.turns) == 1 else f"{prompt.id}.{turn + 1}"
            found.append(_fitting(Turn(prompt.task, None, name, tokens), plan, model))
            if turn + 1 < len(prompt.turns):
                earlier.append(model.generate(tokens, method="plain", max_tokens=plan.max_tokens).text)
            done()
    if plan.copies:
        for length in dict.fromkeys(plan.contexts):
            for prompt in tasks.copying(model, length, plan.limit or OWN_COUNT):
                copied = Turn(prompt.task, length, prompt.id, tasks.encode(prompt, model))
                found.append(_fitting(copied, plan, model))
    return found


def _fitting(turn: Turn, plan: BenchPlan, model: Model) -> Turn:
    if len(turn.tokens) + plan.max_tokens > model.lm.max_length:
        raise UsageError(
            f"{turn.task} {turn.name} has {len(turn.tokens)} tokens; with {plan.max_tokens} new ones it exceeds the "
            f"model's maximum of {model.lm.max_length}: lower --max-tokens or --context"
        )
    return turn


def groups(plan: BenchPlan, turns: Seq[Turn]) -> list[Group]:
    """Group all prompts, once for each batch size and temperature, into batches of one task and length.

    The prompts that a task leaves over form mixed batches; what is left after these is not measured.
    """
    found: list[Group] = []
    for batch, temperature in product(dict.fromkeys(plan.batches), dict.fromkeys(plan.temperatures)):
        if batch > len(turns):
            raise UsageError(f"there are {len(turns)} prompts, too few for a batch of {batch}")
        for members in _batches(turns, batch):
            first = members[0]
            same = all((turn.task, turn.context) == (first.task, first.context) for turn in members)
            condition = Condition(
                first.task if same else MIXED, batch, first.context if same else None, temperature
            )  # fmt: skip
            names, prompts = [turn.name for turn in members], [turn.tokens for turn in members]
            found.append(Group(len(found), condition, names, prompts, plan.settings(temperature)))
    return found


def _batches(turns: Seq[Turn], batch: int) -> Iterator[list[Turn]]:
    left: list[Turn] = []
    for _, same in groupby(sorted(turns, key=_kind), key=_kind):
        members = list(same)
        whole = len(members) - len(members) % batch
        yield from (members[i : i + batch] for i in range(0, whole, batch))
        left += members[whole:]
    yield from (left[i : i + batch] for i in range(0, len(left) - batch + 1, batch))


def _kind(turn: Turn) -> tuple[int, str, int]:
    known = tasks.TASKS.index(turn.task) if turn.task in tasks.TASKS else len(tasks.TASKS)
    return known, turn.task, turn.context or 0
