"""outpace head: what a trained head is, ours or published, and ours in the layout that vLLM and SGLang serve."""

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
heads = typer.Typer(no_args_is_help=True, help="Look at trained heads, and export them.")
app.add_typer(heads, name="head")

Folder = Annotated[Path, typer.Argument(help="Folder of the head, ours or published, or of a model with MTP layers.")]


@heads.command()
@reports_errors
def show(folder: Folder, as_json: AsJson = False) -> None:
    """Say what the head in a folder is, and for which model it was made."""
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
    output: Annotated[Path, typer.Option(help="The folder to write, which must not exist yet.")],
    model: ModelName,
    to: Annotated[str, typer.Option(help="The layout: speculators (vLLM), or eagle (SGLang, vLLM).")] = "speculators",
    name: Annotated[str | None, typer.Option(help="What others call the model, if not as --model.")] = None,
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Write a head so that vLLM and SGLang can serve it with its model."""
    if to not in LAYOUTS:
        raise unknown("layout", to, LAYOUTS)
    checks.folder(folder)
    loading = Loading(dtype, device, compile=False)
    loading.check(model)
    from outpace.heads import store
    from outpace.heads.formats.export import export as write

    lm = load_model(model, loading).lm
    write(store.load(folder, lm), output, lm, name or model, to)
    stderr.print(str(output), soft_wrap=True, highlight=False)


@heads.command()
@reports_errors
def compress(
    folder: Annotated[Path, typer.Argument(help="Folder of a head that was trained here.")],
    output: Annotated[Path, typer.Option(help="The folder to write.")],
) -> None:
    """Write a head with its matrices in int8: half as large, with nearly the same guesses."""
    checks.folder(folder)
    from outpace.heads import store

    store.compress(folder, output)
    sizes = [(place / store.WEIGHTS).stat().st_size / 1e6 for place in (folder, output)]
    stderr.print(f"{output}: {sizes[0]:.1f} MB became {sizes[1]:.1f} MB", soft_wrap=True, highlight=False)


def _spelled(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
