"""outpace show: display a trace."""

from __future__ import annotations

import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from outpace.cli import checks
from outpace.cli.common import app, reports_errors
from outpace.errors import UsageError

if TYPE_CHECKING:
    from outpace.tracing.trace import Trace


@app.command()
@reports_errors
def show(
    trace: Annotated[Path, typer.Argument(help="File written by --trace.")],
    output: Annotated[Path | None, typer.Option(help="File for the page; default: beside the trace.")] = None,
    in_terminal: Annotated[
        bool, typer.Option("--terminal", help="Print to the terminal instead of an HTML page.")
    ] = False,
    request: Annotated[int | None, typer.Option(help="Show only this request; needs --terminal.")] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Write the page without opening a browser.")] = False,
) -> None:
    """Show which draft tokens a trace has and why each was accepted or rejected, as an HTML page or in the terminal."""
    if request is not None and not in_terminal:
        raise UsageError("--request needs --terminal; in the page you can choose a request")
    checks.readable(trace)
    checks.writable(output, "the page")
    from outpace.tracing.trace import read
    from outpace.tracing.viewer import page, terminal

    found = read(trace)
    if in_terminal:
        _check(found, request)
        Console().print(terminal.render(page.describe(found), request))
        return
    target = trace.with_suffix(".html") if output is None else output
    if target.resolve() == trace.resolve():
        raise UsageError(f"the page would overwrite the trace {str(trace)!r}: name another file with --output")
    page.write(found, target)
    typer.echo(str(target))
    if not no_open:
        with suppress(webbrowser.Error):  # without a browser, the printed path is enough
            webbrowser.open(target.resolve().as_uri())


def _check(trace: Trace, request: int | None) -> None:
    count = len(trace.requests)
    if request is not None and not 0 <= request < count:
        raise UsageError(f"no request {request}: the trace has {count}, numbered from 0")
