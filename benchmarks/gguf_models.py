"""GGUF models: our loop beside llama.cpp and its own speculation, in one run; tokens per second behind the prompt.

    python benchmarks/gguf_models.py MODEL.gguf --prompts spec_bench.jsonl --draft SMALL.gguf

Prompts of a file by task, or chat prompts of ours; edits of code, whose answer repeats most of the prompt if the model
is up to it; and retrieval that quotes it. `llama.cpp` is the library that we run on, with its own settings (a cache in
float16, weights in its own order), one token at a time, the likeliest by its own sampler. `server` is llama.cpp's
server of another package, xllamacpp, by itself and with each kind of speculation that it has, as they come.

Contestants take turns at every prompt. Nobody sees a prompt twice with what it remembers: every round has new methods
and new servers. Of a prompt the median round counts, of a kind the mean of its prompts.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch
import typer
from rich.progress import track

import outpace
from outpace.api import Model
from outpace.bench import tasks
from outpace.bench.tables import update
from outpace.text import encode

PLACE = "gguf"  # of the table in the document
OWN, SERVER = "llama.cpp", "server"
MODES = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")  # that need no other model
DRAFT = "draft-simple"  # the one that does
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


@dataclass(frozen=True)
class Answer:
    """What a contestant said, and how fast."""

    seconds: float  # of each token after the first pass
    text: Any  # whatever is comparable with its like


Contestant: TypeAlias = Callable[[list[int]], Answer]


class Own:
    """llama.cpp by itself."""

    def __init__(self, path: Path):
        from cyllama.llama import llama_cpp as library

        self.library, given = library, library.LlamaModelParams()
        given.n_gpu_layers = 0
        self.model = library.LlamaModel(str(path), given)
        self.greedy, self.batch = library.LlamaSampler(), library.LlamaBatch(n_tokens=2048, embd=0, n_seq_max=1)
        self.greedy.add_greedy()

    def ask(self, prompt: list[int], count: int) -> Answer:
        given = self.library.LlamaContextParams()
        given.n_ctx, given.n_batch, given.no_perf = 4096, 2048, True
        given.n_threads = given.n_threads_batch = torch.get_num_threads()
        context, said = self.library.LlamaContext(self.model, given), list[int]()
        self._decode(context, prompt, 0)
        said.append(self.greedy.sample(context, len(prompt) - 1))
        start = time.perf_counter()
        while len(said) < count and not self.model.get_vocab().is_eog(said[-1]):
            self._decode(context, said[-1:], len(prompt) + len(said) - 1)
            said.append(self.greedy.sample(context, 0))
        return Answer((time.perf_counter() - start) / max(len(said) - 1, 1), said)

    def _decode(self, context: Any, tokens: list[int], first: int) -> None:
        self.batch.clear()
        for i, token in enumerate(tokens):
            self.batch.add(token, first + i, [0], i == len(tokens) - 1)
        context.decode(self.batch)


class Served:
    """llama.cpp's server, in this process, with one kind of speculation or none."""

    def __init__(self, path: Path, mode: str | None = None, draft: Path | None = None):
        library, threads = _served(), torch.get_num_threads()
        given = library.CommonParams()
        given.model.path, given.n_ctx, given.n_parallel, given.n_gpu_layers = str(path), 4096, 1, 0
        given.cache_ram_mib, given.verbosity = 0, -1
        own = given.speculative.draft
        for params in (given.cpuparams, given.cpuparams_batch, own.cpuparams, own.cpuparams_batch):
            params.n_threads = threads
        if mode is not None:
            name = f"COMMON_SPECULATIVE_TYPE_{mode.upper().replace('-', '_')}"
            given.speculative.types = [getattr(library.common_speculative_type, name)]
        if mode == DRAFT:
            own.mparams.path, own.n_gpu_layers = str(draft), 0
        self.server = library.Server(given)

    def ask(self, prompt: list[int], count: int) -> Answer:
        asked = {"prompt": prompt, "n_predict": count, "temperature": 0, "cache_prompt": False}
        done = self.server.handle_completions(asked)
        took = done["timings"]
        return Answer(took["predicted_ms"] / 1e3 / max(took["predicted_n"] - 1, 1), done["choices"][0]["text"])


def _served() -> Any:
    try:
        import xllamacpp
    except ImportError as error:
        raise typer.BadParameter("llama.cpp's own speculation needs: pip install xllamacpp; or --no-server") from error
    return xllamacpp


def ours(model: Model, prompt: list[int], count: int, **given: Any) -> Answer:
    model.lm.clear()
    start, first, stream = 0.0, 0, model.stream(prompt, max_tokens=count, **given)
    for piece in stream:
        if not start:
            start, first = time.perf_counter(), len(piece.tokens)
    answer = stream.completions[0].tokens
    return Answer((time.perf_counter() - start) / max(len(answer) - first, 1), answer)


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
    own: Own
    methods: list[str]
    draft: Path | None
    modes: tuple[str, ...]  # of the server; without any there is none
    count: int  # tokens of an answer

    def __post_init__(self) -> None:
        self._draft = None if self.draft is None else outpace.load(self.draft)
        if self.draft is not None:
            self.modes = (*self.modes, DRAFT) if self.modes else ()
            self.methods = [*self.methods, "draft"]

    @property
    def names(self) -> list[str]:
        return [OWN, *([SERVER] if self.modes else []), *self.modes, *self.methods]

    def fresh(self) -> dict[str, Contestant]:
        """Contestants that have seen nothing."""
        model, count = Model(self.model.lm, self.model.tokenizer, self.model.stop_tokens, self.model.name), self.count
        asked: dict[str, Contestant] = {OWN: lambda prompt: self.own.ask(prompt, count)}
        for mode in (None, *self.modes) if self.modes else ():
            served = Served(self.path, mode, self.draft)
            asked[mode or SERVER] = lambda prompt, served=served: served.ask(prompt, count)  # type: ignore[misc]
        for name in self.methods:
            given = {"method": name} | ({"draft": self._draft} if name == "draft" else {})
            asked[name] = lambda prompt, given=given: ours(model, prompt, count, **given)  # type: ignore[misc]
        return asked


@dataclass
class Results:
    """Answers by kind of prompt, by the prompt's number, and by contestant."""

    answers: defaultdict[tuple[str, int, str], list[Answer]]
    names: list[str]

    def rate(self, kind: str, name: str) -> float:
        """Tokens per second."""
        of_prompts = [a for (k, _, n), a in self.answers.items() if (k, n) == (kind, name)]
        return 1 / statistics.mean(statistics.median(answer.seconds for answer in a) for a in of_prompts)

    def table(self) -> list[str]:
        rows = [f"| {' | '.join(['tokens/s', *self.names])} |", "|" + "---|" * (len(self.names) + 1)]
        for kind in dict.fromkeys(kind for kind, _, _ in self.answers):
            rates = [self.rate(kind, name) for name in self.names]
            others = [f"{rate:.1f} ({rate / rates[0]:.2f})" for rate in rates[1:]]
            rows.append(f"| {' | '.join([kind, f'{rates[0]:.1f}', *others])} |")
        return rows

    def differing(self, name: str, reference: str) -> str:
        """Prompts whose answer is another one, in any round."""
        found = [
            any(a.text != b.text for a, b in zip(given, self.answers[kind, i, reference], strict=True))
            for (kind, i, n), given in self.answers.items()
            if n == name
        ]
        return f"{name} {sum(found)} of {len(found)}"


def report(results: Results, field: Field) -> str:
    rows = results.table()
    wrong = ", ".join(results.differing(name, field.methods[0]) for name in field.methods[1:])
    rows.append(f"\nPrompts whose answer differs from that of our `{field.methods[0]}`: {wrong or 'none'}.")
    if field.modes:
        theirs = ", ".join(results.differing(mode, SERVER) for mode in field.modes)
        rows.append(f"Prompts whose text differs from that of `{SERVER}` without speculation: {theirs}.")
    return "\n".join(rows)


def main(
    path: Annotated[Path, typer.Argument(help="GGUF file.")],
    method: Annotated[list[str], typer.Option("--method", "-m", help="Of ours.")] = ["plain", "suffix", "auto"],  # noqa: B006
    prompts_: Annotated[Path | None, typer.Option("--prompts", help="JSONL file; its tasks become rows.")] = None,
    kind: Annotated[list[str], typer.Option(help="Rows of the table; all if none is named.")] = [],  # noqa: B006
    limit: Annotated[int, typer.Option(help="Prompts of each task.")] = 2,
    draft: Annotated[Path | None, typer.Option(help="GGUF file: the draft method of both.")] = None,
    mode: Annotated[list[str], typer.Option(help="Speculation of llama.cpp's server.")] = list(MODES),  # noqa: B006
    server: Annotated[bool, typer.Option(help="Whether llama.cpp's server takes part.")] = True,
    max_tokens: int = 128,
    rounds: int = 3,
    update_: Annotated[Path | None, typer.Option("--update", help="Document whose table is written.")] = None,
) -> None:
    if server:
        _served()  # or say so before anything is loaded
    model = outpace.load(path)
    field = Field(path, model, Own(path), method, draft, tuple(mode) if server else (), max_tokens)
    asked = {name: texts for name, texts in prompts(model, prompts_, limit).items() if not kind or name in kind}
    ours(model, next(iter(asked.values()))[0], 16, method="auto")  # what costs are not known yet is measured now
    results = Results(defaultdict(list), field.names)
    for _ in range(rounds):
        contestants = field.fresh()
        for at, i in track([(at, i) for at, texts in asked.items() for i in range(len(texts))]):
            for name, ask in contestants.items():
                results.answers[at, i, name].append(ask(asked[at][i]))
        rows = report(results, field)  # after every round: a run that is broken off has said something
        typer.echo(rows)
    if update_ is not None:
        update(update_, PLACE, rows)


if __name__ == "__main__":
    typer.run(main)
