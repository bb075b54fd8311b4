"""outpace serve: serve a model over HTTP, with OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli import checks
from outpace.cli.common import DEFAULT_MODEL, Loading, app, pairs, reports_errors, shares_model, stderr
from outpace.cli.flags import (
    Adapter,
    Bitwise,
    Compile,
    Device,
    Draft,
    Dtype,
    Method,
    Options,
    PolicyName,
    Quantize,
    QuantizeDraft,
    Settings,
    TensorParallel,
)
from outpace.cli.serving.model import ModelToServe
from outpace.errors import OutpaceError, UsageError

if TYPE_CHECKING:
    from outpace.serve.settings import ServeSettings

LOCAL, PORT = "127.0.0.1", 8000
Names = Annotated[
    list[str], typer.Option("--served-model-name", help="Name of the model in requests; repeatable. Default: MODEL.")
]
Host = Annotated[str, typer.Option(help="Address to listen on; others than loopback need API keys.")]
Port = Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")]
Keys = Annotated[
    Path | None,
    typer.Option("--api-keys", help="File with one KEY or NAME KEY a line; default: OUTPACE_API_KEYS, in that form."),
]
OpenWithoutKeys = Annotated[bool, typer.Option("--open-without-keys", help="Serve other machines without API keys.")]
ShareBetweenKeys = Annotated[
    bool, typer.Option("--share-between-keys", help="Let all keys share cached prefixes and remembered text.")
]
AllowedHosts = Annotated[
    list[str], typer.Option("--allowed-host", help="Host name in requests, besides loopback; * allows all. Repeatable.")
]
Origins = Annotated[
    list[str], typer.Option("--cors-origin", help="Origin of web pages that may call the server; repeatable.")
]
MaxBatch = Annotated[int | None, typer.Option(help="Requests that run at a time; default: what suits the model.")]
MaxWaiting = Annotated[int, typer.Option(help="Requests that may wait; further ones are refused with status 429.")]
MaxAnswer = Annotated[int | None, typer.Option("--max-tokens", help="Most tokens of an answer.")]
Seconds = Annotated[float, typer.Option("--timeout", help="Most seconds that a request may take.")]
Drain = Annotated[float, typer.Option("--drain-seconds", help="Seconds for running requests after SIGTERM.")]
ToolFormatName = Annotated[
    str | None, typer.Option("--tool-format", help="How the model writes tool calls; default: as its template shows.")
]
NoPlayground = Annotated[bool, typer.Option("--no-playground", help="Serve the APIs without the page at /.")]
LogPrompts = Annotated[bool, typer.Option("--log-prompts", help="Write prompts and answers to the log and to spans.")]
OtlpEndpoint = Annotated[
    str | None, typer.Option(help="URL of an OpenTelemetry collector (OTLP over HTTP); it gets a span of each request.")
]
OnRay = Annotated[bool, typer.Option("--ray", help="Answer with replicas in a Ray cluster; see RAY_ADDRESS.")]
Replicas = Annotated[
    str | None, typer.Option(help="With --ray: how many replicas, as 2, or as 1-4: more when many requests wait.")
]
ReplicaCpus = Annotated[float | None, typer.Option(min=0, help="With --ray: cores of each replica; default: 1.")]


@app.command()
@reports_errors
@shares_model
def serve(
    model: Annotated[str, typer.Argument(help="Demo model, folder, Hugging Face id or GGUF file.")] = DEFAULT_MODEL,
    host: Host = LOCAL,
    port: Port = PORT,
    served_model_name: Names = [],  # noqa: B006
    api_keys: Keys = None,
    open_without_keys: OpenWithoutKeys = False,
    share_between_keys: ShareBetweenKeys = False,
    allowed_host: AllowedHosts = [],  # noqa: B006
    cors_origin: Origins = [],  # noqa: B006
    method: Method = "auto",
    draft: Draft = None,
    option: Options = [],  # noqa: B006
    policy: PolicyName = None,
    settings: Settings = [],  # noqa: B006
    max_batch: MaxBatch = None,
    max_waiting: MaxWaiting = 256,
    max_tokens: MaxAnswer = None,
    timeout: Seconds = 600.0,
    drain_seconds: Drain = 30.0,
    tool_format: ToolFormatName = None,
    no_playground: NoPlayground = False,
    log_prompts: LogPrompts = False,
    otlp_endpoint: OtlpEndpoint = None,
    on_ray: OnRay = False,
    replicas: Replicas = None,
    replica_cpus: ReplicaCpus = None,
    dtype: Dtype = None,
    device: Device = None,
    bitwise: Bitwise = None,
    compile: Compile = None,
    quantize: Quantize = None,
    quantize_draft: QuantizeDraft = None,
    adapter: Adapter = None,
    tensor_parallel: TensorParallel = None,
) -> None:
    """Serve a model over HTTP: OpenAI's chat, completions and responses, and Anthropic's messages."""
    if otlp_endpoint is not None:
        _check_collector(otlp_endpoint)
    from outpace.serve.settings import ServeLimits
    from outpace.serve.web import keys

    given: dict[str, Any] = {
        "names": tuple(served_model_name) or (model,), "root": model, "host": host, "port": port,
        "keys": keys.load(api_keys), "open_without_keys": open_without_keys, "allowed_hosts": tuple(allowed_host),
        "cors_origins": tuple(cors_origin), "method": method, "options": pairs(option), "policy": policy,
        "sampling": pairs(settings), "share_between_keys": share_between_keys, "tool_format": tool_format,
        "playground": not no_playground, "log_prompts": log_prompts, "otlp_endpoint": otlp_endpoint,
        "drain_seconds": drain_seconds,
        "limits": ServeLimits(seconds=timeout, waiting=max_waiting, max_tokens=max_tokens),
    }  # fmt: skip
    loading = Loading(dtype, device, bitwise, compile, quantize, quantize_draft, adapter, tensor_parallel)
    served = ModelToServe(model, draft, loading, max_batch, given)
    if on_ray:
        run = _on_ray(served, replicas or "1", replica_cpus)
    elif replicas is not None or replica_cpus is not None:
        raise UsageError("--replicas and --replica-cpus need --ray")
    else:
        run = _here(served)
    run()


def _here(served: ModelToServe) -> Callable[[], None]:
    """Load the model, and return what serves it in this process."""
    from outpace.serve.telemetry.log_lines import write_to_stderr

    write_to_stderr()
    lm, serving = served.load()
    from outpace.serve.launch import serve as run

    return partial(run, lm, serving, partial(_tell, serving))


def _on_ray(served: ModelToServe, replicas: str, cpus: float | None) -> Callable[[], None]:
    """Return what serves replicas of the model, which load it where they run."""
    checks.extra("ray", "--ray")
    counts = re.fullmatch(r"([1-9]\d*)(?:-([1-9]\d*))?", replicas)
    if counts is None or int(counts[2] or counts[1]) < int(counts[1]):
        raise UsageError(f"--replicas {replicas} is neither a number, as 2, nor a range, as 1-4")
    from outpace.serve.replicas.on_ray import RayPool, ReplicaPlan, serve as run
    from outpace.serve.settings import ServeSettings

    ongoing = served.max_batch or ReplicaPlan.ongoing
    plan = ReplicaPlan(int(counts[1]), int(counts[2] or counts[1]), ongoing, cpus or ReplicaPlan.cpus)
    settings = ServeSettings(**served.given)
    with stderr.status(f"starting {replicas} replicas"):
        pool = RayPool(served.load, settings, plan)
    return partial(run, pool, settings, partial(_tell, settings))


def _tell(settings: ServeSettings, port: int) -> None:
    if not stderr.is_terminal:
        return  # whoever reads the log expects JSON
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"http://{host}:{port}/"
    page = f", playground on {address}" if settings.playground else ""
    told = f"serving {settings.names[0]} on {address}v1{page}, method {settings.method}; Ctrl-C stops"
    stderr.print(f"[dim]{told}[/]", highlight=False, soft_wrap=True)


def _check_collector(url: str) -> None:
    for package in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        if not _is_there(package):
            raise OutpaceError("--otlp-endpoint needs OpenTelemetry: pip install 'outpace[otel]'")
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--otlp-endpoint {url} is no URL, such as http://localhost:4318")


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # a package above it is missing
        return False
