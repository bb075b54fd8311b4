"""Served: what surfaces know of the model that they serve."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from outpace.api.model import Model
from outpace.cross_tokenizer.vocabulary import Vocabulary
from outpace.serve.chat.template import ChatFormat
from outpace.serve.settings import ServeSettings
from outpace.serve.web.failures import APIFailure


@dataclass(frozen=True)
class Served:
    """A model, how it is served, and its chat template."""

    model: Model
    settings: ServeSettings
    chat: ChatFormat

    def check_name(self, name: str | None) -> None:
        """Refuse a request for another model."""
        if name is not None and name not in self.settings.names:
            known = ", ".join(self.settings.names)
            raise APIFailure(
                f"the model {name!r} is not served here; known: {known}", 404, code="model_not_found", param="model"
            )

    @property
    def tokenizer(self) -> Any:
        if self.model.tokenizer is None:
            raise APIFailure("this model has no tokenizer: give the prompt as token ids", param="prompt")
        return self.model.tokenizer

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.tokenizer, self.model.lm.vocab)

    def token_text(self, token: int, first: bool = False) -> str:
        """Return the text of a token as a reply shows it; `first` in an answer it may lose a space."""
        data = self.token_bytes(token)
        if data is None:
            return str(self.tokenizer.decode([token]))
        if first and self.vocabulary.prefix_space:
            return str(self.tokenizer.decode([token], skip_special_tokens=True))
        return data.decode(errors="replace")

    def token_bytes(self, token: int) -> bytes | None:
        """Return the bytes that a token spells; None if it is no text."""
        return self.vocabulary.bytes_of(token)

    def room(self, prompt: int) -> int:
        """Return how many tokens an answer to a prompt may have, by the model, the memory and the server's limit."""
        most = self.model.lm.max_length - prompt
        weights = self.model.lm.weights
        need = None if weights is None else weights.memory(1)  # not through the worker, which may be in a long pass
        if need is not None:
            most = min(most, need.most_tokens - prompt)
        limit = self.settings.limits.max_tokens
        return max(1, most if limit is None else min(most, limit))
