"""The value of drafters on each task of Spec-Bench: tokens per pass, and the acceptance rate at each depth.

    python benchmarks/heads.py smollm2-135m-instruct --prompts spec_bench.jsonl \
        -m eagle3 -m "eagle3:nodes=60,depth=8" -m "graft:nodes=32,inner=eagle3" --update docs/results/heads.md

These are counts, not times, and the same on every machine, so many requests run together. With `--check`, every answer
is compared with plain decoding's.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from functools import reduce
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

import outpace
from outpace.api.model import Model
from outpace.bench.markers import update
from outpace.core.stats import Stats
from outpace.prompts import tasks

PLACE = "heads"  # name of the table's markers in the document


def counted(model: Model, prompts: list[tasks.Prompt], **given: Any) -> tuple[dict[str, Stats], list[list[int]]]:
    """Answer the prompts; return the merged counts of each task, and the answers."""
    done = model.generate([tasks.encode(prompt, model) for prompt in prompts], **given)
    by = defaultdict[str, list[Stats]](list)
    for prompt, completion in zip(prompts, done, strict=True):
        if completion.error is not None:
            raise SystemExit(f"{prompt.id}: {completion.error}")
        by[prompt.task].append(completion.stats)
    return {task: reduce(Stats.merge, stats) for task, stats in by.items()}, [c.tokens for c in done]


def row(name: str, by: dict[str, Stats], names: list[str]) -> str:
    whole = reduce(Stats.merge, by.values())
    accepted = sum(whole.matched) / max(sum(whole.offered), 1)
    depths = " ".join(f"{share:.2f}" for share in whole.acceptance_by_depth[:6])
    cells = [f"{by[task].tokens_per_pass:.2f}" for task in names]
    return f"| `{name}` | {' | '.join(cells)} | **{whole.tokens_per_pass:.2f}** | {accepted:.0%} | {depths} |"


def main(
    model: Annotated[str, typer.Argument(help="Demo model or folder.")],
    method: Annotated[list[str], typer.Option("--method", "-m", help="Method, as for `outpace generate`; repeatable.")],
    prompts: Annotated[Path | None, typer.Option(help="JSONL file; default: built-in prompts.")] = None,
    limit: Annotated[int | None, typer.Option(help="Maximum number of prompts per task.")] = None,
    max_tokens: int = 128,
    temperature: float = 0.0,
    verifier: Annotated[str | None, typer.Option(help="match or residual; default: the method's own.")] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model, for methods that need one.")] = None,
    rows: Annotated[int, typer.Option(help="Batch size.")] = 16,
    check: bool = False,
    update_: Annotated[Path | None, typer.Option("--update", help="Document to write the table to.")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="File to write the counts to.")] = None,
) -> None:
    target, small = outpace.load(model), outpace.load(draft) if draft else None
    target.max_batch = rows
    found = tasks.load(prompts, limit=limit)
    names = list(dict.fromkeys(prompt.task for prompt in found))
    given: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
    wanted = counted(target, found, method="plain", **given)[1] if check else None
    lines, counts = [], {}
    for spec in track(method, disable=not torch.cuda.is_available() and len(method) == 1):
        start = time.perf_counter()
        extra = {"draft": small} if small is not None and spec.startswith("draft") else {}
        by, answers = counted(target, found, method=spec, verifier=verifier, **given, **extra)
        if wanted is not None and answers != wanted:
            differing = sum(a != b for a, b in zip(answers, wanted, strict=True))
            raise SystemExit(f"{spec}: {differing} of {len(answers)} answers differ from plain decoding's")
        lines.append(row(spec, by, names))
        counts[spec] = {task: vars(stats) for task, stats in by.items()}
        typer.echo(f"{lines[-1]} {time.perf_counter() - start:.0f} s")
        target.clear_cache()
    head = f"| method | {' | '.join(names)} | all | accepted | at each depth |"
    table = [head, "|" + "---|" * (len(names) + 4), *lines]
    typer.echo("\n".join(table))
    if as_json is not None:
        as_json.write_text(json.dumps(counts))
    if update_ is not None:
        update(update_, PLACE, "\n".join(table))


if __name__ == "__main__":
    typer.run(main)
