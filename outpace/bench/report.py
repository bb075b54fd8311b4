"""The benchmark report: one self-contained HTML file."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from outpace.bench import plots, tables
from outpace.bench.record import BenchRecord
from outpace.bench.summary import Summary
from outpace.errors import OutpaceError


def write(record: BenchRecord, summary: Summary, path: Path) -> None:
    try:
        path.write_text(render(record, summary), encoding="utf-8")
    except OSError as error:
        raise OutpaceError(f"cannot write the report: {error}") from error


def render(record: BenchRecord, summary: Summary) -> str:
    from jinja2 import Environment
    from markupsafe import Markup

    drawn = {
        "Speed-up over plain decoding": plots.speedups(summary),
        "Tokens per second, in total": plots.rates(summary),
        "Acceptance by depth": plots.acceptance(summary),
        "Speed-up against batch size": plots.sweep(summary, "batch"),
        "Speed-up against context": plots.sweep(summary, "context"),
        "Speed-up against temperature": plots.sweep(summary, "temperature"),
    }
    template = (resources.files("outpace.bench") / "report.html").read_text(encoding="utf-8")
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(template)
    return page.render(
        header=record.header,
        machine=tables.machine(record.header),
        total=tables.totals(summary.total, summary.baselines),
        by_part=tables.by_part(summary),
        parts=[tables.totals(part, summary.baselines) for part in summary.parts],
        notes=tables.notes(record, summary),
        plots={title: Markup(svg) for title, svg in drawn.items() if svg is not None},
        rounds=1 + max(run.round for run in record.runs),
        groups=len({run.group for run in record.runs}),
    )
