"""outpace calibrate: fit settings of `graft` and `via_sd` to traces, as a file for their option `calibration`."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from outpace.cli import checks
from outpace.cli.common import Loading, app, load_model, reports_errors, stderr
from outpace.cli.flags import AsJson, Device, Dtype
from outpace.drafting import tuning_file
from outpace.errors import UsageError

if TYPE_CHECKING:
    from outpace.advise.tune_graft import Calibration
    from outpace.drafting.slim_search import LayerChoice
    from outpace.tracing.trace import Trace

TEXTS, LENGTH = 8, 128  # of a search for layers: number of texts, and tokens of each


@app.command()
@reports_errors
def calibrate(
    traces: Annotated[list[Path], typer.Argument(help="Files of --trace, from the method to wrap and from recycling.")],
    output: Annotated[Path, typer.Option(help="The file to write.")],
    nodes: Annotated[int, typer.Option(help="Nodes of graft's draft trees.")] = 60,
    level_cost: Annotated[
        float | None, typer.Option(help="Cost of one draft level in target passes; default: from the traces.")
    ] = None,
    layers_of: Annotated[
        str | None, typer.Option(help="Also search the layers of this model for via_sd, on the texts of the traces.")
    ] = None,
    skip: Annotated[float, typer.Option(help="Share of the layers that via_sd skips.")] = 0.45,
    steps: Annotated[int, typer.Option(min=1, help="Number of layer choices to try.")] = 200,
    as_json: AsJson = False,
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Fit graft's gates and template, and via_sd's layers, to traces. Use it as --method graft -o calibration=FILE."""
    loading = Loading(dtype, device, compile=False)
    if layers_of is not None:
        loading.check(layers_of)
    for path in traces:
        checks.readable(path)
    checks.writable(output, "the calibration")
    from outpace.advise.tune_graft import calibrate as fit
    from outpace.tracing.trace import read

    found = [read(path) for path in traces]
    sections: dict[str, dict[str, Any]] = {}
    shown: list[Table] = []
    try:
        fitted = fit(found, nodes, level_cost)
        sections["graft"] = fitted.grafting.to_dict() | _beside(fitted)
        shown += _graft_tables(fitted)
    except UsageError as error:
        if layers_of is None:
            raise
        stderr.print(f"[yellow]no calibration for graft:[/] {error}", highlight=False, soft_wrap=True)
    if layers_of is not None:
        sections["via_sd"], table = _layers(layers_of, found, (skip, steps), loading)
        shown.append(table)
    sources = {"traces": [str(path) for path in traces], "models": sorted({t.header["model"] for t in found})}
    tuning_file.write(output, sections | {"made": sources})
    if as_json:
        typer.echo(json.dumps(sections))
    else:
        Console().print(*shown)
        stderr.print(str(output), soft_wrap=True, highlight=False)


def _beside(fitted: Calibration) -> dict[str, Any]:
    """The figures of the fit, to store beside it."""
    return {name: value for name, value in asdict(fitted).items() if name != "grafting"}


def _graft_tables(fitted: Calibration) -> list[Table]:
    gates = Table("stop at depth", "if the best path's probability is at most", "draft keeps", "passes stopped")
    gates.title, gates.title_justify = f"graft: gates, from {fitted.passes} passes", "left"
    gates.caption = (
        f"{fitted.tokens[0]:.2f} tokens per pass without gates, {fitted.tokens[1]:.2f} with; {fitted.speedup:.2f} "
        f"times as fast if a draft level costs {fitted.level:.3f} target passes (predicted)"
    )
    for gate, share in zip(fitted.grafting.gates, fitted.stops, strict=True):
        kept = f"{round(gate.keep * fitted.nodes)} of {fitted.nodes} nodes"
        gates.add_row(str(gate.depth), f"{gate.floor:.3f}", kept, f"{share:.0%}")
    if not fitted.grafting.gates:
        gates.add_row("never", "", f"{fitted.nodes} of {fitted.nodes} nodes", "0%")
    ranks = Table("depth", "nodes", "probability of each rank")
    source = (
        f"from {fitted.table_passes} passes of recycling"
        if fitted.table_passes
        else "the initial one: no trace of recycling"
    )
    ranks.title, ranks.title_justify = f"graft: template of {fitted.nodes} nodes, {source}", "left"
    for depth, level in enumerate(fitted.grafting.ranks):
        count = fitted.template[depth] if depth < len(fitted.template) else 0
        ranks.add_row(str(depth + 1), str(count), " ".join(f"{share:.2f}" for share in level))
    return [gates, ranks]


def _layers(name: str, traces: Seq[Trace], wanted: tuple[float, int], loading: Loading) -> tuple[dict[str, Any], Table]:
    from outpace.core.lm import layers_of
    from outpace.drafting.slim_search import search

    texts = {tuple((request.prompt + request.tokens)[-LENGTH:]) for trace in traces for request in trace.requests}
    lm = load_model(name, loading).lm
    model = layers_of(lm)
    wrong = [token for text in texts for token in text if token >= lm.vocab]
    if wrong:
        raise UsageError(
            f"token {wrong[0]} of the traces is not in the vocabulary of {name!r}: use traces of that model"
        )
    with stderr.status(f"searching the layers of {name}"):
        found = search(model, [list(text) for text in sorted(texts)[:TEXTS]], wanted[0], steps=wanted[1])
    return asdict(found), _layers_table(found, model.count)


def _layers_table(found: LayerChoice, count: int) -> Table:
    table = Table("layers kept", "of", "cost", "cost if skipped evenly", "same top token", "choices tried")
    table.title, table.title_justify = "via_sd: layers of the slim verifier", "left"
    table.add_row(
        " ".join(map(str, found.layers)), str(count), f"{found.cost:.3f}", f"{found.even:.3f}",
        f"{found.agreement:.0%}", str(found.tried),
    )  # fmt: skip
    return table
