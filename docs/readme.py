"""Write the generated parts of the pages again: the methods, and the rooms of the package.

    python docs/readme.py

tests/test_docs.py compares the pages with both.
"""

from __future__ import annotations

import re
from pathlib import Path

import rooms

from outpace.cli.display import methods_markdown

ROOT = Path(__file__).resolve().parent.parent


def with_table(text: str, table: str) -> str:
    """The text with this table in the place of the one that has the same header."""
    header = re.escape(table.split("\n")[0])
    return re.sub(rf"^{header}\n(\|.*\n)+", lambda _: table + "\n", text, flags=re.MULTILINE)


def with_rooms(text: str) -> str:
    return re.sub(r"^```\nstorage .*?^```$", lambda _: rooms.listing(), text, flags=re.MULTILINE | re.DOTALL)


if __name__ == "__main__":
    page = ROOT / "README.md"
    page.write_text(
        with_rooms(with_table(page.read_text(encoding="utf-8"), methods_markdown(options=False))), encoding="utf-8"
    )
    page = ROOT / "docs" / "methods" / "overview.md"
    page.write_text(with_table(page.read_text(encoding="utf-8"), methods_markdown()), encoding="utf-8")
