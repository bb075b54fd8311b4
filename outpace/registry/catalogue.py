"""Catalogue: descriptions and options of all methods, policies and verifiers, available without importing them.

`python -m outpace.registry.catalogue` writes `catalogue.json` from the classes, and a test compares the two. So help
texts, lists and errors about options are fast and need no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from outpace import registry
from outpace.errors import UsageError, unknown

FILE = Path(__file__).with_name("catalogue.json")
KINDS = {"methods": "method", "policies": "policy", "verifiers": "verifier"}
REQUIRED = "required"
# Values that are tried to find the range of an option.
PROBES: dict[str, list[float]] = {"int": [-1, 0, 1, 2, 3, 10**6], "float": [-0.5, 0.0, 0.001, 0.5, 0.999, 1.0, 1.5]}
PLAIN_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,), "float": (int, float), "str": (str,), "bool": (bool,), "None": (type(None),),
}  # fmt: skip


@dataclass(frozen=True)
class CatalogueEntry:
    """A method, policy or verifier: a one-sentence description, its options and their defaults."""

    about: str
    lossless: bool
    lossless_if: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # defaults; "required" if there is none
    types: dict[str, str] = field(default_factory=dict)  # annotated types of the options
    least: dict[str, float] = field(default_factory=dict)  # the smallest value that a numeric option may have
    most: dict[str, float] = field(default_factory=dict)  # the largest one

    @classmethod
    def describe(cls, described: type) -> CatalogueEntry:
        known = registry.options(described)
        needed = registry.required(described)
        return cls(
            about=(described.__doc__ or "").strip().split("\n")[0],
            lossless=getattr(described, "lossless", True),
            lossless_if=getattr(described, "lossless_if", {}),
            options={name: REQUIRED if name in needed else f.default for name, f in known.items()},
            types={name: str(f.type) for name, f in known.items()},
        )

    @property
    def required(self) -> list[str]:
        return [name for name, default in self.options.items() if default == REQUIRED]


@cache
def _shipped() -> dict[str, dict[str, CatalogueEntry]]:
    found = json.loads(FILE.read_text(encoding="utf-8"))
    return {kind: {name: CatalogueEntry(**entry) for name, entry in entries.items()} for kind, entries in found.items()}


def entries(kind: str) -> dict[str, CatalogueEntry]:
    """Return all entries of a kind: "method", "policy" or "verifier". Only classes of other packages are imported."""
    plural = next(plural for plural, singular in KINDS.items() if singular == kind)
    shipped, places = _shipped()[plural], registry.names(kind)
    added = registry.installed() if kind == "method" else {}
    return {
        name: shipped[name]
        if name in shipped and name not in added
        else CatalogueEntry.describe(registry.find(name, kind))
        for name in places
    }


def entry(kind: str, name: str) -> CatalogueEntry:
    known = entries(kind)
    if name not in known:
        raise unknown(kind, name, known)
    return known[name]


def check(kind: str, spec: str, given: Mapping[str, Any] | None = None, provided: Iterable[str] = ()) -> None:
    """Raise an error for an unknown name or option or a wrong type; `provided` options are filled in later."""
    name, options = registry.parse(spec)
    options |= given or {}
    known = entry(kind, name)
    for option, value in options.items():
        if option not in known.options:
            raise unknown(f"option of {kind} {name!r}", option, known.options)
        kinds = [part.strip() for part in known.types[option].split("|")]
        if all(k in PLAIN_TYPES for k in kinds) and not _fits(value, kinds):
            raise UsageError(f"{option}={value!r} of {kind} {name!r} must be {known.types[option]}")
        if isinstance(value, int | float):
            _check_range(known, option, value, f"{option}={value!r} of {kind} {name!r}")
    missing = [option for option in known.required if option not in {*options, *provided}]
    if missing:
        raise UsageError(f"{kind} {name!r} needs {', '.join(missing)}; pass {missing[0]}=...")


def _fits(value: Any, kinds: list[str]) -> bool:
    if isinstance(value, bool):  # a bool is an int in Python
        return "bool" in kinds
    return isinstance(value, tuple(cls for kind in kinds for cls in PLAIN_TYPES[kind]))


def _check_range(known: CatalogueEntry, option: str, value: float, what: str) -> None:
    if value < known.least.get(option, value):
        raise UsageError(f"{what} must be at least {known.least[option]:g}")
    if value > known.most.get(option, value):
        raise UsageError(f"{what} must be at most {known.most[option]:g}")


def with_ranges(described: type, known: CatalogueEntry) -> CatalogueEntry:
    """Add the ranges of numeric options: the class says which of some values it takes, all else as by default."""
    given = dict.fromkeys(known.required)

    def takes(option: str, value: float) -> bool:
        try:
            described(**given | {option: value})
        except UsageError:
            return False
        return True

    least, most = dict[str, float](), dict[str, float]()
    for option, types in known.types.items():
        kinds = {part.strip() for part in types.split("|")}
        if "str" in kinds or not kinds & {"int", "float"}:
            continue
        fit = [value for value in PROBES["float" if "float" in kinds else "int"] if takes(option, value)]
        if fit and (fit[0] == 0 or (fit[0] > 0 and "float" not in kinds)):
            least[option] = fit[0]
        if fit and fit[-1] == 1.0:
            most[option] = fit[-1]
    return replace(known, least=least, most=most)


def described() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the entries of all classes in Outpace, as written to `catalogue.json`."""
    return {
        plural: {
            name: asdict(with_ranges(found := registry.find(name, kind), CatalogueEntry.describe(found)))
            for name in (registry.METHODS if kind == "method" else registry.names(kind))
        }
        for plural, kind in KINDS.items()
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(described(), indent=1) + "\n", encoding="utf-8")
