"""The quality that a lossy method costs, reported in place of a verdict.

It is measured by the KL divergence of its next-token draws from the target's distribution, by the target's mean
log-probability of its greedy answers and of plain decoding's, and by the task score where the prompts have answers.
"""

from __future__ import annotations

import math
import re

import numpy as np
from torch import Tensor

from outpace.verify.distribution import Counts, draw
from outpace.verify.parity import GREEDY, PLAIN
from outpace.verify.plan import Subject, VerifyPlan
from outpace.verify.records import Check

RESAMPLES = 200  # for the interval of the KL divergence


def price(plan: VerifyPlan, subject: Subject) -> Check:
    found = [counts for index in range(min(plan.contexts, len(plan.prompts))) for counts in draw(plan, subject, index)]
    kl, low, high = _pooled(found)
    indices = list(range(len(plan.prompts)))
    lossy, plain = (plan.run(who, GREEDY, indices) for who in (subject, PLAIN))
    changed = sum(a.tokens != b.tokens for a, b in zip(lossy, plain, strict=True))
    likely = [_mean_logprob(plan, [done.tokens for done in who]) for who in (lossy, plain)]
    figures = {
        "kl": kl, "kl_low": low, "kl_high": high, "answers_changed": changed, "answers": len(indices),
        "logprob": likely[0], "logprob_plain": likely[1],
        "tokens_per_pass": sum(d.stats.tokens for d in lossy) / max(1, sum(d.stats.passes for d in lossy)),
    }  # fmt: skip
    summary = (
        f"KL {kl:.3f} nats ({low:.3f} to {high:.3f}) from the target's distribution; "
        f"{changed} of {len(indices)} greedy answers changed; "
        f"mean log-probability {likely[0]:.3f}, plain {likely[1]:.3f}"
    )
    if plan.answers:
        scores = [_score([done.text for done in who], plan.answers) for who in (lossy, plain)]
        figures |= {"score": scores[0], "score_plain": scores[1], "scored": len(plan.answers)}
        summary += f"; task score {scores[0]:.0%}, plain {scores[1]:.0%} of {len(plan.answers)}"
    return Check(subject.name, "price", "price", summary, figures=figures)


def kl_divergence(drawn: dict[int, int], distribution: Tensor) -> float:
    """Estimate KL(draws || distribution) in nats, with the Miller-Madow correction of the bias."""  # [vocab]
    size = sum(drawn.values())
    raw = sum(n / size * math.log(n / size / max(float(distribution[token]), 1e-12)) for token, n in drawn.items())
    return raw - (len(drawn) - 1) / (2 * size)


def _pooled(found: list[Counts]) -> tuple[float, float, float]:
    """The mean KL divergence over all texts, weighted by draws, with a 95 % bootstrap interval."""
    random = np.random.default_rng(0)

    def once(resampled: bool) -> float:
        total = 0.0
        for counts in found:
            drawn = dict(counts.drawn)
            if resampled:
                shares = np.array(list(drawn.values())) / counts.size
                drawn = dict(zip(drawn, map(int, random.multinomial(counts.size, shares)), strict=True))
            total += counts.size * kl_divergence({t: n for t, n in drawn.items() if n}, counts.distribution)
        return total / sum(counts.size for counts in found)

    spread = [once(True) for _ in range(RESAMPLES)]
    return once(False), float(np.quantile(spread, 0.025)), float(np.quantile(spread, 0.975))


def _mean_logprob(plan: VerifyPlan, answers: list[list[int]]) -> float:
    """The target's mean log-probability per token of these answers."""
    total, count = 0.0, 0
    for prompt, tokens in zip(plan.prompts, answers, strict=True):
        logits = plan.judge.reference.precise((prompt + tokens)[:-1], len(tokens))  # [tokens, vocab]
        logprobs = logits.log_softmax(-1)
        total += sum(float(logprobs[i, token]) for i, token in enumerate(tokens))
        count += len(tokens)
    return total / max(count, 1)


def _score(texts: list[str], answers: dict[int, str]) -> float:
    return sum(is_right(texts[index], answer) for index, answer in answers.items()) / len(answers)


def is_right(text: str, answer: str) -> bool:
    """A numeric answer must be the last number of the text; any other answer must occur in it."""
    if re.fullmatch(r"-?[\d.,]+", answer):
        numbers = re.findall(r"-?\d[\d,]*\.?\d*", text)
        return bool(numbers) and float(numbers[-1].replace(",", "").rstrip(".")) == float(answer.replace(",", ""))
    return answer.casefold() in text.casefold()
