"""Checks of arguments that need neither torch nor a model: what is wrong is said at once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from outpace import registry
from outpace.api import demo_weights
from outpace.api.request import Request
from outpace.errors import OutpaceError, UsageError, unknown
from outpace.registry import catalogue

DTYPES = ("float32", "bfloat16", "float16", "float64")
DEVICE = re.compile(r"(cpu|cuda|mps|xpu|hip)(:\d+)?")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
ALIKE = 0.8  # of a name and one on the shelf: a typing mistake


def model(name: str) -> None:
    """Refuse what is no shelf name, no file, no folder, and cannot be a hub id either."""
    path = Path(name)
    if name.removesuffix(".gguf") in demo_weights.SHELF or path.exists():
        return
    if name.endswith(".gguf"):
        raise OutpaceError(f"there is no file {name!r}")
    if "/" not in name and (near := difflib.get_close_matches(name, demo_weights.SHELF, 1, ALIKE)):
        raise UsageError(f"there is no model {name!r}; did you mean {near[0]!r}?")
    if not HUB_ID.fullmatch(name):
        known = ", ".join(demo_weights.SHELF)
        raise OutpaceError(f"cannot load {name!r}: it is no shelf name ({known}), no folder, and no hub id")


def dtype(name: str | None) -> None:
    if name not in (None, "auto", *DTYPES):
        raise UsageError(f"{name!r} is not a torch dtype; try {', '.join(DTYPES)}")


def device(name: str | None) -> None:
    if name is not None and not DEVICE.fullmatch(name):
        raise UsageError(f"{name!r} is not a device; try cpu, cuda or cuda:1")


def quantize(kind: str | None) -> None:
    if kind not in (None, "int8"):
        raise UsageError(f"quantize={kind!r} is not known; int8 is")


def installed(*packages: str) -> None:
    """Refuse before anything was measured, not after."""
    for package in packages:
        if find_spec(package) is None:
            raise OutpaceError(f"the page needs {package}: pip install 'outpace[bench]', or give --no-page")


def readable(path: Path | None) -> None:
    """Refuse a file that is not there."""
    if path is not None and not path.is_file():
        raise OutpaceError(f"cannot read {str(path)!r}: there is no such file")


def folder(path: Path) -> None:
    """Refuse a folder that is not there."""
    if not path.is_dir():
        raise UsageError(f"there is no folder {str(path)!r}")


def writable(path: Path | None, what: str) -> None:
    """Refuse a place where no file can be written."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        why = "it is a folder" if path.is_dir() else f"there is no folder {str(path.parent)!r}"
        raise OutpaceError(f"cannot write {what} {str(path)!r}: {why}")


def method(spec: str, draft: bool, options: Mapping[str, Any] | None = None) -> None:
    """Refuse a method that there is not, wrong options, and a method that needs a draft model without one."""
    name, _ = registry.parse(spec)
    if not draft and "draft" in catalogue.entry("method", name).required:
        raise UsageError(f"method {name!r} needs a draft model: add --draft MODEL")
    catalogue.check("method", spec, options, provided=["draft"])


def request(given: dict[str, Any], draft: bool) -> None:
    """Refuse settings that no request can have; a draft model is filled in later."""
    settings = {name: value for name, value in given.items() if value is not None}
    asked = Request.from_keywords("", settings)
    name = str(asked.method)
    if draft and "draft" not in catalogue.entry("method", name).options:
        takes = [name for name, entry in catalogue.entries("method").items() if "draft" in entry.options]
        raise UsageError(f"method {name!r} takes no draft model; {', '.join(takes)} do")
    method(name, draft, asked.options)
    for kind, spec in (("policy", asked.policy), ("verifier", asked.verifier)):
        if spec is not None:
            catalogue.check(kind, str(spec))


def sampling_setting(names: Any, known: Any) -> None:
    for name in names:
        if name not in known:
            raise unknown("sampling setting", name, known)
