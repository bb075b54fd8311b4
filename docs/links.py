"""Check the links of README, CHANGELOG and docs, files and #anchors, and the pages that code names; no network.

    python docs/links.py

`make check` and tests/test_docs.py run this. docs/hooks.py takes `links` and `linked_files` from here. An anchor counts
only if GitHub and the site give a heading the same one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:)([^)#\s]*)(#[^)\s]*)?(?=\))")


def pages() -> list[Path]:
    """Every page that is checked: the ones at the top, those in docs, and pages of the package that they link to."""
    found = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for page in found:
        found += [file for file, _ in links(page) if file.suffix == ".md" and file.exists() and file not in found]
    return found


def prose(page: Path) -> str:
    """The text of a page without code."""
    return without_code(page.read_text(encoding="utf-8"))


def without_code(text: str) -> str:
    """Markdown without blocks of code, and without brackets in spans of code."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]+`", lambda code: re.sub(r"[\[\]()]", "", code[0]), text)


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """The local links of a page: a file, and the anchor in it or an empty text."""
    for match in LINK.finditer(prose(page)):
        target = (page.parent / match[1]).resolve() if match[1] else page
        yield target, (match[2] or "")[1:]


@cache
def linked_files() -> set[Path]:
    """Files outside of docs that pages link to: source code, mostly."""
    return {file for page in pages() for file, _ in links(page) if not file.is_relative_to(ROOT / "docs")}


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page that are the same on GitHub and on the site."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *$", prose(page), flags=re.MULTILINE):
        text = re.sub(r"[^\w\s-]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading)).strip().lower()
        here, there = re.sub(r"\s", "-", text), re.sub(r"[-\s]+", "-", text)
        if here == there:
            found.add(here)
    return found


def broken() -> list[str]:
    """One line for each link that leads nowhere."""
    found = []
    for page in pages():
        for file, anchor in links(page):
            place = f"{page.relative_to(ROOT)}: {file.relative_to(ROOT) if file.is_relative_to(ROOT) else file}"
            if not file.is_file():
                found.append(f"{place} is no file")
            elif anchor and anchor not in anchors(file):
                found.append(f"{place}#{anchor} is no heading")
    return found + mentions()


def mentions() -> list[str]:
    """One line for each page that code names and that is not there."""
    found = []
    for folder in ("outpace", "benchmarks", "examples"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for name in re.findall(r"docs/[\w./-]+\.md", file.read_text(encoding="utf-8")):
                if not (ROOT / name).is_file():
                    found.append(f"{file.relative_to(ROOT)}: {name} is no file")
    return found


if __name__ == "__main__":
    found = broken()
    sys.stdout.write("".join(f"{line}\n" for line in found))
    sys.exit(1 if found else 0)
