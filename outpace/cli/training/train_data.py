"""outpace train data: generate the target's own answers as training data for heads and draft models."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from outpace.cli.common import Loading, load_model, reports_errors, state_memory, stderr
from outpace.cli.flags import Adapter, AsJson, Compile, Device, Dtype, Quantize, Seed, Temperature, TopK, TopP
from outpace.errors import UsageError

if TYPE_CHECKING:
    from outpace.prompts.training import Shard
    from outpace.train.data.generate import Progress as Done, WritingResult

Prompts = Annotated[
    list[Path],
    typer.Option(help="JSONL file with prompt, turns, messages, question, instruction, ...; repeatable."),
]
SelfWritten = Annotated[int, typer.Option(min=0, help="Number of prompts that the model writes itself, then answers.")]
Output = Annotated[Path, typer.Option(help="File to write; an existing one is continued.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Maximum number of prompts per file.")]
ShardOf = Annotated[str, typer.Option(help="This worker's part, as 2/8: the second of eight, each with its own file.")]
Rows = Annotated[int, typer.Option(min=1, help="Batch size.")]
Longest = Annotated[int, typer.Option(min=1, help="Skip prompts with more tokens.")]
System = Annotated[str | None, typer.Option(help="System message for prompts that the model writes itself.")]
OwnTemperature = Annotated[float, typer.Option(help="Sampling temperature for prompts that the model writes itself.")]
OwnTopP = Annotated[float, typer.Option(help="Top-p for prompts that the model writes itself.")]
OwnTokens = Annotated[int, typer.Option(min=1, help="Drop self-written prompts with more tokens.")]


@reports_errors
def data(
    model: Annotated[str, typer.Argument(help="Demo model, folder, Hugging Face id or GGUF file.")],
    output: Output,
    prompts: Prompts = [],  # noqa: B006
    self_written: SelfWritten = 0,
    limit: Limit = None,
    shard: ShardOf = "1/1",
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens per answer.")] = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = 0,
    longest_prompt: Longest = 1024,
    system: System = None,
    prompt_temperature: OwnTemperature = 1.0,
    prompt_top_p: OwnTopP = 1.0,
    prompt_tokens: OwnTokens = 256,
    method: Annotated[str, typer.Option(help="Any lossless method; it does not change the answers.")] = "plain",
    rows: Rows = 32,
    as_json: AsJson = False,
    dtype: Dtype = None,
    device: Device = None,
    compile: Compile = None,
    quantize: Quantize = None,
    adapter: Adapter = None,
) -> None:
    """Generate training data: a model's own answers to the prompts of files, or to prompts that it writes itself.

    Run the same command again to continue an interrupted file.
    """
    from outpace.prompts import training as files
    from outpace.train.data import generate as make

    if not prompts and not self_written:
        raise UsageError("no prompts: give --prompts FILE, or --self-written N to let the model write some")
    part = files.Shard.parse(shard)
    writing = make.Writing(prompt_temperature, prompt_top_p, prompt_tokens, system)
    settings = make.GenerationSettings(
        max_tokens, temperature, top_k, top_p, seed, writing,
        longest_prompt=longest_prompt, method=method, rows=rows, shard=part,
    )  # fmt: skip
    asked = files.load(prompts, limit)
    path, lm = (
        _path(output, part),
        load_model(model, Loading(dtype, device, compile=compile, quantize=quantize, adapter=adapter)),
    )
    state_memory(lm, longest_prompt + max_tokens, rows)
    made: list[WritingResult] = []
    try:
        if asked:
            with _watched("answers") as tell:
                made.append(make.answer(lm, asked, path, settings, tell))
        if self_written:
            with _watched("self-written prompts") as tell:
                made.append(make.write(lm, self_written, path, settings, tell))
    except KeyboardInterrupt:
        stderr.print(f"{path} has the answers so far; the same command continues it", soft_wrap=True, highlight=False)
        raise
    _say(made, path, as_json)


def _path(output: Path, part: Shard) -> Path:
    """Return the worker's own file, as two workers cannot write to one."""
    if part.of == 1:
        return output
    return output.with_name(f"{output.stem}-{part.number}-of-{part.of}{output.suffix}")


class _Watch:
    """Progress of the answers, with the generated tokens per second."""

    def __init__(self, bars: Progress, bar: TaskID):
        self.bars, self.bar, self.start = bars, bar, time.perf_counter()

    def __call__(self, done: Done) -> None:
        speed = done.tokens / max(time.perf_counter() - self.start, 1e-9)
        self.bars.update(self.bar, completed=done.done, total=done.total, speed=f"{speed:.0f} tokens/s")


@contextmanager
def _watched(name: str) -> Iterator[_Watch]:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}")
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=stderr, transient=True) as bars:
        yield _Watch(bars, bars.add_task(name, total=None, speed=""))


def _say(made: list[WritingResult], path: Path, as_json: bool) -> None:
    skipped: dict[str, int] = {}
    for part in made:
        for why, count in part.skipped.items():
            skipped[why] = skipped.get(why, 0) + count
    answers, tokens = sum(part.answers for part in made), sum(part.tokens for part in made)
    if as_json:
        found: dict[str, Any] = {"output": str(path), "answers": answers, "tokens": tokens, "skipped": skipped}
        typer.echo(json.dumps(found))
        return
    typer.echo(f"{answers} new answers ({tokens} tokens) in {path}")
    for why, count in skipped.items():
        stderr.print(f"[yellow]skipped {count}:[/] {escape(why)}", soft_wrap=True, highlight=False)
