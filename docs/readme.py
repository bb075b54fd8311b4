"""Write the generated tables of the README again: the methods, and the rooms of the package.

    python docs/readme.py

tests/test_docs.py compares the README with both.
"""

from __future__ import annotations

import re
from pathlib import Path

import rooms

from outpace.cli.display import methods_markdown

README = Path(__file__).resolve().parent.parent / "README.md"


def replaced(text: str, table: str) -> str:
    """The text with this table in the place of the one that has the same header."""
    header = re.escape(table.split("\n")[0])
    return re.sub(rf"^{header}\n(\|.*\n)+", lambda _: table + "\n", text, flags=re.MULTILINE)


if __name__ == "__main__":
    page = README.read_text(encoding="utf-8")
    README.write_text(replaced(replaced(page, methods_markdown()), rooms.table()), encoding="utf-8")
