"""outpace batch: answer a file of requests, and go on where a run was interrupted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from outpace.cli import checks
from outpace.cli.common import DEFAULT_MODEL, Loading, app, pairs, reports_errors, stderr
from outpace.cli.flags import (
    Adapter,
    AsJson,
    Bitwise,
    Compile,
    Device,
    Draft,
    Dtype,
    Method,
    ModelName,
    Options,
    PolicyName,
    Quantize,
    QuantizeDraft,
    Settings,
)
from outpace.cli.serving.model import ModelToServe
from outpace.cli.serving.serve import MaxAnswer, MaxBatch, Names, Seconds, ToolFormatName
from outpace.errors import UsageError

if TYPE_CHECKING:
    from outpace.serve.batch.files import BatchFiles
    from outpace.serve.batch.records import BatchRecord
    from outpace.serve.batch.run import Take

    Run = Callable[[BatchFiles, Take], None]

OnRay = Annotated[bool, typer.Option("--ray", help="Answer on all machines of a Ray cluster; see RAY_ADDRESS.")]
Workers = Annotated[
    int | None, typer.Option(min=1, help="With --ray: how many models answer; default: one for each GPU or machine.")
]
WorkerCpus = Annotated[
    float | None, typer.Option(min=0, help="With --ray: cores of each; default: all, divided among them.")
]
WINDOW = 600.0  # seconds of which the estimate of the time left is made


@app.command()
@reports_errors
def batch(
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="Requests in OpenAI's batch format.")],
    output: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="Answers; an existing file is continued.")],
    model: ModelName = DEFAULT_MODEL,
    served_model_name: Names = [],  # noqa: B006
    method: Method = "auto",
    draft: Draft = None,
    option: Options = [],  # noqa: B006
    policy: PolicyName = None,
    settings: Settings = [],  # noqa: B006
    max_batch: MaxBatch = None,
    max_tokens: MaxAnswer = None,
    timeout: Seconds = 600.0,
    tool_format: ToolFormatName = None,
    on_ray: OnRay = False,
    workers: Workers = None,
    worker_cpus: WorkerCpus = None,
    as_json: AsJson = False,
    dtype: Dtype = None,
    device: Device = None,
    bitwise: Bitwise = None,
    compile: Compile = None,
    quantize: Quantize = None,
    quantize_draft: QuantizeDraft = None,
    adapter: Adapter = None,
) -> None:
    """Answer a file of requests as the server would. Exit code 0: all lines are answered; 1: some failed."""
    checks.readable(source)
    checks.writable(output, "the answers")
    if not on_ray and (workers or worker_cpus is not None):
        raise UsageError("--workers and --worker-cpus need --ray")
    if on_ray:
        checks.extra("ray", "--ray")
    from outpace.serve.settings import ServeLimits

    given: dict[str, Any] = {
        "names": tuple(served_model_name) or (model,), "root": model, "method": method, "options": pairs(option),
        "policy": policy, "sampling": pairs(settings), "tool_format": tool_format,
        "limits": ServeLimits(seconds=timeout, max_tokens=max_tokens),
    }  # fmt: skip
    loading = Loading(dtype, device, bitwise, compile, quantize, quantize_draft, adapter)
    served = ModelToServe(model, draft, loading, max_batch, given)
    from outpace.serve.batch.files import BatchFiles

    with BatchFiles(source, output) as files:
        report = BatchReport(files)
        try:
            if files.pending:
                run = _on_ray(served, workers, worker_cpus) if on_ray else _here(served)
                _answer(run, report, as_json)
        finally:
            report.tell(as_json)
    if files.failed:
        raise typer.Exit(1)


@dataclass
class BatchReport:
    """What a run has done, as it is told at its end."""

    files: BatchFiles
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0

    def add(self, record: BatchRecord) -> None:
        self.prompt_tokens += record.prompt_tokens
        self.completion_tokens += record.completion_tokens

    @property
    def left(self) -> int:
        """The number of lines that nothing has come of."""
        return self.files.total - self.files.done - self.files.answered - self.files.failed

    @property
    def speed(self) -> float:
        """Tokens of answers per second."""
        return self.completion_tokens / self.seconds if self.seconds else 0.0

    def tell(self, as_json: bool) -> None:
        files = self.files
        if as_json:
            found = {
                "lines": files.total, "done_before": files.done, "answered": files.answered, "failed": files.failed,
                "left": self.left, "prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens,
                "seconds": round(self.seconds, 3), "tokens_per_second": round(self.speed, 3),
                "output": str(files.output), "errors": str(files.errors) if files.failed else None,
            }  # fmt: skip
            typer.echo(json.dumps(found))
            return
        before = f", {files.done} before" if files.done else ""
        told = f"{files.answered} of {files.total} lines answered{before}"
        if files.answered:
            told += f"; {self.completion_tokens} tokens in {self.seconds:.1f} s, {self.speed:.1f} tokens/s"
        _say(told)
        if files.failed:
            _say(f"{files.failed} without an answer, in {files.errors}:")
            for problem in files.problems:
                _say(f"  {problem}")
        if self.left:
            _say(f"{self.left} lines are left: the same command goes on from here")


def _here(served: ModelToServe) -> Run:
    """Load the model, and return what answers with it in this process."""
    from outpace.serve.batch.engine import BatchEngine
    from outpace.serve.batch.run import run

    engine = BatchEngine(*served.load())
    return lambda files, take: run(engine, files.lines(), take)


def _on_ray(served: ModelToServe, workers: int | None, cpus: float | None) -> Run:
    """Return what answers with models in the processes of a Ray cluster."""
    from outpace.serve.batch.on_ray import RayWorkers, run

    return lambda files, take: run(served.load, files, RayWorkers(workers, cpus), take)


def _answer(run: Run, report: BatchReport, quiet: bool) -> None:
    """Answer all lines that are to be answered."""
    files, start = report.files, time.perf_counter()
    with _progress(report, quiet) as advance:

        def take(record: BatchRecord) -> None:
            files.add(record)
            report.add(record)
            report.seconds = time.perf_counter() - start
            advance()

        run(files, take)


@contextmanager
def _progress(report: BatchReport, quiet: bool) -> Iterator[Callable[[], None]]:
    """Show how far a batch is, how fast it is, and how long it will take."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=stderr, speed_estimate_period=WINDOW, disable=quiet) as bars:
        files = report.files
        bar = bars.add_task("", total=files.total, completed=files.done + files.failed)

        def advance() -> None:
            bars.update(bar, advance=1, description=f"{report.speed:.1f} tokens/s")

        yield advance


def _say(text: str) -> None:
    stderr.print(escape(text), highlight=False, soft_wrap=True)
