"""outpace generate and outpace chat: stream answers to the terminal."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from outpace.cli import checks, display
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
    state_memory,
    tracing,
)
from outpace.cli.flags import (
    Adapter,
    Bitwise,
    Compile,
    Device,
    Draft,
    Dtype,
    MaxTokens,
    Method,
    ModelName,
    Options,
    PolicyName,
    Quantize,
    QuantizeDraft,
    Seed,
    Settings,
    Temperature,
    TensorParallel,
    TopK,
    TopP,
    TracePath,
    TraceProbs,
    VerifierName,
)
from outpace.errors import OutpaceError, UsageError
from outpace.models.tensor_parallel import torchrun


@app.command()
@reports_errors
@shares_model
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    model: ModelName = DEFAULT_MODEL,
    method: Method = "auto",
    draft: Draft = None,
    option: Options = [],  # noqa: B006
    policy: PolicyName = None,
    verifier: VerifierName = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = 0,
    settings: Settings = [],  # noqa: B006
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the model's chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of live text.")] = False,
    trace: TracePath = None,
    trace_probs: TraceProbs = False,
    dtype: Dtype = None,
    device: Device = None,
    bitwise: Bitwise = None,
    compile: Compile = None,
    quantize: Quantize = None,
    quantize_draft: QuantizeDraft = None,
    adapter: Adapter = None,
    tensor_parallel: TensorParallel = None,
) -> None:
    """Answer one prompt; accepted draft tokens are green."""
    text = sys.stdin.read() if prompt == "-" and not torchrun.rank() else prompt
    if not text.strip():
        raise UsageError("the prompt is empty")
    loading = Loading(dtype, device, bitwise, compile, quantize, quantize_draft, adapter, tensor_parallel)
    given = {
        "method": method, "policy": policy, "verifier": verifier, "max_tokens": max_tokens,
        "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed, **pairs(settings), **pairs(option),
    }  # fmt: skip
    loading.check(model, draft)
    checks.request(given, draft is not None)
    checks.writable(trace, "the trace")
    lm, drafting = load_model(model, loading), load_draft(draft, loading)
    chat = not raw and getattr(lm.tokenizer, "chat_template", None)
    given |= {"draft": drafting} if drafting else {}
    state_memory(lm, max_tokens)
    with tracing(trace, lm, trace_probs) as writer:
        pieces = lm.stream([{"role": "user", "content": text}] if chat else text, trace=writer, **given)
        done = display.silently(pieces) if as_json else display.live(pieces)
    if as_json:
        typer.echo(json.dumps(display.to_json(done), ensure_ascii=False))
    if done.error is not None:
        raise OutpaceError(done.error)
    if done.finish_reason == "cancelled":
        raise typer.Exit(INTERRUPTED)


@app.command()
@reports_errors
@shares_model
def chat(
    model: Annotated[str, typer.Argument(help="Demo model, folder, Hugging Face id or GGUF file.")] = DEFAULT_MODEL,
    method: Method = "auto",
    draft: Draft = None,
    option: Options = [],  # noqa: B006
    policy: PolicyName = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    system: Annotated[str | None, typer.Option(help="System message of the conversation.")] = None,
    trace: TracePath = None,
    dtype: Dtype = None,
    device: Device = None,
    bitwise: Bitwise = None,
    compile: Compile = None,
    quantize: Quantize = None,
    quantize_draft: QuantizeDraft = None,
    adapter: Adapter = None,
    tensor_parallel: TensorParallel = None,
) -> None:
    """Chat with a model; accepted draft tokens are green. Ctrl-C stops an answer, Ctrl-D ends the chat."""
    loading = Loading(dtype, device, bitwise, compile, quantize, quantize_draft, adapter, tensor_parallel)
    given = {
        "method": method, "policy": policy, "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p,
        "seed": seed, **pairs(option),
    }  # fmt: skip
    loading.check(model, draft)
    checks.request(given, draft is not None)
    checks.writable(trace, "the trace")
    lm, drafting = load_model(model, loading), load_draft(draft, loading)
    given |= {"draft": drafting} if drafting else {}
    messages = [{"role": "system", "content": system}] if system else []
    state_memory(lm, max_tokens)
    console = Console()
    console.print(f"[dim]{model}, method {method}; Ctrl-C stops an answer, Ctrl-D ends the chat[/]")
    with tracing(trace, lm) as writer:
        while (said := _asked(console)) is not None:
            if not said.strip():
                continue
            messages.append({"role": "user", "content": said})
            done = display.live(lm.stream(list(messages), trace=writer, **given))
            messages.append({"role": "assistant", "content": done.text})


def _asked(console: Console) -> str | None:
    """Read a line from the user; None at the end of the input."""
    try:
        return console.input("[bold]> [/]")
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None
