"""outpace bench: measure methods, plain decoding and Transformers on the same prompts, in one run."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from outpace.bench import markers, plan as planning
from outpace.bench.plan import BenchPlan
from outpace.bench.specs import MethodSpec, specs
from outpace.cli import checks
from outpace.cli.common import (
    DEFAULT_MODEL,
    INTERRUPTED,
    Loading,
    app,
    load_draft,
    load_model,
    reports_errors,
    stderr,
    tracing,
)
from outpace.cli.flags import (
    Adapter,
    AsJson,
    Bitwise,
    Compile,
    Device,
    Draft,
    Dtype,
    Quantize,
    QuantizeDraft,
    Seed,
    TopK,
    TopP,
    TracePath,
    VerifierName,
)
from outpace.errors import UsageError

if TYPE_CHECKING:
    from outpace.api.model import Model
    from outpace.bench.record import BenchRecord, Writer
    from outpace.bench.run import Contestant, Group, Run
    from outpace.bench.summary import Summary

Methods = Annotated[
    list[str],
    typer.Option("--method", "-m", help="NAME or NAME:option=value,...; repeatable. Default: all that can run."),
]
Policies = Annotated[
    list[str],
    typer.Option("--policy", help="NAME or NAME:option=value,...; repeatable: each method runs with each policy."),
]
Tasks = Annotated[
    list[str],
    typer.Option("--task", help="mt_bench, translation, summarization, qa, math, rag, code, chat or copy; repeatable."),
]
Prompts = Annotated[Path | None, typer.Option(help="JSONL with prompt, turns or messages; default: built-in prompts.")]
Limit = Annotated[int | None, typer.Option(help="Maximum number of prompts per task.")]
Batches = Annotated[list[int], typer.Option("--batch", help="Batch size; repeatable.")]
Contexts = Annotated[list[int], typer.Option("--context", help="Prompt tokens of the copy task; repeatable.")]
Temperatures = Annotated[list[float], typer.Option("--temperature", help="Sampling temperature; repeatable.")]
MaxTokens = Annotated[int, typer.Option(help="Maximum number of tokens per answer.")]
Rounds = Annotated[int, typer.Option(min=1, help="Number of times that each contestant answers each prompt.")]
WithTransformers = Annotated[
    bool, typer.Option("--transformers/--no-transformers", help="Also measure Transformers' own generation loops.")
]
Output = Annotated[Path | None, typer.Option(help="Folder for runs.jsonl and report.html; default: a new folder.")]
Page = Annotated[bool, typer.Option("--page/--no-page", help="Write report.html (needs matplotlib).")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print the summary as Markdown.")]
Source = Annotated[Path | None, typer.Option("--from", help="Report on this runs.jsonl again, without measuring.")]
Update = Annotated[
    str | None,
    typer.Option(help="FILE.md#NAME: write the summary between <!-- bench:NAME --> and <!-- /bench:NAME -->."),
]


@dataclass(frozen=True)
class BenchSetup:
    """What to load and measure, and where to write the results."""

    model: str
    draft: str | None
    loading: Loading
    methods: list[MethodSpec]
    policies: list[MethodSpec]
    verifier: MethodSpec | None
    transformers: bool
    plan: BenchPlan
    rounds: int
    output: Path
    trace: Path | None
    arguments: dict[str, Any]


@app.command()
@reports_errors
def bench(
    model: Annotated[str, typer.Argument(help="Demo model, folder, Hugging Face id or GGUF file.")] = DEFAULT_MODEL,
    method: Methods = [],  # noqa: B006
    draft: Draft = None,
    policy: Policies = [],  # noqa: B006
    verifier: VerifierName = None,
    transformers: WithTransformers = True,
    task: Tasks = [],  # noqa: B006
    prompts: Prompts = None,
    limit: Limit = None,
    batch: Batches = [1],  # noqa: B006
    context: Contexts = [512],  # noqa: B006
    temperature: Temperatures = [0.0],  # noqa: B006
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = 0,
    max_tokens: MaxTokens = 64,
    rounds: Rounds = 3,
    dtype: Dtype = None,
    device: Device = None,
    bitwise: Bitwise = None,
    compile: Compile = None,
    quantize: Quantize = None,
    quantize_draft: QuantizeDraft = None,
    adapter: Adapter = None,
    output: Output = None,
    page: Page = True,
    as_json: AsJson = False,
    markdown: Markdown = False,
    trace: TracePath = None,
    source: Source = None,
    update: Update = None,
) -> None:
    """Benchmark methods, plain decoding and Transformers in turn, with intervals; print a table and write a page."""
    given = {name: str(value) if isinstance(value, Path) else value for name, value in locals().items()}
    if as_json and markdown:
        raise UsageError("--json and --markdown both write to standard output: use one of them")
    if page:
        checks.installed("matplotlib", "jinja2")
    place = _place(update)
    if source is not None:
        checks.readable(source)
        from outpace.bench import record as recording

        found, folder = recording.read(source), output or source.parent
    else:
        folder = output or Path(f"outpace-bench-{datetime.now():%Y%m%d-%H%M%S}")
        plan = BenchPlan(
            tuple(task), prompts, limit, tuple(batch), tuple(context), tuple(temperature), top_p, top_k, seed,
            max_tokens,
        )  # fmt: skip
        loading = Loading(dtype, device, bitwise, compile, quantize, quantize_draft, adapter)
        loading.check(model, draft)
        checks.writable(trace, "the trace")
        policies = [MethodSpec.checked("policy", text) for text in dict.fromkeys(policy)]
        rule = MethodSpec.checked("verifier", verifier) if verifier else None
        found = _measured(
            BenchSetup(
                model, draft, loading, specs(method, draft is not None), policies, rule, transformers, plan, rounds,
                folder, trace, given,
            )
        )  # fmt: skip
    summary = _report(found, folder, place, page)
    _show(found, summary, as_json, markdown)
    if found.interrupted:
        raise typer.Exit(INTERRUPTED)


def _place(update: str | None) -> tuple[Path, str] | None:
    """Split FILE#NAME, and refuse a wrong one before anything runs."""
    if update is None:
        return None
    path, sharp, name = update.rpartition("#")
    if not sharp:
        raise UsageError(f"--update needs FILE.md#NAME, got {update!r}")
    markers.around(Path(path), name)
    return Path(path), name


def _measured(setup: BenchSetup) -> BenchRecord:
    """Load, prepare, warm up and measure. Ctrl-C ends the measurements, but the report is still written."""
    prompts = planning.load(setup.plan)
    from outpace.bench import record as recording
    from outpace.bench.contestants import sweep, transformers_contestants
    from outpace.bench.record import BenchRecord, Writer

    draft, lm = load_draft(setup.draft, setup.loading), load_model(setup.model, setup.loading)
    ours = sweep(lm, setup.methods, draft, setup.policies, setup.verifier)
    others = transformers_contestants(lm, draft, max(setup.plan.batches) > 1) if setup.transformers else []
    with _progress() as bars, tracing(setup.trace, lm) as writer:
        groups = _prepared(setup.plan, lm, prompts, bars)
        everyone: list[Contestant] = [ours[0], *others, *ours[1:]]  # our plain decoding and Transformers first
        header = recording.provenance(lm, shlex.join(["outpace", *sys.argv[1:]]), setup.arguments)
        found = BenchRecord(header | {"contestants": [c.name for c in everyone]}, groups)
        with Writer(setup.output / "runs.jsonl", found.header, groups) as out:
            _run(found, everyone, setup.rounds, out, bars)
        if writer is not None and not found.interrupted:
            bar = bars.add_task("trace", total=len(ours))
            for contestant in ours:
                contestant.trace(groups, writer)
                bars.advance(bar)
    if not found.runs:
        raise KeyboardInterrupt
    return found


def _prepared(plan: BenchPlan, lm: Model, prompts: list[Any], bars: Progress) -> list[Group]:
    bar = bars.add_task("prompts", total=sum(len(prompt.turns) for prompt in prompts))
    return planning.groups(plan, planning.encode_turns(plan, lm, prompts, lambda: bars.advance(bar)))


def _run(found: BenchRecord, everyone: list[Contestant], rounds: int, out: Writer, bars: Progress) -> None:
    from outpace.bench.run import measure, warm_up

    bar = bars.add_task("warm-up", total=len(everyone))
    found.left_out.update(warm_up(everyone, found.groups[0], lambda: bars.advance(bar)))
    for name, why in found.left_out.items():
        out.left_out(name, why)
    able = [contestant for contestant in everyone if contestant.name not in found.left_out]
    bar = bars.add_task("measuring", total=len(able) * len(found.groups) * rounds)

    def took(run: Run) -> None:
        found.runs.append(run)
        out.run(run)
        bars.advance(bar)

    try:
        measure(able, found.groups, rounds, took)
    except KeyboardInterrupt:
        found.interrupted = True


@contextmanager
def _progress() -> Iterator[Progress]:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=stderr) as bars:
        yield bars


def _report(found: BenchRecord, folder: Path, place: tuple[Path, str] | None, page: bool) -> Summary:
    from outpace.bench import report, tables
    from outpace.bench.summary import summarize

    summary, written = summarize(found), [folder / "runs.jsonl"]
    folder.mkdir(parents=True, exist_ok=True)
    if page:
        written.append(folder / "report.html")
        report.write(found, summary, written[-1])
    if place is not None:
        markers.update(*place, tables.markdown(found, summary))
    stderr.print(*written, sep="\n", soft_wrap=True, highlight=False)
    return summary


def _show(found: BenchRecord, summary: Summary, as_json: bool, markdown: bool) -> None:
    from outpace.bench import tables

    if as_json:
        typer.echo(json.dumps({"header": found.header, "left_out": found.left_out, **asdict(summary)}, indent=2))
    elif markdown:
        typer.echo(tables.markdown(found, summary))
    else:
        console = Console()
        console.print(tables.machine(found.header), highlight=False)
        console.print(tables.to_rich(tables.totals(summary.total, summary.baselines), console.width))
        console.print(tables.to_rich(tables.by_part(summary), console.width))
        for note in tables.notes(found, summary):
            console.print(note, markup=False, highlight=False)
