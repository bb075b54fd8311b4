"""Request: one prompt and its settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outpace import registry
from outpace.errors import UsageError, unknown
from outpace.registry import catalogue
from outpace.sampling.settings import Sampling

if TYPE_CHECKING:
    from torch import Tensor

    from outpace.api.model import Model
    from outpace.core.drafter import Drafter
    from outpace.core.lm import LM
    from outpace.core.policy import Policy
    from outpace.core.verifier import Verifier
    from outpace.text import Prompt


@dataclass(frozen=True)
class Request:
    """One prompt and all its settings; `generate` and `stream` take the same names as keywords."""

    prompt: Prompt
    method: str | Drafter = "auto"  # also "name:option=value,..."
    draft: Model | LM | None = None
    policy: str | Policy | None = None  # None: "auto" for the method "auto", else "fixed"
    verifier: str | Verifier | None = None  # None: the default of the method, "match" for nearly all
    max_tokens: int = 256
    min_tokens: int = 0
    stop: str | Seq[str] = ()
    stop_token_ids: Seq[int] = ()
    ignore_eos: bool = False
    bad_words: Seq[str | Seq[int]] = ()  # words, or token sequences, that must not appear
    logprobs: int | None = None
    processed_logprobs: bool = False  # from the sampling distribution, after all settings, not from the model's own
    n: int = 1
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None  # a grammar in llguidance's Lark syntax
    prediction: str | Seq[int] = ""  # a text that the answer may repeat in large part: draft tokens are taken from it
    skip_special_tokens: bool = True  # leave special tokens out of the text; False leaves out only the one that ends it
    owner: str | None = None  # requests of different owners share no cached prefix, and no method that remembers text
    logits_processors: Seq[Callable[[Tensor, Tensor], Tensor]] = ()  # such as Transformers' LogitsProcessor objects
    sampling: Sampling = field(default_factory=Sampling)
    options: dict[str, Any] = field(default_factory=dict)  # of the method

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or self.min_tokens < 0 or self.n < 1:
            raise UsageError("max_tokens and n must be at least 1, and min_tokens at least 0")
        constraints = {"json_schema": self.json_schema, "regex": self.regex, "grammar": self.grammar}
        given = [name for name, source in constraints.items() if source is not None]
        if len(given) > 1:
            raise UsageError(f"a request takes one constraint at a time, not {' and '.join(given)}")

    @classmethod
    def from_keywords(cls, prompt: Prompt | Request, given: dict[str, Any]) -> Request:
        """Make a request from keywords, which include sampling settings and the method's options."""
        if isinstance(prompt, Request):
            if given:
                raise UsageError(f"a Request has its own settings; set {', '.join(given)} in the Request")
            return prompt
        own = {f.name for f in dataclasses.fields(cls)} - {"prompt", "sampling", "options"}
        sampled = {f.name for f in dataclasses.fields(Sampling)}
        name = given.get("method", "auto")
        if isinstance(name, str):
            name, spelled = registry.parse(name)
            given = {**spelled, **given, "method": name}
        optional = set(catalogue.entry("method", name).options) if isinstance(name, str) else set()
        for key in given:
            if key not in own | sampled | optional:
                raise unknown("option", key, own | sampled | optional)
        return cls(
            prompt,
            sampling=Sampling(**{k: v for k, v in given.items() if k in sampled}),
            options={k: v for k, v in given.items() if k in optional - own},
            **{k: v for k, v in given.items() if k in own},
        )
