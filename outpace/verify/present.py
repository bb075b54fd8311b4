"""Output formats of a report: a Rich table, JSON and JUnit XML."""

from __future__ import annotations

import json
import os
from pathlib import Path
from xml.etree import ElementTree as xml

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from outpace.errors import OutpaceError
from outpace.verify.records import Check, Report, Verdict

COLOURS: dict[Verdict, str] = {"pass": "green", "tie": "yellow", "fail": "bold red", "price": "magenta", "skip": "dim"}
SHOWN = 5  # divergences shown per check


def table(report: Report) -> Group:
    """Build the tables of the checks and the divergences, and the line with the verdict."""
    rows = Table("method", "check", "verdict", "result", expand=True)
    for check in report.checks:
        verdict = Text(check.verdict, style=COLOURS[check.verdict])
        rows.add_row(check.subject, check.name, verdict, escape(check.summary))
    return Group(rows, *_divergences(report.checks), verdict_line(report))


def verdict_line(report: Report) -> Text:
    failed = [check for check in report.checks if check.failed]
    if failed:
        names = ", ".join(dict.fromkeys(check.subject for check in failed))
        return Text(f"FAIL: {len(failed)} of {len(report.checks)} checks ({names})", style="bold red")
    if not report.complete:
        return Text(f"INCOMPLETE: interrupted after {len(report.checks)} checks, none failed", style="bold yellow")
    ties = sum(check.verdict == "tie" for check in report.checks)
    explained = f"; {ties} with differences that rounding explains (bitwise=True removes them)" if ties else ""
    return Text(f"PASS: {len(report.checks)} checks{explained}", style="bold green")


def _divergences(checks: list[Check]) -> list[Table]:
    rows = Table("method", "check", "prompt", "token", "expected", "got", "gap", "rounding", "", title="divergences")
    for check in checks:
        for d in check.divergences[:SHOWN]:
            gap = ["" if x is None else f"{x:.3g}" for x in (d.gap, d.rounding)]
            kind = Text("tie", style=COLOURS["tie"]) if d.explained else Text("bug", style=COLOURS["fail"])
            names = [_named(token, text) for token, text in zip((d.expected, d.got), d.texts, strict=True)]
            shown = map(escape, [check.subject, check.name, str(d.prompt), str(d.position), *names, *gap])
            rows.add_row(*shown, kind)
        if len(check.divergences) > SHOWN:
            rows.add_row(check.subject, check.name, "", "", f"and {len(check.divergences) - SHOWN} more")
    return [rows] if rows.row_count else []


def _named(token: int, text: str) -> str:
    """The token id, if known, and the text."""
    return f"{token} {text!r}" if token >= 0 else repr(text)


def to_json(report: Report) -> str:
    return json.dumps(report.to_dict(), ensure_ascii=False, default=str)


def write_junit(report: Report, path: Path) -> None:
    """Write one test case per check, for a CI that reads JUnit XML."""
    count = {kind: sum(check.verdict == kind for check in report.checks) for kind in ("fail", "skip")}
    suite = xml.Element(
        "testsuite",
        name=f"outpace verify {report.model}", tests=str(len(report.checks)), failures=str(count["fail"]),
        skipped=str(count["skip"]), errors="0", time=f"{sum(check.seconds for check in report.checks):.3f}",
    )  # fmt: skip
    for check in report.checks:
        case = xml.SubElement(suite, "testcase", classname=check.subject, name=check.name, time=f"{check.seconds:.3f}")
        if check.failed:
            xml.SubElement(case, "failure", message=check.summary).text = "\n".join(map(str, check.divergences))
        elif check.verdict == "skip":
            xml.SubElement(case, "skipped", message=check.summary)
        else:
            xml.SubElement(case, "system-out").text = f"{check.verdict}: {check.summary}"
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        xml.ElementTree(suite).write(scratch, encoding="utf-8", xml_declaration=True)
        os.replace(scratch, path)
    except OSError as error:
        raise OutpaceError(f"cannot write the JUnit file: {error}") from error
