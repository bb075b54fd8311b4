"""Benchmark prompts, by task: from Outpace's own small set, from a user's file, or generated to a given length."""

from __future__ import annotations

import json
import random
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence as Seq
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from outpace import text
from outpace.errors import OutpaceError, UsageError, unknown

if TYPE_CHECKING:
    from outpace.api.model import Model

COPY = "copy"  # generated here, to a given length
TASKS = ("mt_bench", "translation", "summarization", "qa", "math", "rag", "code", "chat", COPY)

# Spec-Bench lists the eight kinds of MT-bench questions separately, as "category".
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
ALIASES = {"math_reasoning": "math", "mt-bench": "mt_bench"}

NAMES = ("Alvarez", "Brandt", "Cheng", "Dubois", "Eriksen", "Farouk", "Gupta", "Horvat", "Ito", "Jensen")
CITIES = ("Lisbon", "Oslo", "Quito", "Dakar", "Hanoi", "Leeds", "Turin", "Perth", "Cusco", "Izmir")
ITEMS = ("lamps", "chairs", "kettles", "maps", "drills", "tents", "clocks", "ropes", "vases", "pumps")


@dataclass(frozen=True)
class Prompt:
    """One or more user turns; each follows the answers to the turns before it."""

    task: str
    id: str
    turns: tuple[str, ...]
    messages: tuple[text.Message, ...] = ()  # the conversation before the first turn
    answer: str | None = None  # text that a correct answer contains


Parse: TypeAlias = Callable[[dict[str, Any], int], Prompt]


def load(path: str | Path | None = None, tasks: Collection[str] = (), limit: int | None = None) -> list[Prompt]:
    """Load prompts from a JSONL file or Outpace's own set: of these tasks or of all, at most `limit` of each."""
    found = read(path)
    wanted = {ALIASES.get(task, task) for task in tasks} or {prompt.task for prompt in found}
    for task in wanted - {COPY}:
        if task not in (known := {prompt.task for prompt in found}):
            raise unknown("task", task, known | {COPY})
    return list(_first(found, wanted, limit))


def read(path: str | Path | None = None, parse: Parse | None = None) -> list[Prompt]:
    """Read all prompts of a file or of Outpace's own set; `parse` makes a prompt from a line's object and number."""
    name = "prompts.jsonl" if path is None else str(path)
    try:
        source = resources.files("outpace.prompts") / name if path is None else Path(path)
        lines = source.read_text(encoding="utf-8").split("\n")  # not splitlines: texts may contain other separators
    except (OSError, UnicodeDecodeError) as error:
        raise OutpaceError(f"cannot read the prompts: {error}") from error
    found = list(_prompts(lines, name, parse or prompt_of))
    if not found:
        raise UsageError(f"{name} has no prompts")
    return found


def _first(prompts: Seq[Prompt], tasks: Collection[str], limit: int | None) -> Iterator[Prompt]:
    seen = dict.fromkeys(tasks, 0)
    for prompt in prompts:
        if prompt.task in seen and (limit is None or seen[prompt.task] < limit):
            seen[prompt.task] += 1
            yield prompt


def _prompts(lines: Seq[str], name: str, parse: Parse) -> Iterator[Prompt]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            given = json.loads(line)
            if not isinstance(given, dict):
                raise ValueError("not a JSON object")
            yield parse(given, number)
        except ValueError as error:
            raise UsageError(f"{name}, line {number}: {error}") from error


def prompt_of(given: dict[str, Any], number: int) -> Prompt:
    """Parse a prompt in Outpace's own format; `number` becomes its id if it has none."""
    kinds = [kind for kind in ("prompt", "turns", "messages") if kind in given]
    if len(kinds) != 1:
        raise ValueError('needs one of "prompt" (text), "turns" (a list of texts) and "messages" (a chat)')
    content, before = given[kinds[0]], list[text.Message]()
    if kinds == ["messages"]:
        content, before = _last(content)
    turns = [content] if isinstance(content, str) else content
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f'"{kinds[0]}" has no text')
    answer = given.get("answer")
    return Prompt(
        task=_task(given),
        id=str(given.get("id", given.get("question_id", number))),
        turns=tuple(turns),
        messages=tuple(before),
        answer=None if answer is None else str(answer),
    )


def _last(messages: Any) -> tuple[str, list[text.Message]]:
    """Split a chat into the user's last message and the messages before it."""
    if not text.is_chat(messages) or any(not isinstance(m.get("content"), str) or "role" not in m for m in messages):
        raise ValueError('"messages" must be a list of objects with "role" and "content"')
    if messages[-1]["role"] != "user":
        raise ValueError('the last of "messages" must have the role "user"')
    return messages[-1]["content"], messages[:-1]


def _task(given: dict[str, Any]) -> str:
    if "task" in given:
        return ALIASES.get(str(given["task"]), str(given["task"]))
    category = str(given.get("category", "own"))
    return "mt_bench" if category in MT_BENCH else ALIASES.get(category, category)


def encode(prompt: Prompt, model: Model, answers: Seq[str] = ()) -> list[int]:
    """Encode the chat up to the turn that follows these answers; without a chat template, join the texts."""
    chat = list(prompt.messages)
    for index, turn in enumerate(prompt.turns[: len(answers) + 1]):
        chat.append({"role": "user", "content": turn})
        if index < len(answers):
            chat.append({"role": "assistant", "content": answers[index]})
    templated = getattr(model.tokenizer, "chat_template", None)
    content = chat if templated else "\n\n".join(message["content"] for message in chat)
    return text.encode(content, model.tokenizer, model.lm.vocab)


def copying(model: Model, length: int, count: int) -> list[Prompt]:
    """Generate prompts of at most `length` tokens that request a copy of a list of records; always the same ones."""
    return [_copy(model, length, index) for index in range(count)]


def _copy(model: Model, length: int, index: int) -> Prompt:
    # The seed includes the length, so that a method cannot know a longer list from a shorter one it has seen.
    draw = random.Random(f"{length}/{index}")
    records = [_record(draw) for _ in range(length // 8)]  # a record has more than eight tokens

    def prompt(count: int) -> Prompt:
        listed = "\n".join(records[:count])
        start = f'The copy must start with the line "{records[0]}".'  # otherwise a small model invents a list
        turn = f"Copy this text, line by line, exactly as it is.\n\n```\n{listed}\n```\n\n{start}"
        return Prompt(COPY, f"{length}-{index + 1}", (turn,), answer=listed)

    fitting = bisect_right(range(1, len(records)), length, key=lambda count: len(encode(prompt(count), model)))
    if not fitting:
        raise UsageError(
            f"{length} tokens are too few for the copy task: one record needs {len(encode(prompt(1), model))}"
        )
    return prompt(fitting)


def _record(draw: random.Random) -> str:
    name, city, item = draw.choice(NAMES), draw.choice(CITIES), draw.choice(ITEMS)
    return f"Order {draw.randrange(1000, 10000)}: {draw.randrange(2, 100)} {item} for {name}, {city}"
