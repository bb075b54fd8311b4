"""Methods, policies, rules of acceptance and loaders by name, imported when they are used.

A package of your own adds methods through the entry point group "outpace.methods" (name = "module:Class"). What there
is, and with which options, is known without importing anything: `catalogue`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.errors import UsageError, unknown

if TYPE_CHECKING:
    from outpace.core.drafter import Drafter
    from outpace.core.policy import Policy
    from outpace.core.verifier import Verifier

METHODS: dict[str, str] = {
    "plain": "outpace.methods.plain:Plain",
    "draft": "outpace.methods.draft:Draft",
    "ngram": "outpace.methods.ngram:NGram",
    "suffix": "outpace.methods.suffix:Suffix",
    "recycling": "outpace.methods.recycling:Recycling",
    "lookahead": "outpace.methods.lookahead:Lookahead",
    "layerskip": "outpace.methods.layerskip:LayerSkip",
    "pruned": "outpace.methods.pruned:Pruned",
    "eagle3": "outpace.methods.heads.eagle3:Eagle3",
    "mtp": "outpace.methods.heads.mtp:Mtp",
    "medusa": "outpace.methods.heads.medusa:Medusa",
    "block": "outpace.methods.heads.block:Block",
    "graft": "outpace.methods.graft:Graft",
    "via_sd": "outpace.methods.via_sd:ViaSD",
    "auto": "outpace.methods.auto:Auto",
}

POLICIES: dict[str, str] = {
    "fixed": "outpace.core.policy:Policy",
    "heuristic": "outpace.policies.adaptive:Heuristic",
    "confidence": "outpace.policies.adaptive:Confidence",
    "entropy": "outpace.policies.adaptive:Entropy",
    "learned": "outpace.policies.learned:Learned",
    "auto": "outpace.policies.controller.controller:Controller",
}

VERIFIERS: dict[str, str] = {
    "match": "outpace.core.verifier:Match",
    "residual": "outpace.verifiers.residual:Residual",
    "typical": "outpace.verifiers.lossy:Typical",
    "tiered": "outpace.verifiers.lossy:Tiered",
    "contrastive": "outpace.verifiers.contrastive:Contrastive",
}

# By name: a pattern, or a file that a folder of this name holds. The first that matches loads the model.
LOADERS: dict[str, str] = {
    "*.gguf": "outpace.api.load_gguf:load",
    "*": "outpace.api.load_transformers:load",
}

NESTED = re.compile(r"\s*\w+\s*=\s*\w+:\w+=")


def methods() -> dict[str, str]:
    """Names and where they are: ours, then what installed packages add."""
    return METHODS | installed()


@cache  # to read what all installed packages say of themselves takes longer than a pass
def installed() -> dict[str, str]:
    """The methods that other packages add."""
    return {point.name: point.value for point in entry_points(group="outpace.methods")}


def loader(name: str) -> Callable[..., Any]:
    """The function that loads a model of this name; loaders of installed packages are asked first."""
    added = {point.name: point.value for point in entry_points(group="outpace.loaders")}
    place = next(place for pattern, place in (added | LOADERS).items() if _matches(name, pattern))
    module, _, attribute = place.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), attribute)
    return function


def _matches(name: str, pattern: str) -> bool:
    return fnmatch(name, pattern) or ("*" not in pattern and (Path(name) / pattern).is_file())


def names(kind: str) -> dict[str, str]:
    """Names and places of all methods, policies or verifiers; `kind` is in the singular."""
    return {"method": methods, "policy": lambda: POLICIES, "verifier": lambda: VERIFIERS}[kind]()


def find(name: str, kind: str = "method") -> type[Any]:
    """The class of this name."""
    known = names(kind)
    if name not in known:
        raise unknown(kind, name, known)
    module, _, attribute = known[name].partition(":")
    return getattr(import_module(module), attribute)


def name_of(thing: object, kind: str) -> str:
    """The name under which the class of an object is known, or that of the class."""
    place = f"{type(thing).__module__}:{type(thing).__qualname__}"
    return next((name for name, known in names(kind).items() if known == place), type(thing).__name__)


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
    if given is not None and not isinstance(given, str):
        return given
    name, known = parse(given or ("suffix" if draft is None else "draft"))
    if draft is not None and "draft" in options(find(name)):
        known["draft"] = draft
    return method(name, **known)


def lossless_options(name: str) -> dict[str, object] | None:
    """The options with which a method keeps the distribution: none for most; None where it never does."""
    cls = find(name)
    return {} if cls.lossless else cls.lossless_if or None


def policy(name: str, **given: Any) -> Policy:
    found: Policy = build("policy", name, find(name, "policy"), given)
    return found


def verifier(name: str, **given: Any) -> Verifier:
    found: Verifier = build("verifier", name, find(name, "verifier"), given)
    return found
