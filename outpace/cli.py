"""The command line: outpace generate | chat | methods | shelf."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from outpace import display
from outpace.errors import OutpaceError, UsageError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
stderr = Console(stderr=True)
DEFAULT_MODEL = "smollm2-135m-instruct"
INTERRUPTED = 130
Command = TypeVar("Command", bound=Callable[..., None])

ModelName = Annotated[str, typer.Option("--model", "-m", help="Shelf name, folder or hub id.")]
Method = Annotated[str, typer.Option(help="A method of `outpace methods`, or auto.")]
Draft = Annotated[str | None, typer.Option(help="Draft model: shelf name, folder or hub id.")]
Options = Annotated[list[str], typer.Option("--option", "-o", help="An option of the method, as name=value.")]
PolicyName = Annotated[str, typer.Option("--policy", help="How much to draft: fixed, heuristic, confidence, ...")]
VerifierName = Annotated[str, typer.Option("--verifier", help="match, residual, typical or contrastive.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens that hold this much probability.")]
TopK = Annotated[int, typer.Option(help="Keep this many likeliest tokens; 0 keeps all.")]
Seed = Annotated[int, typer.Option(help="Same seed, same text, with or without speculation.")]
Settings = Annotated[list[str], typer.Option("--set", "-s", help="Any other setting, as name=value (see docs/api.md).")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, ...; default: float32 on a CPU.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")]


def _reports_errors(command: Command) -> Command:
    """Turn an error that a user can act on into one line and an exit code."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except OutpaceError as error:
            # Escaped, or rich would take the extra out of "pip install 'outpace[shelf]'".
            stderr.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
            raise typer.Exit(2 if isinstance(error, UsageError) else 1) from None
        except KeyboardInterrupt:
            stderr.print("interrupted")
            raise typer.Exit(INTERRUPTED) from None

    return run  # type: ignore[return-value]


def _pairs(given: list[str]) -> dict[str, Any]:
    """name=value pairs; a value is JSON where it can be, else text."""
    out: dict[str, Any] = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"{pair!r} is not of the form name=value")
        try:
            out[name.strip()] = json.loads(value)
        except json.JSONDecodeError:
            out[name.strip()] = value
    return out


def _load(name: str, dtype: str | None, device: str | None) -> Any:
    from transformers.utils import logging

    from outpace import shelf
    from outpace.loading import load

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if name in shelf.SHELF:
        shelf.fetch(name)  # shows its own progress, once
    with stderr.status(f"loading {name}"):
        return load(name, dtype=dtype, device=device)


@app.command()
@_reports_errors
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    model: ModelName = DEFAULT_MODEL,
    method: Method = "auto",
    draft: Draft = None,
    option: Options = [],  # noqa: B006
    policy: PolicyName = "fixed",
    verifier: VerifierName = "match",
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = 0,
    settings: Settings = [],  # noqa: B006
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the model's chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of live text.")] = False,
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Answer one prompt; text that came from accepted guesses is green."""
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise UsageError("the prompt is empty")
    lm = _load(model, dtype, device)
    chat = not raw and lm.tokenizer.chat_template
    given = {
        "method": method, "policy": policy, "verifier": verifier, "max_tokens": max_tokens,
        "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed,
        **({"draft": _load(draft, dtype, device)} if draft else {}), **_pairs(settings), **_pairs(option),
    }  # fmt: skip
    pieces = lm.stream([{"role": "user", "content": text}] if chat else text, **given)
    done = display.silently(pieces) if as_json else display.live(pieces)
    if as_json:
        typer.echo(json.dumps(display.to_json(done), ensure_ascii=False))
    if done.error is not None:
        raise OutpaceError(done.error)
    if done.finish_reason == "cancelled":
        raise typer.Exit(INTERRUPTED)


@app.command()
@_reports_errors
def chat(
    model: Annotated[str, typer.Argument(help="Shelf name, folder or hub id.")] = DEFAULT_MODEL,
    method: Method = "auto",
    draft: Draft = None,
    option: Options = [],  # noqa: B006
    policy: PolicyName = "fixed",
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Talk to a model; text that came from accepted guesses is green. Ctrl-C stops an answer, Ctrl-D ends."""
    lm = _load(model, dtype, device)
    given = {
        "method": method, "policy": policy, "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p,
        "seed": seed, **({"draft": _load(draft, dtype, device)} if draft else {}), **_pairs(option),
    }  # fmt: skip
    messages = [{"role": "system", "content": system}] if system else []
    console = Console()
    console.print(f"[dim]{model}, method {method}; Ctrl-C stops an answer, Ctrl-D ends[/]")
    while True:
        try:
            said = console.input("[bold]> [/]")
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if not said.strip():
            continue
        messages.append({"role": "user", "content": said})
        done = display.live(lm.stream(list(messages), **given))
        messages.append({"role": "assistant", "content": done.text})


@app.command()
@_reports_errors
def methods(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the methods as a Markdown table.")] = False,
) -> None:
    """List the methods, policies and verifiers with their options."""
    if as_json:
        typer.echo(json.dumps(display.catalogue(), indent=2))
    elif markdown:
        typer.echo(display.methods_markdown())
    else:
        Console().print(*display.catalogue_tables())


@app.command()
@_reports_errors
def shelf(
    name: Annotated[str | None, typer.Argument(help="Fetch this one now; without a name, list all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Demo weights by name: download, check the hash, convert, once."""
    from outpace import shelf as weights

    if name is not None:
        folder = weights.fetch(name)
        typer.echo(json.dumps({"name": name, "folder": str(folder)}) if as_json else str(folder))
    elif as_json:
        typer.echo(json.dumps(display.shelf_rows(), indent=2))
    else:
        Console().print(display.shelf_table())


def main() -> None:
    app()
