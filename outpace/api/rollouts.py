"""Rollouts: samples for reinforcement learning, with their log-probabilities under the sampling distribution.

Speculation keeps the target's distribution. The verifier `residual` accepts the most where a head samples its draft
tokens too. The log-probabilities come from the passes that verified the tokens, so they need no second pass.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from outpace.api.model import Model
from outpace.api.request import Request
from outpace.api.stream import Completion
from outpace.core.drafter import Drafter
from outpace.core.sequence import FinishReason
from outpace.core.stats import Stats
from outpace.core.verifier import Verifier
from outpace.errors import UsageError
from outpace.text import Prompt, encode


@dataclass(frozen=True)
class Rollout:
    """One sample of one prompt."""

    prompt: int  # index of the prompt
    prompt_tokens: list[int]
    tokens: list[int]
    logprobs: list[float]  # of each token, under the sampling distribution: after temperature, filters and penalties
    entropies: list[float]  # of that distribution at each token, in nats
    text: str
    finish_reason: FinishReason | None
    stats: Stats  # `acceptance_by_depth` is by the position of a draft token
    error: str | None = None  # why it ended early, if it did


def rollout(
    model: Model,
    prompts: Seq[Prompt],
    n: int = 1,
    *,
    method: str | Drafter = "mtp",
    verifier: str | Verifier = "residual",
    temperature: float = 1.0,
    **settings: Any,
) -> list[Rollout]:
    """Draw `n` samples of each prompt, grouped by prompt; the settings are those of `Model.generate`.

    The weights may have changed in place since the last call. All samples are independent of each other. `seed`
    (default 0) determines all of them, so pass a different one in every step.
    """
    if isinstance(prompts, str) or not isinstance(prompts, Seq) or not prompts:
        raise UsageError("rollouts need a list of prompts")
    for name in ("n", "logprobs", "processed_logprobs", "trace"):
        if name in settings:
            raise UsageError(f"{name!r} is not a setting of rollouts")
    given = {**settings, "method": method, "verifier": verifier, "temperature": temperature}
    given |= {"n": n, "logprobs": 0, "processed_logprobs": True}
    seed = settings.get("seed", 0)
    requests = [Request.from_keywords(p, {**given, "seed": _mixed(seed, i)}) for i, p in enumerate(prompts)]
    tokens = [encode(prompt, model.tokenizer, model.lm.vocab) for prompt in prompts]
    model.weights_changed()
    completions = model.generate(requests)
    return [_rolled(completion, i // n, tokens[i // n]) for i, completion in enumerate(completions)]


def merged(rollouts: Seq[Rollout]) -> Stats:
    """Merge the statistics of all rollouts; the times are those of one call, not a sum."""
    stats = Stats()
    for each in rollouts:
        stats = stats.merge(each.stats)
    stats.seconds = max((each.stats.seconds for each in rollouts), key=lambda s: sum(s.values()), default={})
    return stats


def _mixed(seed: int, prompt: int) -> int:
    """A separate seed for each seed and prompt; otherwise prompts of the same length would share their noise."""
    return random.Random(f"{seed}/{prompt}").getrandbits(63)


def _rolled(completion: Completion, prompt: int, tokens: list[int]) -> Rollout:
    distributions = completion.logprobs or []
    return Rollout(
        prompt=prompt,
        prompt_tokens=tokens,
        tokens=completion.tokens,
        logprobs=[distribution.logprob for distribution in distributions],
        entropies=[distribution.entropy for distribution in distributions],
        text=completion.text,
        finish_reason=completion.finish_reason,
        stats=completion.stats,
        error=completion.error,
    )
