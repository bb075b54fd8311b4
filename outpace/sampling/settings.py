"""Sampling: the sampling settings of a request, validated when they are created."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from outpace.errors import UsageError


@dataclass(frozen=True)
class Sampling:
    """Sampling settings; temperature 0 is greedy decoding."""

    temperature: float = 0.0
    top_k: int = 0  # 0 keeps all tokens
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int = 0
    repetition_penalty: float = 1.0  # over prompt and output, as in Transformers
    presence_penalty: float = 0.0  # over the output, as in OpenAI's API
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks = {
            "temperature": self.temperature == 0 or self.temperature >= 1e-4,  # less overflows, and is greedy anyway
            "top_k": self.top_k >= 0,
            "top_p": 0 < self.top_p <= 1,
            "min_p": 0 <= self.min_p <= 1,
            "typical_p": 0 < self.typical_p <= 1,
            "repetition_penalty": self.repetition_penalty > 0,
            "presence_penalty": True,
            "frequency_penalty": True,
        }
        try:  # JSON keys are always strings
            object.__setattr__(self, "logit_bias", {int(token): float(b) for token, b in self.logit_bias.items()})
        except (ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}") from error
        for name, good in checks.items():
            value = getattr(self, name)
            if not good or not math.isfinite(value):
                raise UsageError(f"{name}={value} is out of range")
        if any(math.isnan(bias) or bias == math.inf for bias in self.logit_bias.values()):
            raise UsageError("logit_bias must be finite, or -inf to exclude a token")
