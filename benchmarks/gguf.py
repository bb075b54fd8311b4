"""GGUF models: our loop beside llama.cpp's own, as it comes, in one run; tokens per second behind the prompt.

    python benchmarks/gguf.py MODEL.gguf --update docs/benchmarks.md

Chat prompts, edits of code whose answer repeats most of the prompt, and retrieval that quotes it. llama.cpp runs with
its own settings (a cache in float16, weights in its own order), one token at a time, the likeliest by its own sampler.
Rounds are interleaved; figures are medians, and what ours wrote is compared with our plain decoding.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

import outpace
from outpace.api import Model
from outpace.bench import tasks
from outpace.bench.tables import update
from outpace.text import encode

PLACE = "gguf"  # of the table in the document
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


class Own:
    """llama.cpp by itself."""

    def __init__(self, path: Path):
        from cyllama.llama import llama_cpp as library

        self.library, given = library, library.LlamaModelParams()
        given.n_gpu_layers = 0
        self.model = library.LlamaModel(str(path), given)
        self.greedy, self.batch = library.LlamaSampler(), library.LlamaBatch(n_tokens=2048, embd=0, n_seq_max=1)
        self.greedy.add_greedy()

    def seconds(self, prompt: list[int], count: int) -> float:
        """Of each token after the first."""
        given = self.library.LlamaContextParams()
        given.n_ctx, given.n_batch, given.no_perf = 4096, 2048, True
        given.n_threads = given.n_threads_batch = torch.get_num_threads()
        context = self.library.LlamaContext(self.model, given)
        self._decode(context, prompt, 0)
        token, start = self.greedy.sample(context, len(prompt) - 1), time.perf_counter()
        for i in range(count - 1):
            self._decode(context, [token], len(prompt) + i)
            token = self.greedy.sample(context, 0)
        return (time.perf_counter() - start) / (count - 1)

    def _decode(self, context: Any, tokens: list[int], first: int) -> None:
        self.batch.clear()
        for i, token in enumerate(tokens):
            self.batch.add(token, first + i, [0], i == len(tokens) - 1)
        context.decode(self.batch)


def ours(model: Model, prompt: list[int], method: str, count: int) -> tuple[float, list[int]]:
    """Seconds of each token after the first pass, and the answer."""
    model.lm.clear()
    start, first, stream = 0.0, 0, model.stream(prompt, method=method, max_tokens=count)
    for piece in stream:
        if not start:
            start, first = time.perf_counter(), len(piece.tokens)
    answer = stream.completions[0].tokens
    return (time.perf_counter() - start) / max(len(answer) - first, 1), answer


def prompts(model: Model) -> dict[str, list[list[int]]]:
    texts = {"chat": [p.turns[0] for p in tasks.load(tasks=["chat", "qa"], limit=2)], "edits of code": EDITS}
    found = {kind: [_asked(model, text) for text in asked] for kind, asked in texts.items()}
    return found | {"retrieval": [tasks.encode(prompt, model) for prompt in tasks.copying(model, 512, 3)]}


def _asked(model: Model, text: str) -> list[int]:
    return encode([{"role": "user", "content": text}], model.tokenizer, model.lm.vocab)


def main(
    path: Annotated[Path, typer.Argument(help="GGUF file.")],
    method: Annotated[list[str], typer.Option("--method", "-m")] = ["plain", "suffix", "auto"],  # noqa: B006
    max_tokens: int = 128,
    rounds: int = 3,
    update_: Annotated[Path | None, typer.Option("--update", help="Document whose table is written.")] = None,
) -> None:
    model, own = outpace.load(path), Own(path)
    asked = prompts(model)
    ours(model, asked["chat"][0], "auto", 64)  # what costs are not known yet is measured now
    times, wrong = defaultdict[tuple[str, str], list[float]](list), set[str]()
    for _ in track(range(rounds)):
        for kind, texts in asked.items():
            for text in texts:
                answers = {}
                for name in method:
                    spent, answers[name] = ours(model, text, name, max_tokens)
                    times[kind, name].append(spent)
                times[kind, "llama.cpp"].append(own.seconds(text, max(2, len(answers[method[0]]))))
                wrong |= {name for name in method if answers[name] != answers[method[0]]}
    names = ["llama.cpp", *method]
    rows = [f"| {' | '.join(['tokens/s', *names])} |", "|" + "---|" * (len(names) + 1)]
    for kind in asked:
        rates = [1 / statistics.median(times[kind, name]) for name in names]
        rows.append(
            f"| {kind} | {rates[0]:.1f} | " + " | ".join(f"{r:.1f} ({r / rates[0]:.2f})" for r in rates[1:]) + " |"
        )
    rows.append(f"\nAnswers that differ from those of `{method[0]}`: {', '.join(sorted(wrong)) or 'none'}.")
    typer.echo("\n".join(rows))
    if update_ is not None:
        update(update_, PLACE, "\n".join(rows))


if __name__ == "__main__":
    typer.run(main)
