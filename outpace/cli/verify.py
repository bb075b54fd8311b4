"""outpace verify: check that a method or a server gives the answers that the model gives by plain decoding."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from outpace.cli import checks
from outpace.cli.common import (
    DEFAULT_MODEL,
    INTERRUPTED,
    Loading,
    app,
    load_draft,
    load_model,
    pairs,
    reports_errors,
    shares_model,
    stderr,
)
from outpace.cli.flags import (
    Adapter,
    AsJson,
    Bitwise,
    Compile,
    Device,
    Draft,
    Dtype,
    PolicyName,
    Quantize,
    QuantizeDraft,
    Seed,
    Settings,
    TensorParallel,
    TopK,
    TopP,
    VerifierName,
)
from outpace.errors import OutpaceError, UsageError
from outpace.prompts import tasks
from outpace.sampling.settings import Sampling

if TYPE_CHECKING:
    from outpace.api.model import Model
    from outpace.prompts.tasks import Prompt
    from outpace.verify.plan import Subject
    from outpace.verify.records import Check
    from outpace.verify.suite import PlannedCheck

Methods = Annotated[
    list[str], typer.Option("--method", help="NAME or NAME:option=value,...; repeatable. Default: all that can run.")
]
PromptFile = Annotated[
    Path | None, typer.Option("--prompts", help="JSONL with prompt, turns or messages; default: built-in prompts.")
]
Limit = Annotated[int | None, typer.Option(help="Maximum number of prompts per task.")]
ServerUrl = Annotated[str | None, typer.Option("--server", help="URL of an OpenAI-compatible server to check.")]
OffUrl = Annotated[str | None, typer.Option("--reference-server", help="URL of the same model without speculation.")]
On = Annotated[str, typer.Option("--on", help="Request fields that turn speculation on, as JSON.")]
Off = Annotated[str, typer.Option("--off", help="Request fields that turn speculation off, as JSON.")]
Served = Annotated[str | None, typer.Option("--served-model", help="The model's name on the server.")]


@app.command()
@reports_errors
@shares_model
def verify(
    model: Annotated[
        str | None,
        typer.Argument(help="Demo model, folder, Hugging Face id or GGUF file; with --server, the reference."),
    ] = None,
    method: Methods = [],  # noqa: B006
    draft: Draft = None,
    policy: PolicyName = None,
    verifier: VerifierName = None,
    prompts: PromptFile = None,
    limit: Limit = 1,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens per answer.")] = 48,
    temperature: Annotated[float, typer.Option(help="Temperature of the sampled checks; greedy is checked too.")] = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = 0,
    settings: Settings = [],  # noqa: B006
    batch: Annotated[list[int], typer.Option(help="Batch size to check against single requests; repeatable.")] = [4],  # noqa: B006
    samples: Annotated[int, typer.Option(help="Draws per prompt in the test of the sampled distribution.")] = 400,
    contexts: Annotated[int, typer.Option(help="Number of prompts in the test of the sampled distribution.")] = 2,
    alpha: Annotated[float, typer.Option(help="False-alarm probability of the distribution test.")] = 0.001,
    transformers: Annotated[bool, typer.Option("--transformers", help="Compare with Transformers' generate.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Count a tie as a failure.")] = False,
    server: ServerUrl = None,
    reference_server: OffUrl = None,
    on: On = "{}",
    off: Off = "{}",
    served_model: Served = None,
    as_json: AsJson = False,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML to this file.")] = None,
    dtype: Dtype = None,
    device: Device = None,
    bitwise: Bitwise = None,
    compile: Compile = None,
    quantize: Quantize = None,
    quantize_draft: QuantizeDraft = None,
    adapter: Adapter = None,
    tensor_parallel: TensorParallel = None,
) -> None:
    """Check that speculation does not change the answers. Exit code 0: no check failed; 1: something differs."""
    if find_spec("scipy") is None:
        raise OutpaceError("the test of the sampled distribution needs scipy: pip install 'outpace[verify]'")
    given = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed, **pairs(settings)}
    checks.sampling_setting(given, vars(Sampling()))
    sampling = Sampling(**given)
    loading = Loading(dtype, device, bitwise, compile, quantize, quantize_draft, adapter, tensor_parallel)
    checks.writable(junit, "the JUnit file")
    if server is not None and (draft or quantize_draft):
        raise UsageError("--draft and --quantize-draft do not work with --server: a server has its own draft model")
    if server is None or model is not None:
        loading.check(model or DEFAULT_MODEL, draft)
    for spec in method or ["plain"]:
        checks.method(spec, draft is not None)
        checks.request({"policy": policy, "verifier": verifier}, False)
    plan = {"max_tokens": max_tokens, "sampling": sampling, "samples": samples, "contexts": contexts, "alpha": alpha}
    shared = {"policy": policy, "verifier": verifier}
    found = tasks.load(prompts, limit=limit)
    from outpace.verify import present
    from outpace.verify.records import Report
    from outpace.verify.suite import subjects_of

    if server is not None:
        urls = Urls(server, reference_server, _fields(on), _fields(off), served_model)
        asked = _of_server(urls, load_model(model, loading) if model else None, found, plan)
    else:
        lm, drafting = load_model(model or DEFAULT_MODEL, loading), load_draft(draft, loading)
        subjects = subjects_of(method, lm, drafting, shared)
        asked = _of_model(lm, subjects, found, plan | {"batches": tuple(batch)}, transformers)
    stated = {k: v for k, v in plan.items() if k != "sampling"} | shared | vars(sampling) | loading._asdict()
    answers: list[Check] = []
    with suppress(KeyboardInterrupt):  # the checks that are done are reported
        answers.extend(_answers(asked))
    report = Report(server or model or DEFAULT_MODEL, stated, answers, len(answers) == len(asked))
    if junit is not None:
        present.write_junit(report, junit)
    if as_json:
        typer.echo(present.to_json(report))
    else:
        Console().print(present.table(report))
    if not report.complete:
        stderr.print(f"interrupted after {len(answers)} of {len(asked)} checks")
        raise typer.Exit(INTERRUPTED)
    if report.failed or (strict and any(check.verdict == "tie" for check in report.checks)):
        raise typer.Exit(1)


@dataclass(frozen=True)
class Urls:
    """A server with speculation, and how to reach it without."""

    on: str
    off: str | None
    on_fields: dict[str, Any]
    off_fields: dict[str, Any]
    model: str | None


def _of_server(urls: Urls, local: Model | None, prompts: list[Prompt], plan: dict[str, Any]) -> list[PlannedCheck]:
    from outpace.verify.servers.answers import ServerPlan
    from outpace.verify.servers.client import Server
    from outpace.verify.servers.suite import server_checks

    on = Server(urls.on, urls.model, extra=urls.on_fields)
    off = None
    if urls.off is not None or urls.off_fields:
        off = Server(urls.off or urls.on, urls.model, extra=urls.off_fields)
    return server_checks(on, off, local, ServerPlan([prompt.turns[0] for prompt in prompts], **plan))


def _of_model(
    lm: Model, subjects: list[Subject], prompts: list[Prompt], plan: dict[str, Any], hf: bool
) -> list[PlannedCheck]:
    from outpace.verify.plan import VerifyPlan
    from outpace.verify.suite import planned_checks

    answers = {i: prompt.answer for i, prompt in enumerate(prompts) if prompt.answer is not None}
    encoded = [tasks.encode(prompt, lm) for prompt in prompts]
    return planned_checks(VerifyPlan(lm, encoded, answers=answers, **plan), subjects, hf)


def _answers(asked: list[PlannedCheck]) -> Iterator[Check]:
    """Run the checks with a progress bar that names the current one."""
    from outpace.verify.suite import run_checks

    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=stderr, transient=True) as progress:
        bar = progress.add_task("", total=len(asked))
        checks = run_checks(asked)
        for planned in asked:
            progress.update(bar, description=f"{planned.subject}: {planned.name}")
            yield next(checks)
            progress.advance(bar)


def _fields(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{text!r} is not a JSON object")
    return found
