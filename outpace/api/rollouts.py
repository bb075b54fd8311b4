"""Rollouts: samples for reinforcement learning, with the log-probabilities of the distribution that they were drawn
from.

A method guesses, and the target keeps its distribution: `residual` accepts the most where a head draws its guesses too.
What a sample's tokens are likely is known from the passes that verified them, so no second pass is needed for it.
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

    prompt: int  # which of the prompts
    prompt_tokens: list[int]
    tokens: list[int]
    logprobs: list[
        float
    ]  # of each token, in the distribution that was sampled: after temperature, filters and penalties
    entropies: list[float]  # of that distribution at each token, in nats
    text: str
    finish_reason: FinishReason | None
    stats: Stats  # `acceptance_by_depth` is by the position of a guess
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
    """Draw `n` samples of each prompt, those of one prompt side by side; settings are those of `Model.generate`.

    The weights may have changed since the last call, in place. All samples are independent of each other: `seed`, 0
    unless given, stands for all of them, so give another one in every step.
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
    """What speculation did in all of them; its times are those of one call, not a sum."""
    stats = Stats()
    for each in rollouts:
        stats = stats.merge(each.stats)
    stats.seconds = max((each.stats.seconds for each in rollouts), key=lambda s: sum(s.values()), default={})
    return stats


def _mixed(seed: int, prompt: int) -> int:
    """A seed for each prompt that no other seed or prompt has: else prompts of one length would share their noise."""
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
