"""The effect and the cost of bitwise=True: answers that differ from plain decoding's, by dtype, alone and in a batch.

    python benchmarks/exact.py --dtype bfloat16 --dtype float16

An answer is different if any of its tokens differs, and bit-identical if every log-probability is the same number too.
Times are those of plain decoding, and of all methods together, one prompt at a time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import outpace
from outpace.prompts import tasks

TASKS = ["summarization", "math", "code", "chat"]
METHODS = ["ngram", "suffix", "recycling", "lookahead"]


@dataclass
class Count:
    """Counts and times of one dtype, with or without bitwise=True."""

    answers: int = 0
    different: int = 0
    other_bits: int = 0
    plain: float = 0.0  # seconds
    speculative: float = 0.0


def main(
    model: Annotated[str, typer.Option(help="Demo model, folder or Hugging Face id.")] = "smollm2-135m-instruct",
    dtype: Annotated[list[str], typer.Option(help="Data type; repeatable.")] = ["bfloat16", "float16"],  # noqa: B006
    task: Annotated[list[str], typer.Option(help="Task of `outpace bench`; repeatable.")] = TASKS,
    limit: Annotated[int, typer.Option(help="Prompts per task.")] = 1,
    tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = 48,
    batch: Annotated[int, typer.Option(help="Batch size.")] = 4,
) -> None:
    table = Table("dtype", "passes", "answers", "different", "other bits", "plain, s", "methods, s")
    found = tasks.load(tasks=task, limit=limit)
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("answers", total=2 * len(dtype) * len(found) * (1 + len(METHODS)))
        for kind in dtype:
            for bitwise in (False, True):
                lm = outpace.load(model, dtype=kind, bitwise=bitwise)
                ids = [tasks.encode(prompt, lm) for prompt in found]
                count = measure(lm, ids, tokens, batch, lambda: progress.advance(bar))
                name = "bitwise" if bitwise else "default"
                figures = [count.answers, count.different, count.other_bits]
                row = [kind, name, *map(str, figures), f"{count.plain:.1f}", f"{count.speculative:.1f}"]
                progress.console.print(*row)  # so that an interrupted run has shown results
                table.add_row(*row)
    Console(width=100).print(table)


def measure(lm: outpace.Model, prompts: list[list[int]], tokens: int, batch: int, done: Any) -> Count:
    count, plain = Count(), []
    given: dict[str, Any] = {"max_tokens": tokens, "logprobs": 0}
    lm.generate(prompts[0], method="suffix", max_tokens=8)  # warm-up
    for prompt in prompts:
        start = time.perf_counter()
        lm.clear_cache()
        plain.append(lm.generate(prompt, method="plain", **given))
        count.plain += time.perf_counter() - start
        done()
    for method in METHODS:
        for prompt, wanted in zip(prompts, plain, strict=True):
            lm.clear_cache()
            start = time.perf_counter()
            compare(count, lm.generate(prompt, method=method, **given), wanted)
            count.speculative += time.perf_counter() - start
            done()
        for at in range(0, len(prompts), batch):
            lm.clear_cache()
            together = lm.generate(prompts[at : at + batch], method=method, **given)
            for got, wanted in zip(together, plain[at : at + batch], strict=True):
                compare(count, got, wanted)
    return count


def compare(count: Count, got: outpace.Completion, wanted: outpace.Completion) -> None:
    count.answers += 1
    count.different += got.tokens != wanted.tokens
    count.other_bits += got.logprobs != wanted.logprobs


if __name__ == "__main__":
    typer.run(main)
