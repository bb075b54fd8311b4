"""Steady-state times of methods: tokens/s, and milliseconds per pass for drafting, scoring and the other steps.

    python benchmarks/head_times.py smollm2-135m-instruct --prompts spec_bench.jsonl -m plain -m eagle3 -m mtp

Requests run one at a time. Methods take turns, and the best of several rounds counts, because the first ones compile
kernels and capture graphs. The times exclude prefill, because a prompt that is cached costs next to nothing.
"""

from __future__ import annotations

from collections import defaultdict
from functools import reduce
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track

import outpace
from outpace.api.model import Model
from outpace.core.stats import Stats
from outpace.prompts import tasks


def answered(model: Model, prompts: list[tasks.Prompt], method: str, max_tokens: int) -> Stats:
    """Answer all prompts one after another, and merge their statistics, which include the times of the passes."""
    done = [model.generate(tasks.encode(prompt, model), method=method, max_tokens=max_tokens) for prompt in prompts]
    return reduce(Stats.merge, (completion.stats for completion in done))


def spent(stats: Stats) -> float:
    return sum(seconds for name, seconds in stats.seconds.items() if name != "prefill")


def row(method: str, stats: Stats, plain: float) -> str:
    rate, per = stats.tokens / spent(stats), 1e3 / stats.passes
    parts = {name: per * stats.seconds.get(name, 0.0) for name in ("draft", "score", "verify", "keep")}
    cells = [
        f"{rate:.0f}",
        f"{rate / plain:.2f}",
        f"{stats.tokens_per_pass:.2f}",
        *(f"{ms:.2f}" for ms in parts.values()),
    ]
    return f"| `{method}` | {' | '.join(cells)} |"


def main(
    model: Annotated[str, typer.Argument(help="Demo model or folder.")],
    method: Annotated[list[str], typer.Option("--method", "-m", help="Method, as for `outpace generate`; repeatable.")],
    prompts: Annotated[Path | None, typer.Option(help="JSONL file; default: built-in prompts.")] = None,
    limit: Annotated[int, typer.Option(help="Number of prompts per task.")] = 1,
    max_tokens: int = 128,
    rounds: int = 4,
) -> None:
    target, found = outpace.load(model), tasks.load(prompts, limit=limit)
    methods = ["plain", *(spec for spec in method if spec != "plain")]
    seen = defaultdict[str, list[Stats]](list)
    for _ in track(range(rounds)):
        for spec in methods:
            seen[spec].append(answered(target, found, spec, max_tokens))
    best = {spec: max(of, key=lambda stats: stats.tokens / spent(stats)) for spec, of in seen.items()}
    plain = best["plain"].tokens / spent(best["plain"])
    typer.echo("| method | tokens/s | x plain | tokens per pass | ms per pass: draft | score | verify | keep |")
    typer.echo("|" + "---|" * 8)
    for spec, stats in best.items():
        typer.echo(row(spec, stats, plain))


if __name__ == "__main__":
    typer.run(main)
