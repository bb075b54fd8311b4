"""MkDocs hooks: README, CHANGELOG and source files become pages of the site, so that every link works there too.

mkdocs.yml names this file; `make docs` runs it. A link to a file outside of docs leads to a page that shows the file.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from links import LINK, ROOT, linked_files

DOCS = ROOT / "docs"
TOP = {"README.md": "readme.md", "CHANGELOG.md": "changelog.md"}


def address(file: Path) -> str:
    """Where the site has a file of the repository, from its root."""
    if file.is_relative_to(DOCS):
        return file.relative_to(DOCS).as_posix()
    name = file.relative_to(ROOT).as_posix()
    return TOP.get(name) or f"source/{name.removesuffix('.md').replace('README', 'about')}.md"


def shown(file: Path) -> str:
    """A file of the repository as a page: Markdown as it is, code in a block that the search passes over."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return text
    return f"---\nsearch:\n  exclude: true\n---\n\n# {file.relative_to(ROOT)}\n\n````{file.suffix[1:]}\n{text}````\n"


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for file in sorted(linked_files() | {ROOT / name for name in TOP}):
        files.append(File.generated(config, address(file), content=shown(file)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links lead to where the site has a file."""
    uri = page.file.src_uri
    sources = {address(file): file for file in linked_files() | {ROOT / name for name in TOP}}
    place = sources.get(uri, DOCS / uri)

    def moved(match: re.Match[str]) -> str:
        if not match[1]:
            return match[0]
        target = (place.parent / match[1]).resolve()
        return os.path.relpath(address(target), Path(uri).parent) + (match[2] or "")

    return LINK.sub(moved, markdown) if place.suffix == ".md" else markdown
