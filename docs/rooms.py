"""Print the map of the package for the README: its rooms in order, each with the first line of its docstring.

    python docs/rooms.py

The rooms are those of [tool.outpace.rooms] in pyproject.toml. tests/test_docs.py compares the README with this.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TICK = "`"


def names() -> list[str]:
    """The rooms, each of which may import only rooms before it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return list(settings["tool"]["outpace"]["rooms"])


def purpose(room: str) -> str:
    """The first line of the docstring of a room, which is a package or a module."""
    folder = ROOT / "outpace" / room
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def listing() -> str:
    """The rooms as a block of text, the names in one column."""
    width = max(map(len, names()))
    return "\n".join(["```", *(f"{room:{width}}  {purpose(room).replace(TICK, '')}" for room in names()), "```"])


if __name__ == "__main__":
    sys.stdout.write(listing() + "\n")
