"""Plan: what is measured. Prompts become token ids, and token ids become groups under conditions."""

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

MIXED = "mixed"  # prompts of several tasks in one batch
OWN_COUNT = 4  # copy prompts of each length, where no limit says less


@dataclass(frozen=True)
class BenchPlan:
    """Which prompts, under which conditions."""

    tasks: tuple[str, ...] = ()  # none: all
    prompts: Path | None = None  # a file; None: our own set
    limit: int | None = None  # of each task
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
    """One turn of a prompt, as the model gets it."""

    task: str
    context: int | None
    name: str
    tokens: list[int]


def load(plan: BenchPlan) -> list[tasks.Prompt]:
    """The plan's prompts, but for those of the copy task, whose length only a tokenizer tells."""
    return tasks.load(plan.prompts, plan.tasks, plan.limit)


def ask(plan: BenchPlan, model: Model, prompts: Seq[tasks.Prompt], done: Callable[[], None]) -> list[Turn]:
    """Every turn of every prompt; later turns follow plain, greedy answers, the same ones under every condition."""
    found = []
    answers: list[list[str]] = [[] for _ in prompts]
    for turn in range(max((len(prompt.turns) for prompt in prompts), default=0)):
        # First turns come before second ones, so that no batch holds a prompt and its continuation.
        for prompt, said in zip(prompts, answers, strict=True):
            if turn >= len(prompt.turns):
                continue
            tokens = tasks.encode(prompt, model, said)
            name = prompt.id if len(prompt.turns) == 1 else f"{prompt.id}.{turn + 1}"
            found.append(_fitting(Turn(prompt.task, None, name, tokens), plan, model))
            if turn + 1 < len(prompt.turns):
                said.append(model.generate(tokens, method="plain", max_tokens=plan.max_tokens).text)
            done()
    if plan.copies:
        for length in dict.fromkeys(plan.contexts):
            for prompt in tasks.copying(model, length, plan.limit or OWN_COUNT):
                asked = Turn(prompt.task, length, prompt.id, tasks.encode(prompt, model))
                found.append(_fitting(asked, plan, model))
    return found


def _fitting(asked: Turn, plan: BenchPlan, model: Model) -> Turn:
    if len(asked.tokens) + plan.max_tokens > model.lm.max_length:
        raise UsageError(
            f"{asked.task} {asked.name} has {len(asked.tokens)} tokens, and with {plan.max_tokens} new ones the "
            f"model, which holds {model.lm.max_length}, is full: lower --max-tokens or --context"
        )
    return asked


def groups(plan: BenchPlan, asked: Seq[Turn]) -> list[Group]:
    """All prompts, once for each batch size and temperature, in batches of one task and length.

    What a task leaves over is put together to mixed batches; too few for even one of those are left out.
    """
    found: list[Group] = []
    for batch, temperature in product(dict.fromkeys(plan.batches), dict.fromkeys(plan.temperatures)):
        if batch > len(asked):
            raise UsageError(f"there are {len(asked)} prompts, too few for a batch of {batch}")
        for members in _batches(asked, batch):
            first = members[0]
            same = all((a.task, a.context) == (first.task, first.context) for a in members)
            condition = Condition(
                first.task if same else MIXED, batch, first.context if same else None, temperature
            )  # fmt: skip
            names, prompts = [a.name for a in members], [a.tokens for a in members]
            found.append(Group(len(found), condition, names, prompts, plan.settings(temperature)))
    return found


def _batches(asked: Seq[Turn], batch: int) -> Iterator[list[Turn]]:
    left: list[Turn] = []
    for _, same in groupby(sorted(asked, key=_kind), key=_kind):
        members = list(same)
        whole = len(members) - len(members) % batch
        yield from (members[i : i + batch] for i in range(0, whole, batch))
        left += members[whole:]
    yield from (left[i : i + batch] for i in range(0, len(left) - batch + 1, batch))


def _kind(asked: Turn) -> tuple[int, str, int]:
    known = tasks.TASKS.index(asked.task) if asked.task in tasks.TASKS else len(tasks.TASKS)
    return known, asked.task, asked.context or 0
