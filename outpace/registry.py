"""METHODS: every method by name, imported when it is asked for; POLICIES by name.

A package of your own adds methods through the entry point group "outpace.methods" (name = "module:Class").
"""

from __future__ import annotations

import dataclasses
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from outpace.drafter import Drafter
from outpace.errors import UsageError, unknown
from outpace.goodput import Goodput
from outpace.policy import Confidence, Entropy, Heuristic, Learned, Policy
from outpace.verify import VERIFIERS, Verifier

METHODS: dict[str, str] = {
    "plain": "outpace.methods.plain:Plain",
    "draft": "outpace.methods.draft:Draft",
    "ngram": "outpace.methods.ngram:NGram",
    "suffix": "outpace.methods.suffix:Suffix",
    "recycling": "outpace.methods.recycling:Recycling",
    "lookahead": "outpace.methods.lookahead:Lookahead",
    "layerskip": "outpace.methods.layerskip:LayerSkip",
    "pruned": "outpace.methods.pruned:Pruned",
    "auto": "outpace.methods.auto:Auto",
}

POLICIES: dict[str, type[Policy]] = {
    "fixed": Policy,
    "heuristic": Heuristic,
    "confidence": Confidence,
    "entropy": Entropy,
    "learned": Learned,
    "auto": Goodput,
}


def methods() -> dict[str, str]:
    """Names and where they are: ours, then what installed packages add."""
    return METHODS | _installed()


@cache  # to read what all installed packages say of themselves takes longer than a pass
def _installed() -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group="outpace.methods")}


def find(name: str) -> type[Drafter]:
    known = methods()
    if name not in known:
        raise unknown("method", name, known)
    module, _, attribute = known[name].partition(":")
    return getattr(import_module(module), attribute)


def options(cls: type) -> dict[str, dataclasses.Field[Any]]:
    """The options of a method, policy or verifier: its dataclass fields."""
    return {f.name: f for f in dataclasses.fields(cls) if f.init} if dataclasses.is_dataclass(cls) else {}


def required(cls: type) -> list[str]:
    """The options that have no default."""
    missing = dataclasses.MISSING
    return [f.name for f in options(cls).values() if f.default is missing and f.default_factory is missing]


def parse(spec: str) -> tuple[str, dict[str, Any]]:
    """Name and options of "name" or "name:option=value,option=value"."""
    name, _, rest = spec.partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",") if pair]
    for option, equals, _ in pairs:
        if not equals:
            raise UsageError(f"{option!r} in {spec!r} is not of the form option=value")
    return name.strip(), {option.strip(): _value(value.strip()) for option, _, value in pairs}


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def build(kind: str, name: str, cls: type, given: dict[str, Any]) -> Any:
    """An object of `cls` with these options; a wrong one is named, with the nearest right one."""
    known = options(cls)
    for option in given:
        if option not in known:
            raise unknown(f"option of {kind} {name!r}", option, known)
    missing = [name for name in required(cls) if name not in given]
    if missing:
        raise UsageError(f"{kind} {name!r} needs {', '.join(missing)}; pass {missing[0]}=...")
    return cls(**given)


def method(name: str, **given: Any) -> Drafter:
    drafter: Drafter = build("method", name, find(name), given)
    drafter.name = name
    return drafter


def policy(name: str, **given: Any) -> Policy:
    if name not in POLICIES:
        raise unknown("policy", name, POLICIES)
    return build("policy", name, POLICIES[name], given)


def verifier(name: str, **given: Any) -> Verifier:
    if name not in VERIFIERS:
        raise unknown("verifier", name, VERIFIERS)
    return build("verifier", name, VERIFIERS[name], given)
