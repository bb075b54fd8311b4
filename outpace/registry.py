"""METHODS: every method by name, imported when it is asked for; POLICIES by name.

A package of your own adds methods through the entry point group "outpace.methods" (name = "module:Class").
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
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
    "eagle3": "outpace.methods.eagle3:Eagle3",
    "mtp": "outpace.methods.mtp:Mtp",
    "medusa": "outpace.methods.medusa:Medusa",
    "block": "outpace.methods.block:Block",
    "graft": "outpace.methods.graft:Graft",
    "via_sd": "outpace.methods.via_sd:ViaSD",
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


NESTED = re.compile(r"\s*\w+\s*=\s*\w+:\w+=")


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
    """Name and options of "name" or "name:option=value,option=value".

    A value may be a method with options of its own, which then takes all that follows: "graft:inner=draft:width=4".
    """
    name, _, rest = spec.partition(":")
    pairs = [pair.partition("=") for pair in _pairs(rest)]
    for option, equals, _ in pairs:
        if not equals:
            raise UsageError(f"{option!r} in {spec!r} is not of the form option=value")
    return name.strip(), {option.strip(): _value(value.strip()) for option, _, value in pairs}


def _pairs(text: str) -> Iterator[str]:
    while text:
        pair, _, rest = text.partition(",")
        if NESTED.match(pair):
            pair, rest = text, ""
        if pair:
            yield pair
        text = rest


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


def inner(given: str | Drafter | None, draft: Any) -> Drafter:
    """The method that another one wraps: an object, or "name:option=value,..."; None: what can run here."""
    if isinstance(given, Drafter):
        return given
    name, known = parse(given or ("suffix" if draft is None else "draft"))
    if draft is not None and "draft" in options(find(name)):
        known["draft"] = draft
    return method(name, **known)


def lossless_options(name: str) -> dict[str, object] | None:
    """The options with which a method keeps the law: none for most; None where it never does."""
    cls = find(name)
    return {} if cls.lossless else cls.lossless_if or None


def policy(name: str, **given: Any) -> Policy:
    if name not in POLICIES:
        raise unknown("policy", name, POLICIES)
    return build("policy", name, POLICIES[name], given)


def verifier(name: str, **given: Any) -> Verifier:
    if name not in VERIFIERS:
        raise unknown("verifier", name, VERIFIERS)
    return build("verifier", name, VERIFIERS[name], given)
