"""GGUF benchmark: Outpace against llama.cpp and its own speculation, in one run; tokens per second after the prompt.

    python benchmarks/gguf_models.py MODEL.gguf --prompts spec_bench.jsonl --draft SMALL.gguf

Prompts are those of a file, by task, or built-in chat prompts; edits of code, whose answer repeats most of the prompt
if the model is good enough; and retrieval, which quotes the prompt. `llama.cpp` is the library that Outpace runs on,
with its own settings (a float16 cache, weights in its own order), one token at a time with its own greedy sampler.
`server` is llama.cpp's server from the package xllamacpp, without speculation and with each kind that it has, at its
default settings. Each server has its own process, because several copies in one process run at a third of the speed.

llama.cpp and Outpace take turns pass by pass, so that a machine that is slow for a moment is slow for all. Servers
answer one after another, and their modes are compared with the server without speculation. Every round has new methods
and new servers, so none remembers a prompt. The result of a prompt is its median round, that of a kind the mean of its
prompts.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Generator, Sequence as Seq
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from gguf_contestants import DRAFT, Answer, Library, Served, ours, race, server_library
from rich.progress import track

import outpace
from outpace.api.model import Model
from outpace.bench.markers import update
from outpace.models.gguf.lm import LlamaLM
from outpace.prompts import tasks
from outpace.text import encode

PLACE = "gguf"  # name of the table's markers in the document
LIBRARY, SERVER = "llama.cpp", "server"
MODES = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")  # modes without a draft model
CODE = """def total(values):
    result = 0
    for value in values:
        result = result + value
    return result


def mean(values):
    if not values:
        raise ValueError("no values")
    return total(values) / len(values)


def spread(values):
    middle = mean(values)
    return mean([(value - middle) ** 2 for value in values])
"""
EDITS = [f"Here is a module:\n\n{CODE}\nPrint the whole module again, with `{a}` renamed to `{b}`." for a, b in (
    ("total", "add_up"), ("mean", "average"), ("spread", "variance"))]  # fmt: skip


def prompts(model: Model, path: Path | None, limit: int) -> dict[str, list[list[int]]]:
    found = defaultdict[str, list[list[int]]](list)
    for prompt in tasks.load(path, () if path else ("chat", "qa"), limit):
        found[prompt.task].append(tasks.encode(prompt, model))
    found["edits of code"] = [_asked(model, text) for text in EDITS]
    found["retrieval"] = [tasks.encode(prompt, model) for prompt in tasks.copying(model, 512, len(EDITS))]
    return found


def _asked(model: Model, text: str) -> list[int]:
    return encode([{"role": "user", "content": text}], model.tokenizer, model.lm.vocab)


@dataclass
class Field:
    """All contestants of a run."""

    path: Path
    model: Model
    library: Library
    methods: list[str]
    draft: Path | None
    modes: tuple[str, ...]  # modes of the server; empty: no server
    count: int  # tokens of an answer

    def __post_init__(self) -> None:
        self._draft = None if self.draft is None else outpace.load(self.draft)
        if self.draft is not None:
            self.modes = (*self.modes, DRAFT) if self.modes else ()
            self.methods = [*self.methods, "draft", "auto with draft"]

    @property
    def names(self) -> list[str]:
        return [LIBRARY, *([SERVER] if self.modes else []), *self.modes, *self.methods]

    def round(self, asked: dict[tuple[str, int], list[int]]) -> Generator[tuple[str, int, str, Answer]]:
        """Let all contestants answer all prompts, without any memory of earlier rounds."""
        models = {name: self._fresh() for name in self.methods}
        with ExitStack() as servers:
            served = {}
            for mode in (None, *self.modes) if self.modes else ():
                served[mode or SERVER] = servers.enter_context(Served(self.path, mode, self.draft))
            for (kind, i), prompt in track(asked.items()):
                lanes = {LIBRARY: self.library.ask(prompt, self.count)}
                for name, model in models.items():
                    given = {"method": name.split()[0]} | ({"draft": self._draft} if name.endswith("draft") else {})
                    lanes[name] = ours(model, prompt, self.count, **given)
                answers = race(lanes) | {name: one.ask(prompt, self.count) for name, one in served.items()}
                for name, answer in answers.items():
                    yield kind, i, name, answer

    def _fresh(self) -> Model:
        assert isinstance(self.model.lm, LlamaLM)
        lm = LlamaLM(self.model.lm.file)  # the same weights with a separate cache
        return Model(lm, self.model.tokenizer, self.model.stop_token_ids, self.model.name)


@dataclass
class Results:
    """Answers by kind of prompt, by the prompt's number, and by contestant."""

    answers: defaultdict[tuple[str, int, str], list[Answer]]
    names: list[str]

    def rate(self, kind: str, name: str) -> float:
        """Tokens per second of a contestant on one kind of prompt."""
        of_prompts = [a for (k, _, n), a in self.answers.items() if (k, n) == (kind, name)]
        return 1 / statistics.mean(statistics.median(answer.seconds for answer in a) for a in of_prompts)

    def table(self, modes: Seq[str]) -> list[str]:
        named = [*self.names, *(["`auto` / `plain`"] if {"auto", "plain"} <= set(self.names) else [])]
        named += ["`auto`'s gain / that of the server's best mode"] if modes and "auto" in self.names else []
        rows = [f"| {' | '.join(['tokens/s', *named])} |", "|" + "---|" * (len(named) + 1)]
        for kind in dict.fromkeys(kind for kind, _, _ in self.answers):
            rate = {name: self.rate(kind, name) for name in self.names}
            others = [n for n in self.names if n not in (LIBRARY, SERVER)]
            cells = [f"{rate[n]:.1f}" for n in self.names if n in (LIBRARY, SERVER)]
            gains = {n: rate[n] / rate[SERVER if n in modes else LIBRARY] for n in others}
            cells += [f"{rate[n]:.1f} ({gains[n]:.2f})" for n in others]
            if "`auto` / `plain`" in named:
                cells.append(f"**{gains['auto'] / gains['plain']:.2f}**")
            if modes and "auto" in gains:
                cells.append(f"{gains['auto'] / max(gains[mode] for mode in modes):.2f}")
            rows.append(f"| {' | '.join([kind, *cells])} |")
        return rows

    def differing(self, name: str, reference: str) -> str:
        """Count the prompts whose answer differs from the reference's in any round."""
        found = [
            any(a.text != b.text for a, b in zip(given, self.answers[kind, i, reference], strict=True))
            for (kind, i, n), given in self.answers.items()
            if n == name
        ]
        return f"{name} {sum(found)} of {len(found)}"


def report(results: Results, field: Field) -> str:
    rows = results.table(field.modes)
    wrong = ", ".join(results.differing(name, field.methods[0]) for name in field.methods[1:])
    rows.append(f"\nPrompts whose answer differs from that of our `{field.methods[0]}`: {wrong or 'none'}.")
    if field.modes:
        theirs = ", ".join(results.differing(mode, SERVER) for mode in field.modes)
        rows.append(f"Prompts whose text differs from that of `{SERVER}` without speculation: {theirs}.")
    return "\n".join(rows)


def main(
    path: Annotated[Path, typer.Argument(help="GGUF file.")],
    method: Annotated[list[str], typer.Option("--method", "-m", help="Outpace method.")] = ["plain", "suffix", "auto"],  # noqa: B006
    prompts_: Annotated[Path | None, typer.Option("--prompts", help="JSONL file; each task becomes a row.")] = None,
    kind: Annotated[list[str], typer.Option(help="Row of the table; repeatable; default: all.")] = [],  # noqa: B006
    limit: Annotated[int, typer.Option(help="Number of prompts per task.")] = 2,
    draft: Annotated[Path | None, typer.Option(help="Draft model for both sides, as a GGUF file.")] = None,
    mode: Annotated[list[str], typer.Option(help="Speculation mode of llama.cpp's server; repeatable.")] = list(MODES),  # noqa: B006
    server: Annotated[bool, typer.Option(help="Whether to measure llama.cpp's server.")] = True,
    max_tokens: int = 128,
    rounds: int = 3,
    update_: Annotated[Path | None, typer.Option("--update", help="Document to write the table to.")] = None,
) -> None:
    if server:
        server_library()  # fails before anything is loaded if it is missing
    model = outpace.load(path)
    field = Field(path, model, Library(path), method, draft, tuple(mode) if server else (), max_tokens)
    found = {name: texts for name, texts in prompts(model, prompts_, limit).items() if not kind or name in kind}
    asked = {(name, i): text for name, texts in found.items() for i, text in enumerate(texts)}
    model.generate(next(iter(asked.values())), method="auto", max_tokens=16)  # measures pass costs, if they are unknown
    results = Results(defaultdict(list), field.names)
    for _ in range(rounds):
        for at, i, name, answer in field.round(asked):
            results.answers[at, i, name].append(answer)
        rows = report(results, field)  # after every round, so that an interrupted run has shown results
        typer.echo(rows)
    if update_ is not None:
        update(update_, PLACE, rows)


if __name__ == "__main__":
    typer.run(main)
