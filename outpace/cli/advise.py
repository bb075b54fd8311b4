"""outpace advise: predict which methods are fastest on this machine and these prompts, then measure the best."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from outpace.cli.common import DEFAULT_MODEL, Loading, app, load_model, reports_errors, stderr
from outpace.cli.flags import (
    Adapter,
    AsJson,
    Compile,
    Device,
    Dtype,
    MaxTokens,
    Quantize,
    Seed,
    Temperature,
    TopK,
    TopP,
)
from outpace.errors import UsageError
from outpace.prompts import tasks
from outpace.registry import catalogue
from outpace.sampling.settings import Sampling

if TYPE_CHECKING:
    from outpace.advise.advice import Advice
    from outpace.bench.summary import Interval

Drafts = Annotated[list[str], typer.Option("--draft", help="Draft model to try; repeatable.")]
Methods = Annotated[
    list[str],
    typer.Option("--method", help="NAME or NAME:option=value,...; repeatable. Default: all lossless methods."),
]
Prompts = Annotated[Path | None, typer.Option(help="JSONL with prompt, turns or messages; default: built-in prompts.")]
SHOWN = 15  # predictions in the table


@app.command()
@reports_errors
def advise(
    model: Annotated[str, typer.Argument(help="Demo model, folder, Hugging Face id or GGUF file.")] = DEFAULT_MODEL,
    prompts: Prompts = None,
    draft: Drafts = [],  # noqa: B006
    method: Methods = [],  # noqa: B006
    limit: Annotated[int | None, typer.Option(help="Maximum number of prompts per task.")] = None,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = 0,
    best: Annotated[int, typer.Option(min=0, help="Number of best predictions to measure.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each of them per held-out prompt.")] = 2,
    as_json: AsJson = False,
    dtype: Dtype = None,
    device: Device = None,
    compile: Compile = None,
    quantize: Quantize = None,
    adapter: Adapter = None,
) -> None:
    """Rank methods, drafts and depths by predicted speed-up on your prompts, then measure the best."""
    every = catalogue.entries("method")
    able = [name for name, entry in every.items() if entry.lossless and (draft or "draft" not in entry.options)]
    chosen = method or [name for name in able if name not in ("plain", "auto")]
    for spec in chosen:
        catalogue.check("method", spec, provided=["draft"])
    sampling = Sampling(temperature, top_k, top_p, seed=seed)
    loading = Loading(dtype, device, compile=compile, quantize=quantize, adapter=adapter)
    for name in (model, *draft):
        loading.check(name)
    found = tasks.load(prompts, limit=limit)
    from outpace.advise import advice
    from outpace.advise.rank import candidates

    asked = candidates(chosen, draft)
    if not asked:
        raise UsageError("nothing to rank: a method that takes a draft needs --draft MODEL")
    lm = load_model(model, loading)
    drafts = {name: load_model(name, loading) for name in draft}
    encoded = [tasks.encode(prompt, lm) for prompt in found]
    question = advice.AdviceQuestion(lm, drafts, encoded, max_tokens, sampling)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=stderr, transient=True) as progress:

        def step(name: str, parts: int) -> Callable[[], object]:
            bar = progress.add_task(name, total=parts)
            return lambda: progress.advance(bar)

        answer = advice.advise(question, asked, best, rounds, step)
    if as_json:
        typer.echo(json.dumps(answer.to_dict()))
    else:
        Console().print(*_tables(answer))


def _tables(answer: Advice) -> list[Table | str]:
    rows = Table("method", "tokens per pass", "scored per pass", "drafting", "predicted speed-up (95 %)")
    rows.title, rows.title_justify = f"predicted from {answer.recorded} recorded answers", "left"
    for p in answer.predictions[:SHOWN]:
        figures = f"{p.tokens_per_pass:.2f}", f"{p.nodes_per_pass:.1f}", f"{p.draft_share:.0%}"
        rows.add_row(p.candidate.name, *figures, _interval(p.speedup))
    left = len(answer.predictions) - SHOWN
    parts: list[Table | str] = [rows, *([f"and {left} more, with lower predictions"] if left > 0 else [])]
    if answer.outcomes:
        checked = Table("method", "predicted", "measured (95 %)", "prediction error")
        checked.title, checked.title_justify = f"measured on {answer.held_out} other prompts", "left"
        for o in answer.outcomes:
            name, predicted = o.prediction.candidate.name, f"{o.prediction.speedup.value:.2f}"
            checked.add_row(name, predicted, _interval(o.measured), f"{o.error:+.0%}")
        parts += [checked, _verdict(answer)]
    return parts


def _interval(value: Interval) -> str:
    return f"{value.value:.2f}" + ("" if value.low is None else f" ({value.low:.2f} to {value.high:.2f})")


def _verdict(answer: Advice) -> str:
    first = max(answer.outcomes, key=lambda o: o.measured.value)
    if first.measured.value <= 1:
        return "[bold]Nothing was faster than plain decoding here: use --method plain.[/]"
    name = first.prediction.candidate
    policy = "" if name.policy == "fixed" else f" --policy {name.policy}"
    draft = "" if name.draft is None else f" --draft {name.draft}"
    return (
        f"[bold]Use --method {name.method}{draft}{policy}[/]: {first.measured.value:.2f} times plain decoding's speed."
    )
