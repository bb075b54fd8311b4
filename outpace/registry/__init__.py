"""Names to classes, imported on first use.

Other packages add methods through the entry point group "outpace.methods" (name = "module:Class"). `catalogue` lists
everything with its options, without importing it.
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
    "prediction": "outpace.methods.prediction:PredictedOutput",
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

# A key is a pattern for the model name, or the name of a file in the model folder. The first match loads the model.
LOADERS: dict[str, str] = {
    "*.gguf": "outpace.api.load_gguf:load",
    "*": "outpace.api.load_transformers:load",
}

NESTED = re.compile(r"\s*\w+\s*=\s*\w+:\w+=")


def methods() -> dict[str, str]:
    """Return method names and their "module:Class", with the methods of installed packages last."""
    return METHODS | installed()


@cache  # reading the metadata of all installed packages takes longer than a pass
def installed() -> dict[str, str]:
    """Return the methods that other packages add."""
    return {point.name: point.value for point in entry_points(group="outpace.methods")}


def loader(name: str) -> Callable[..., Any]:
    """Return the function that loads a model of this name; loaders of installed packages take precedence."""
    added = {point.name: point.value for point in entry_points(group="outpace.loaders")}
    place = next(place for pattern, place in (added | LOADERS).items() if _matches(name, pattern))
    module, _, attribute = place.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), attribute)
    return function


def _matches(name: str, pattern: str) -> bool:
    return fnmatch(name, pattern) or ("*" not in pattern and (Path(name) / pattern).is_file())


def names(kind: str) -> dict[str, str]:
    """Return the names and "module:Class" of all methods, policies or verifiers; `kind` is singular."""
    return {"method": methods, "policy": lambda: POLICIES, "verifier": lambda: VERIFIERS}[kind]()


def find(name: str, kind: str = "method") -> type[Any]:
    """Return the class registered under this name."""
    known = names(kind)
    if name not in known:
        raise unknown(kind, name, known)
    module, _, attribute = known[name].partition(":")
    return getattr(import_module(module), attribute)


def name_of(thing: object, kind: str) -> str:
    """Return the registered name of an object's class, or else the class name."""
    place = f"{type(thing).__module__}:{type(thing).__qualname__}"
    return next((name for name, known in names(kind).items() if known == place), type(thing).__name__)


def options(cls: type) -> dict[str, dataclasses.Field[Any]]:
    """Return the options of a method, policy or verifier: its dataclass fields."""
    return {f.name: f for f in dataclasses.fields(cls) if f.init} if dataclasses.is_dataclass(cls) else {}


def required(cls: type) -> list[str]:
    """Return the options without a default."""
    missing = dataclasses.MISSING
    return [f.name for f in options(cls).values() if f.default is missing and f.default_factory is missing]


def parse(spec: str) -> tuple[str, dict[str, Any]]:
    """Parse "name" or "name:option=value,option=value" into the name and its options.

    A value may be a method with its own options, which takes all of the remaining text: "graft:inner=draft:width=4".
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
    """Create a `cls` with these options; the error for an unknown option suggests the closest known one."""
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
    """Return the method that another one wraps. None means `draft` if there is a draft model, else `suffix`."""
    if given is not None and not isinstance(given, str):
        return given
    name, known = parse(given or ("suffix" if draft is None else "draft"))
    if draft is not None and "draft" in options(find(name)):
        known["draft"] = draft
    return method(name, **known)


def lossless_options(name: str) -> dict[str, object] | None:
    """Return the options with which a method is lossless: empty for most methods, None if it never is."""
    cls = find(name)
    return {} if cls.lossless else cls.lossless_if or None


def policy(name: str, **given: Any) -> Policy:
    found: Policy = build("policy", name, find(name, "policy"), given)
    return found


def verifier(name: str, **given: Any) -> Verifier:
    found: Verifier = build("verifier", name, find(name, "verifier"), given)
    return found
