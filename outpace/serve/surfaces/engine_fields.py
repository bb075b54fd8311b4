"""EngineFields: the fields that every API takes beside its own: sampling, speculation, constraints.

A field that no class names is an error that names it. `null` always means that a field is not given.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from outpace.registry import catalogue
from outpace.registry.catalogue import CatalogueEntry
from outpace.serve.chat.conversation import OutputRule
from outpace.serve.served import Served
from outpace.serve.settings import ServeLimits
from outpace.serve.web.failures import bad_field

GREEDY = 1e-4  # temperatures below this are greedy anyway
OFF = ("off", "plain")
# The methods that a request may choose: they need no further model, and little memory.
REQUESTABLE = ("plain", "ngram", "suffix", "prediction", "recycling", "lookahead", "auto")
MOST_OPTION = 64  # of a method's numeric option, unless its default is larger
SAMPLING = (
    "temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
JSON_OBJECT: dict[str, Any] = {"type": "object"}


class StrictFields(BaseModel):
    """Base class of all fields of requests."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())


class LooseFields(BaseModel):
    """Base class of parts in which clients send more than is read here, such as marks for caches."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, protected_namespaces=())


class SpeculationFields(StrictFields):
    """How to speculate."""

    method: str = "auto"
    options: dict[str, int | float | bool | None] = Field(default_factory=dict)


class StructuredFields(StrictFields):
    """A constraint on the output, by vLLM's names: one of these."""

    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class EngineFields(StrictFields):
    """Fields of every request that is generated from."""

    model: str | None = None
    stream: bool | None = False
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31)  # -1 and 0 keep all tokens
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    min_tokens: int | None = Field(None, ge=0)
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool | None = False
    speculation: SpeculationFields | str | Literal[False] | None = None
    structured_outputs: StructuredFields | None = None
    return_token_ids: bool | None = False
    timeout: float | None = Field(None, gt=0)

    @property
    def samples(self) -> int:
        """How many answers the request asks for."""
        return 1


def request_settings(fields: EngineFields, served: Served) -> dict[str, Any]:
    """Return the keywords of `Request` that these fields stand for, without prompt, length and rules."""
    limits = served.settings.limits
    _check_sizes(fields, limits)
    given = {name: value for name in SAMPLING if (value := getattr(fields, name)) is not None}
    sampled = {"temperature": 1.0, **served.settings.sampling, **given}
    if 0 < sampled["temperature"] < GREEDY:
        sampled["temperature"] = 0.0
    if fields.top_k is not None:
        sampled["top_k"] = max(0, fields.top_k)
    if fields.seed is not None:
        sampled["seed"] = fields.seed
    else:
        sampled.setdefault("seed", secrets.randbits(62))
    return {
        **sampled,
        **speculation(fields.speculation, served),
        "logit_bias": fields.logit_bias or {},
        "min_tokens": fields.min_tokens or 0,
        "stop_token_ids": fields.stop_token_ids or (),
        "bad_words": fields.bad_words or (),
        "ignore_eos": bool(fields.ignore_eos),
    }


def speculation(asked: SpeculationFields | str | Literal[False] | None, served: Served) -> dict[str, Any]:
    """Return the keywords of `Request` for how to speculate; without a wish, as the server does by default."""
    settings = served.settings
    default = {"method": settings.method, "draft": settings.draft, "policy": settings.policy, **settings.options}
    if asked is None:
        return default
    wish = asked if isinstance(asked, SpeculationFields) else SpeculationFields(method=asked or "plain")
    if wish.method in OFF:
        return {"method": "plain"}
    if wish.method == settings.method and not wish.options:
        return default
    if wish.method not in (*REQUESTABLE, settings.method):
        known = ", ".join(("off", *REQUESTABLE))
        raise bad_field("speculation", f"a request may choose {known}; not {wish.method!r}")
    entry = catalogue.entry("method", wish.method)
    for name, value in wish.options.items():
        most = largest_option(entry, name)
        if value is not None and value > most:
            raise bad_field("speculation", f"{name}={value} of a request must be at most {most}")
    catalogue.check("method", wish.method, wish.options, provided=["draft"])
    takes_draft = settings.draft is not None and "draft" in entry.options
    return {"method": wish.method, **({"draft": settings.draft} if takes_draft else {}), **wish.options}


def largest_option(entry: CatalogueEntry, name: str) -> float:
    """Return the largest value that a request may give to an option of a method."""
    usual = entry.options.get(name)
    most = max(MOST_OPTION, usual) if isinstance(usual, int | float) else MOST_OPTION
    return min(most, entry.most.get(name, most))


def structured_rule(given: StructuredFields | None, limits: ServeLimits) -> OutputRule | None:
    """Return the rule that `structured_outputs` stands for."""
    if given is None:
        return None
    sources: dict[str, Any] = {
        "json_schema": JSON_OBJECT if given.json_object else _schema(given.json_schema),
        "regex": given.regex if given.choice is None else "|".join(map(re.escape, given.choice)),
        "grammar": given.grammar,
    }
    known = {name: source for name, source in sources.items() if source is not None}
    if len(known) != 1:
        raise bad_field("structured_outputs", "give exactly one of json, regex, choice, grammar and json_object")
    rule = OutputRule(**known)
    check_rule("structured_outputs", rule, limits)
    return rule


def _schema(given: dict[str, Any] | str | None) -> dict[str, Any] | None:
    try:
        schema = json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise bad_field("structured_outputs.json", f"not JSON: {error}") from error
    if schema is not None and not isinstance(schema, dict):
        raise bad_field("structured_outputs.json", "not a JSON object")
    return schema


def check_rule(param: str, rule: OutputRule, limits: ServeLimits) -> None:
    """Refuse a constraint that is too long to compile."""
    if len(str(next(iter(rule.fields.values())))) > limits.grammar:
        raise bad_field(param, f"longer than {limits.grammar} characters")


def stop_strings(given: str | list[str] | None, limits: ServeLimits, param: str = "stop") -> list[str]:
    """Return the stop strings of a request."""
    stops = [given] if isinstance(given, str) else given or []
    if len(stops) > limits.stops or any(len(stop) > limits.stop_length for stop in stops):
        raise bad_field(param, f"at most {limits.stops} strings of at most {limits.stop_length} characters")
    if not all(stops):
        raise bad_field(param, "a stop string is empty")
    return stops


def check_samples(count: int, limits: ServeLimits) -> None:
    if not 1 <= count <= limits.samples:
        raise bad_field("n", f"a request may ask for 1 to {limits.samples} answers")


def _check_sizes(fields: EngineFields, limits: ServeLimits) -> None:
    for name in ("logit_bias", "stop_token_ids", "bad_words"):
        if len(getattr(fields, name) or ()) > limits.biases:
            raise bad_field(name, f"more than {limits.biases} entries")
