"""outpace methods and outpace shelf: list the methods and the demo models."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from outpace.cli import display
from outpace.cli.common import app, reports_errors
from outpace.cli.flags import AsJson


@app.command()
@reports_errors
def methods(
    as_json: AsJson = False,
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
@reports_errors
def shelf(
    name: Annotated[str | None, typer.Argument(help="Download this model now; without a name, list all.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the demo models, or download one, check its hash and convert it, once."""
    from outpace.api import demo_weights as weights

    if name is not None:
        folder = weights.fetch(name)
        typer.echo(json.dumps({"name": name, "folder": str(folder)}) if as_json else str(folder))
    elif as_json:
        typer.echo(json.dumps(display.shelf_rows(), indent=2))
    else:
        Console().print(display.shelf_table())
