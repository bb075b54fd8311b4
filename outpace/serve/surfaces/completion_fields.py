"""Fields of /v1/completions."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from outpace.serve.surfaces.chat_fields import PredictionFields, ResponseFormat, StreamOptions
from outpace.serve.surfaces.engine_fields import EngineFields

USUAL_TOKENS = 16  # OpenAI's


class CompletionFields(EngineFields):
    """The body of a request."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = Field(None, ge=1)
    n: int | None = 1
    best_of: int | None = None
    echo: bool | None = False
    stop: str | list[str] | None = None
    logprobs: int | None = Field(None, ge=0)
    add_special_tokens: bool | None = True
    response_format: ResponseFormat | None = None
    prediction: PredictionFields | None = None
    stream_options: StreamOptions | None = None
    suffix: Literal[""] | None = None
    # Accepted from OpenAI's clients, without effect here.
    user: Any = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """All prompts, of which one may stand alone."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return self.prompt  # type: ignore[return-value]

    @property
    def samples(self) -> int:
        return len(self.prompts) * (1 if self.n is None else self.n)
