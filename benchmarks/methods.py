"""Every method on SmolLM2, next to Transformers' own loop, in one run: `make bench`, or `--help`.

All contestants answer each prompt in turn, round by round, after a warm-up, so that a change in the machine's speed
hits all of them alike. Reported are medians over rounds and ratios within the run. Divergences from plain are counted.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import outpace
from outpace import registry

PROMPTS = Path(__file__).with_name("prompts.jsonl")
Run = Callable[[list[int], int], tuple[list[int], float]]  # prompt, most tokens -> tokens, passes


@dataclass
class Contestant:
    name: str
    run: Run
    seconds: list[float] = field(default_factory=list)  # of each round
    tokens: int = 0
    passes: float = 0.0
    diverged: int = 0


def ours(lm: outpace.Model, method: str, **options: Any) -> Run:
    def run(prompt: list[int], most: int) -> tuple[list[int], float]:
        # A fresh method each time: what it learned from this prompt a round ago would be the answer itself.
        done = lm.generate(prompt, method=registry.method(method, **options), max_tokens=most)
        return done.tokens, done.stats.passes

    return run


def theirs(model: Any, **options: Any) -> Run:
    def run(prompt: list[int], most: int) -> tuple[list[int], float]:
        ids = torch.tensor([prompt], device=model.device)
        given = {"max_new_tokens": most, "do_sample": False, "pad_token_id": 0, **options}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **given)
        return out[0, len(prompt) :].tolist(), float("nan")

    return run


def contestants(lm: outpace.Model) -> list[Contestant]:
    model = lm.lm.model  # type: ignore[attr-defined]
    return [
        Contestant("plain", ours(lm, "plain")),
        Contestant("Transformers generate", theirs(model)),
        Contestant("Transformers prompt lookup", theirs(model, prompt_lookup_num_tokens=10)),
        Contestant("ngram", ours(lm, "ngram")),
        Contestant("suffix", ours(lm, "suffix")),
        Contestant("recycling, 8 nodes", ours(lm, "recycling", nodes=8)),
        Contestant("recycling", ours(lm, "recycling")),
        Contestant("lookahead", ours(lm, "lookahead")),
    ]


def main(
    model: Annotated[str, typer.Option(help="Shelf name, folder or hub id.")] = "smollm2-135m-instruct",
    tokens: Annotated[int, typer.Option(help="Most tokens per answer.")] = 64,
    rounds: Annotated[int, typer.Option(help="Times each contestant answers each prompt.")] = 2,
    prompts: Annotated[Path, typer.Option(help="JSONL with task and prompt.")] = PROMPTS,
) -> None:
    lm = outpace.load(model)
    tasks = [json.loads(line) for line in prompts.read_text().splitlines()]
    ids = [outpace.text.encode([{"role": "user", "content": t["prompt"]}], lm.tokenizer, lm.lm.vocab) for t in tasks]
    field_, plain = contestants(lm), dict[int, list[int]]()
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("rounds", total=len(field_) * (rounds + 1) * len(ids))
        for turn in range(rounds + 1):  # the first is the warm-up
            for contestant in field_:
                spent = 0.0
                for i, prompt in enumerate(ids):
                    start = time.perf_counter()
                    answer, passes = contestant.run(prompt, tokens)
                    spent += time.perf_counter() - start
                    progress.advance(bar)
                    if turn == 0:
                        contestant.tokens += len(answer)
                        contestant.passes += passes
                        plain.setdefault(i, answer)  # the first contestant is plain decoding
                        contestant.diverged += answer != plain[i]
                if turn:
                    contestant.seconds.append(spent)
    report(field_, model)


def report(field_: list[Contestant], model: str) -> None:
    table = Table("", "tokens per pass", "tokens/s", "x plain", "x Transformers", "answers that differ from plain")
    plain, generate = (statistics.median(c.seconds) for c in field_[:2])
    for c in field_:
        median = statistics.median(c.seconds)
        per_pass = f"{c.tokens / c.passes:.2f}" if c.passes == c.passes else ""
        speeds = [f"{c.tokens / median:.1f}", f"{plain / median:.2f}", f"{generate / median:.2f}"]
        table.add_row(c.name, per_pass, *speeds, str(c.diverged))
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    console = Console(width=120)
    console.print(f"{model}, {platform.machine()}, {torch.get_num_threads()} threads, {versions}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
