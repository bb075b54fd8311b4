"""outpace head: describe a trained head, ours or published, compress it, or export it for vLLM and SGLang."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from outpace.cli import checks
from outpace.cli.common import Loading, app, load_model, reports_errors, stderr
from outpace.cli.flags import AsJson, Device, Dtype, ModelName
from outpace.errors import unknown

LAYOUTS = ("speculators", "eagle")
heads = typer.Typer(no_args_is_help=True, help="Describe, compress and export trained heads.")
app.add_typer(heads, name="head")

Folder = Annotated[
    Path, typer.Argument(help="Folder of a head (Outpace's or published), or of a model with MTP layers.")
]


@heads.command()
@reports_errors
def show(folder: Folder, as_json: AsJson = False) -> None:
    """Describe the head in a folder, and the model that it belongs to."""
    checks.folder(folder)
    from outpace.heads.describe import describe

    found = describe(folder)
    if as_json:
        typer.echo(json.dumps(found))
        return
    table = Table(show_header=False)
    for name, value in found.items():
        table.add_row(name.replace("_", " "), _spelled(value))
    Console().print(table)


@heads.command()
@reports_errors
def export(
    folder: Folder,
    output: Annotated[Path, typer.Option(help="New folder to write; it must not exist yet.")],
    model: ModelName,
    to: Annotated[str, typer.Option(help="Format: speculators (vLLM), or eagle (SGLang, vLLM).")] = "speculators",
    name: Annotated[str | None, typer.Option(help="Name of the target in the files; default: --model.")] = None,
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Export a head in a format that vLLM or SGLang can serve with its model, and print the command that does."""
    if to not in LAYOUTS:
        raise unknown("format", to, LAYOUTS)
    checks.folder(folder)
    loading = Loading(dtype, device, compile=False)
    loading.check(model)
    from outpace.heads import store
    from outpace.heads.formats import export as formats

    lm = load_model(model, loading).lm
    head = store.load(folder, lm)
    formats.export(head, output, lm, name or model, to)
    stderr.print(str(output), soft_wrap=True, highlight=False)
    for command in formats.serving_commands(output, name or model, head.spec.steps, to):
        typer.echo(command)


@heads.command()
@reports_errors
def compress(
    folder: Annotated[Path, typer.Argument(help="Folder of a head trained with Outpace.")],
    output: Annotated[Path, typer.Option(help="Folder to write.")],
) -> None:
    """Write a copy of a head with int8 matrices: half the size, with nearly the same draft tokens."""
    checks.folder(folder)
    from outpace.heads import store

    store.compress(folder, output)
    sizes = [(place / store.WEIGHTS).stat().st_size / 1e6 for place in (folder, output)]
    stderr.print(f"{output}: compressed from {sizes[0]:.1f} MB to {sizes[1]:.1f} MB", soft_wrap=True, highlight=False)


def _spelled(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
