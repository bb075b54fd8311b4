"""Output of the command line: live text with accepted draft tokens in green, a line of statistics, and tables."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outpace.registry.catalogue import KINDS, entries

if TYPE_CHECKING:
    from outpace.api.stream import Completion, Stream

ACCEPTED_STYLE = "green"


def live(stream: Stream) -> Completion:
    """Print the text as it comes, then one line of statistics; Ctrl-C keeps the text so far."""
    console = Console(highlight=False)
    start = time.perf_counter()
    try:
        for piece in stream:
            for run, drafted in piece.spans:
                console.print(Text(run, style=ACCEPTED_STYLE if drafted else ""), end="", soft_wrap=True)
    except KeyboardInterrupt:
        stream.close()
    done = stream.completions[0]
    console.print()
    console.print(Text(statistics(done, time.perf_counter() - start), style="dim"))
    return done


def silently(stream: Stream) -> Completion:
    """Run to the end without output."""
    for _ in stream:
        pass
    return stream.completions[0]


def statistics(done: Completion, seconds: float) -> str:
    stats = done.stats
    kind = "lossless" if done.lossless else "LOSSY"
    return (
        f"{stats.tokens} tokens in {seconds:.2f} s ({stats.tokens / seconds:.1f}/s) · {stats.passes} passes, "
        f"{stats.tokens_per_pass:.2f} tokens per pass · {stats.accepted} of {stats.drafted} draft tokens accepted · "
        f"{done.method}, {kind} · {done.finish_reason}"
    )


def to_json(done: Completion) -> dict[str, Any]:
    return dataclasses.asdict(done) | {"stats": done.stats.to_dict()}


def catalogue() -> dict[str, dict[str, dict[str, Any]]]:
    """Describe each method, policy and verifier: its purpose, whether it is lossless, and its options with defaults."""
    return {
        plural: {name: dataclasses.asdict(entry) for name, entry in entries(kind).items()}
        for plural, kind in KINDS.items()
    }


def _kept(entry: dict[str, Any], no: str) -> str:
    """Whether a method is lossless, and which options would make a lossy one lossless."""
    if entry["lossless"]:
        return "yes"
    given = ", ".join(f"{name}={value}" for name, value in entry["lossless_if"].items())
    return f"{no}; yes with {given}" if given else no


def catalogue_tables() -> list[Table]:
    tables = []
    for kind, known in catalogue().items():
        table = Table("name", "lossless", "what it does", "options", title=kind, title_justify="left", expand=True)
        for name, entry in known.items():
            options = ", ".join(f"{k}={v}" for k, v in entry["options"].items())
            table.add_row(name, _kept(entry, "[red]no[/]"), entry["about"], options)
        tables.append(table)
    return tables


def methods_markdown(options: bool = True) -> str:
    """Return the methods as a Markdown table, for the documentation."""
    head = ["method", "what it does", "lossless", "options"][: None if options else 3]
    rows = [head, ["---"] * len(head)]
    for name, entry in catalogue()["methods"].items():
        given = ", ".join(f"`{k}={v}`" for k, v in entry["options"].items()) or "none"
        rows.append([f"`{name}`", entry["about"], _kept(entry, "**no**"), given][: len(head)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows).replace(" --- ", "---")


def shelf_rows() -> list[dict[str, Any]]:
    from outpace.api import demo_weights

    shown = ("package", "sha256", "bytes", "licence", "description")
    return [
        {"name": name, **{key: getattr(entry, key) for key in shown}, "cached": demo_weights.is_cached(name)}
        for name, entry in demo_weights.DEMO_MODELS.items()
    ]


def shelf_table() -> Table:
    table = Table("name", "description", "download", "licence", "downloaded")
    for row in shelf_rows():
        here = "yes" if row["cached"] else "no"
        table.add_row(row["name"], row["description"], f"{row['bytes'] / 1e6:.0f} MB", row["licence"], here)
    return table
