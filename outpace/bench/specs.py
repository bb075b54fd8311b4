"""Specs: the methods, policies and verifiers to measure, as the user named them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from outpace import registry
from outpace.errors import UsageError
from outpace.registry import catalogue

PLAIN = "plain"
TRANSFORMERS = "Transformers"


@dataclass(frozen=True)
class MethodSpec:
    """A method, policy or verifier with options: "name" or "name:option=value,option=value"."""

    text: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, given: str) -> MethodSpec:
        return cls(given, *registry.parse(given))

    @classmethod
    def checked(cls, kind: str, given: str) -> MethodSpec:
        """Parse a policy or a verifier; refuse it if none of this name has these options."""
        catalogue.check(kind, given)
        return cls.parse(given)


def specs(given: Seq[str], draft: bool) -> list[MethodSpec]:
    """Return the methods to run, plain first; without names, all lossless ones that need at most the given draft.
    Trained heads have to be named, because most models have none."""
    able = {"draft"} if draft else set[str]()
    names = list(given) or [
        name
        for name, entry in catalogue.entries("method").items()
        if set(entry.required) <= able and entry.lossless and "head" not in entry.options
    ]
    found = [MethodSpec.parse(text) for text in dict.fromkeys([PLAIN, *names])]
    for spec in found:
        if "draft" in catalogue.entry("method", spec.name).required and not draft:
            raise UsageError(f"method {spec.name!r} needs a draft model: add --draft MODEL")
        catalogue.check("method", spec.text, provided=["draft"])
    return found
