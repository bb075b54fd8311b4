"""Checks of arguments that need neither torch nor a model, so errors are reported at once."""

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
ALIKE = 0.8  # least similarity of a name to a demo model's for it to be a typo


def model(name: str) -> None:
    """Refuse a name that is no demo model, file or folder, and cannot be a Hugging Face id."""
    path = Path(name)
    if name.removesuffix(".gguf") in demo_weights.DEMO_MODELS or path.exists():
        return
    if name.endswith(".gguf"):
        raise OutpaceError(f"no such file: {name!r}")
    if "/" not in name and (near := difflib.get_close_matches(name, demo_weights.DEMO_MODELS, 1, ALIKE)):
        raise UsageError(f"unknown model {name!r}; did you mean {near[0]!r}?")
    if not HUB_ID.fullmatch(name):
        known = ", ".join(demo_weights.DEMO_MODELS)
        raise OutpaceError(f"cannot load {name!r}: not a demo model ({known}), a folder or a Hugging Face id")


def dtype(name: str | None) -> None:
    if name not in (None, "auto", *DTYPES):
        raise UsageError(f"{name!r} is not a known dtype; use one of {', '.join(DTYPES)}")


def device(name: str | None) -> None:
    if name is not None and not DEVICE.fullmatch(name):
        raise UsageError(f"{name!r} is not a device; try cpu, cuda or cuda:1")


def quantize(kind: str | None) -> None:
    if kind not in (None, "int8"):
        raise UsageError(f"unknown quantization {kind!r}; use int8")


def adapter(name: str | None) -> None:
    """Refuse an adapter that is no folder and cannot be a Hugging Face id, and one that cannot be loaded here."""
    if name is None:
        return
    if not Path(name).is_dir() and not HUB_ID.fullmatch(name):
        raise OutpaceError(f"cannot load the adapter {name!r}: not a folder or a Hugging Face id")
    if find_spec("peft") is None:
        raise OutpaceError("an adapter needs PEFT: pip install 'outpace[peft]'")


def installed(*packages: str) -> None:
    """Refuse a missing package before anything is measured."""
    for package in packages:
        if find_spec(package) is None:
            raise OutpaceError(f"report.html needs {package}: pip install 'outpace[bench]', or use --no-page")


def extra(name: str, flag: str) -> None:
    """Refuse a flag whose package is missing; the package and the extra have the same name."""
    if find_spec(name) is None:
        raise OutpaceError(f"{flag} needs {name}: pip install 'outpace[{name}]'")


def readable(path: Path | None) -> None:
    """Refuse a file that does not exist."""
    if path is not None and not path.is_file():
        raise OutpaceError(f"cannot read {str(path)!r}: no such file")


def folder(path: Path) -> None:
    """Refuse a folder that does not exist."""
    if not path.is_dir():
        raise UsageError(f"no such folder: {str(path)!r}")


def writable(path: Path | None, what: str) -> None:
    """Refuse a path that cannot be written as a file."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        why = "it is a folder" if path.is_dir() else f"no such folder: {str(path.parent)!r}"
        raise OutpaceError(f"cannot write {what} {str(path)!r}: {why}")


def method(spec: str, draft: bool, options: Mapping[str, Any] | None = None) -> None:
    """Refuse an unknown method, wrong options, and a missing draft model if the method needs one."""
    name, _ = registry.parse(spec)
    if not draft and "draft" in catalogue.entry("method", name).required:
        raise UsageError(f"method {name!r} needs a draft model: add --draft MODEL")
    catalogue.check("method", spec, options, provided=["draft"])


def request(given: dict[str, Any], draft: bool) -> None:
    """Refuse settings that no request can have; the draft model is added later."""
    settings = {name: value for name, value in given.items() if value is not None}
    asked = Request.from_keywords("", settings)
    name = str(asked.method)
    if draft and "draft" not in catalogue.entry("method", name).options:
        takes = [name for name, entry in catalogue.entries("method").items() if "draft" in entry.options]
        raise UsageError(f"method {name!r} takes no draft model; these do: {', '.join(takes)}")
    method(name, draft, asked.options)
    for kind, spec in (("policy", asked.policy), ("verifier", asked.verifier)):
        if spec is not None:
            catalogue.check(kind, str(spec))


def sampling_setting(names: Any, known: Any) -> None:
    for name in names:
        if name not in known:
            raise unknown("sampling setting", name, known)
