"""Tables of benchmark figures, for the terminal, for Markdown and for the report."""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from outpace.bench.record import BenchRecord
from outpace.bench.specs import PLAIN, TRANSFORMERS
from outpace.bench.summary import Interval, SliceFigures, Summary

NAME = 19  # terminal columns for a name
STYLES = {"good": "green", "bad": "red", "": ""}


@dataclass(frozen=True)
class Cell:
    """A figure; its style is good or bad only if its whole interval is above or below 1, or if answers differ."""

    text: str
    beside: str = ""  # the interval
    style: str = ""


@dataclass(frozen=True)
class TextTable:
    """A table of column headers and rows; the first column is a name."""

    title: str
    headers: list[str]
    rows: list[list[Cell]]


def machine(header: dict[str, Any]) -> str:
    """Describe the model, the machine and the versions in one line."""
    versions, device = header["versions"], header["device"]
    where = f"{header['cpu']}, {header['threads']} threads" if device == "cpu" else device
    shown = ", ".join(f"{name} {number}" for name, number in versions.items())
    model = header["model"] + (f", {header['dtype']}" if header["dtype"] else "")
    return f"{model}; {where}; {shown}; {header['date'][:10]}"


def totals(figures: Seq[SliceFigures], baselines: Seq[str]) -> TextTable:
    """Make a table with one row per contestant."""
    headers = ["", "tokens/s", *(f"x {name}" for name in baselines)]
    headers += ["differ from plain", "tokens per pass", "accepted", "draft time", "peak GB"]
    return TextTable(figures[0].part.label, headers, [_line(one, baselines) for one in figures])


def _line(figures: SliceFigures, baselines: Seq[str]) -> list[Cell]:
    ratios = [_ratio(figures.speedups.get(base), base == figures.contestant) for base in baselines]
    differ = f"{len(figures.divergences)} of {figures.compared}" if figures.compared else "not compared"
    return [
        Cell(figures.contestant),
        Cell(f"{figures.tokens_per_second:.1f}"),
        *ratios,
        Cell(differ, style="bad" if figures.divergences else ""),
        Cell("" if figures.tokens_per_pass is None else f"{figures.tokens_per_pass:.2f}"),
        Cell(f"{figures.accepted / figures.drafted:.0%}" if figures.accepted is not None and figures.drafted else ""),
        Cell(f"{figures.draft_share:.0%}" if figures.draft_share is not None and figures.drafted else ""),
        Cell("" if figures.memory is None else f"{figures.memory / 1e9:.2f}"),
    ]


def _ratio(found: Interval | None, itself: bool = False) -> Cell:
    if found is None:
        return Cell("")
    if found.low is None or found.high is None or itself:
        return Cell(f"{found.value:.2f}")
    style = "good" if found.low > 1 else "bad" if found.high < 1 else ""
    return Cell(f"{found.value:.2f}", f"{found.low:.2f}-{found.high:.2f}", style)


def by_part(summary: Summary) -> TextTable:
    """Make a table of the speed-up over plain decoding, for every contestant in every slice."""
    others = [name for name in summary.contestants if name != PLAIN]
    rows = []
    for part in [*summary.parts, summary.total]:
        found = {figures.contestant: figures for figures in part}
        speed = f"{found[PLAIN].tokens_per_second:.1f}" if PLAIN in found else ""
        cells = [_ratio(found[name].speedups.get(PLAIN)) if name in found else Cell("") for name in others]
        rows.append([Cell(part[0].part.label), Cell(speed), *cells])
    return TextTable("x plain, by task", ["", "plain, tokens/s", *others], rows)


def notes(record: BenchRecord, summary: Summary) -> list[str]:
    """List the contestants that did not take part, and the answers that differ."""
    found = [f"{name} was left out: {why}" for name, why in record.left_out.items()]
    for figures in summary.total:
        for one in figures.divergences:
            where = f"batch {one.batch}, temperature {one.temperature:g}"
            found.append(f"{figures.contestant}: {one.prompt} ({where}) differs from plain at token {one.position}")
    return found


def to_rich(table: TextTable, width: int) -> RichTable:
    """Render for a terminal of this width: if there is no room, drop the intervals, then the last columns."""
    beside = sum(_widths(table, beside=True)) <= width
    ends = list(accumulate(_widths(table, beside)))
    shown = RichTable(
        title=table.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1)
    )
    count = max(2, sum(end <= width for end in ends))
    for index, header in enumerate(table.headers[:count]):
        shown.add_column(_broken(header), justify="right" if index else "left", overflow="fold", no_wrap=index > 0)
    for row in table.rows:
        shown.add_row(*(_rich(cell, beside) for cell in row[:count]))
    return shown


def _widths(table: TextTable, beside: bool) -> list[int]:
    """Return the terminal columns that each column of the table needs; a name may wrap."""
    found = [NAME]
    for index, header in enumerate(table.headers[1:], start=1):
        cells = [row[index] for row in table.rows]
        texts = [cell.text for cell in cells] + [cell.beside for cell in cells if beside] + _broken(header).split("\n")
        found.append(max(map(len, texts)) + 2)
    return found


def _broken(header: str) -> str:
    """Put one word on each line, without the name Transformers: the rest tells which of its loops a ratio is over."""
    short = re.sub(f"^x {TRANSFORMERS} ", "x ", header)
    return re.sub(r"[ :,]+", lambda found: found.group().strip() + "\n", short)


def _rich(cell: Cell, beside: bool) -> Text:
    below = Text(f"\n{cell.beside}", style="dim") if cell.beside and beside else Text("")
    return Text(cell.text, style=STYLES[cell.style]) + below


def to_markdown(table: TextTable) -> str:
    lines = [table.headers, ["---"] * len(table.headers)]
    lines += [[f"{cell.text} ({cell.beside})" if cell.beside else cell.text for cell in row] for row in table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def markdown(record: BenchRecord, summary: Summary) -> str:
    """Return the command, the machine, the tables and the notes as Markdown."""
    parts = [
        f"`{record.header['command']}`",
        machine(record.header),
        to_markdown(totals(summary.total, summary.baselines)),
        "Speed-up over plain decoding, by task (with 95 % intervals):",
        to_markdown(by_part(summary)),
    ]
    return "\n\n".join(parts + [f"- {note}" for note in notes(record, summary)])
