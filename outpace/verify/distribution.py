"""The check that sampled tokens follow the distribution that the model and the sampling settings define.

Many short answers to one prompt, each with its own seed, give counts of the next token after the prompt and after each
frequent prefix of an answer. The expected distribution comes from a plain pass of the model and Transformers' own
filters, so it shares no code with what it tests. Pearson's chi-squared test compares the two; rare tokens share a bin.
The null hypothesis is composite: any distribution within the model's own rounding of the expected one. Holm's method
corrects for multiple tests.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outpace.errors import OutpaceError
from outpace.sampling.settings import Sampling
from outpace.verify.expected import expected_distribution
from outpace.verify.judge import SAFETY, rounding_of
from outpace.verify.plan import Subject, VerifyPlan
from outpace.verify.records import Check

DEPTH = 3  # tokens of each short answer: the later ones are reached through accepted draft tokens
MIN_DRAWS = 50  # least draws after a prefix for a test
MIN_EXPECTED = 5.0  # least expected draws of a bin, by the usual rule
POWER = 0.9

Following = dict[tuple[Any, ...], Counter[Any]]  # prefix -> counts of the next token


@dataclass(frozen=True)
class Counts:
    """The tokens drawn after one text, and the distribution that they should follow."""

    prompt: int
    prefix: list[int]
    drawn: Counter[int]
    distribution: Tensor  # [vocab], float64, in higher precision
    native: Tensor  # [vocab], in the model's own precision
    impossible: int  # draws of tokens that the distribution excludes even with rounding

    @property
    def size(self) -> int:
        return self.drawn.total()


@dataclass(frozen=True)
class PearsonTest:
    """The result of Pearson's test for one text."""

    __test__ = False  # not a test for pytest to collect

    prompt: int
    prefix: list[int]
    draws: int
    bins: int
    chi2: float
    p: float
    effect: float  # the smallest deviation (Cohen's w) that is detected with a power of 90 %


def sampled_distribution(plan: VerifyPlan, subject: Subject) -> Check:
    """Run chi-squared tests of the counts, corrected for multiple testing."""
    name = "sampled distribution"
    found = [counts for index in range(min(plan.contexts, len(plan.prompts))) for counts in draw(plan, subject, index)]
    tests = [chi_squared(counts, plan.alpha / len(found)) for counts in found]
    wrong = holm([test.p for test in tests], plan.alpha)
    impossible = sum(counts.impossible for counts in found)
    draws = sum(test.draws for test in tests)
    effects = [test.effect for test in tests if test.bins > 1]
    least = min((test.p for test in tests), default=1.0)
    summary = (
        f"{draws} draws after {len(tests)} texts: least p {least:.2g} (Holm, alpha {plan.alpha:g}), "
        f"{impossible} impossible; {describe_power(effects)}"
    )
    figures: dict[str, Any] = {
        "draws": draws, "tests": len(tests), "rejected": wrong, "impossible": impossible, "alpha": plan.alpha,
        "power": POWER, "effects": effects, "p": [test.p for test in tests], "each": [vars(test) for test in tests],
    }  # fmt: skip
    return Check(subject.name, name, "fail" if wrong or impossible else "pass", summary, figures=figures)


def describe_power(effects: list[float]) -> str:
    """Describe the smallest deviation that the most and the least sensitive test would detect."""
    if not effects:
        return "the distribution left no choice, so nothing was tested"
    return f"detects w >= {min(effects):.2f} (after the rarest text {max(effects):.2f}) with power {POWER:.0%}"


def draw(plan: VerifyPlan, subject: Subject, index: int) -> list[Counts]:
    """Count the next token after a prompt and after each frequent prefix of its answers."""
    prompt = plan.prompts[index]
    requests = [
        plan.request(subject, prompt, **vars(replace(plan.sampling, seed=plan.sampling.seed + i)), ignore_eos=True)
        for i in range(plan.samples)
    ]
    short = [replace(request, max_tokens=DEPTH) for request in requests]
    done = plan.model.generate(short)
    failed = next((completion.error for completion in done if completion.error is not None), None)
    if failed is not None:
        raise OutpaceError(f"{subject.name} failed during sampling: {failed}")
    found = following([completion.tokens for completion in done])
    frequent = {prefix: drawn for prefix, drawn in found.items() if drawn.total() >= MIN_DRAWS}
    return [_counts(plan, index, list(prefix), drawn) for prefix, drawn in frequent.items()]


def following(texts: list[list[Any]]) -> Following:
    """Count the next token after each prefix of these texts."""
    out: Following = {}
    for text in texts:
        for depth, unit in enumerate(text):
            out.setdefault(tuple(text[:depth]), Counter())[unit] += 1
    return out


def _counts(plan: VerifyPlan, index: int, prefix: list[int], drawn: Counter[int]) -> Counts:
    text, start = plan.prompts[index] + prefix, len(plan.prompts[index])
    reference = plan.judge.reference
    precise, native = reference.precise(text, 1), reference.native(text, 1)
    distribution = expected_distribution(precise[0], text, start, plan.sampling)
    rounding = rounding_of(native, precise)
    impossible = sum(
        count
        for token, count in drawn.items()
        if distribution[token] == 0 and not _could_be(precise[0], token, rounding, plan.sampling, text, start)
    )
    return Counts(
        index, prefix, drawn, distribution, expected_distribution(native[0], text, start, plan.sampling), impossible
    )


def _could_be(logits: Tensor, token: int, rounding: float, sampling: Sampling, text: list[int], start: int) -> bool:
    """Whether rounding alone can give the token a probability above 0."""
    moved = logits - rounding
    moved[token] += 2 * rounding
    return bool(expected_distribution(moved, text, start, sampling)[token] > 0)


def chi_squared(counts: Counts, alpha: float) -> PearsonTest:
    """Run Pearson's test against all distributions within the model's own rounding of the expected one."""
    from scipy.optimize import brentq
    from scipy.stats import ncx2

    size, bins = counts.size, _bins(counts)
    if len(bins) < 2:  # nearly all probability is on one token
        return PearsonTest(counts.prompt, counts.prefix, size, len(bins), 0.0, 1.0, float("inf"))
    chi2 = sum((b.drawn - size * b.distribution) ** 2 / (size * b.distribution) for b in bins)
    slack = size * sum((SAFETY * (b.native - b.distribution)) ** 2 / b.distribution for b in bins)
    freedom = len(bins) - 1
    p = float(ncx2.sf(chi2, freedom, slack))
    critical = float(ncx2.isf(alpha, freedom, slack))
    effect = brentq(lambda w: ncx2.sf(critical, freedom, size * w * w) - POWER, 1e-6, 1e3)
    return PearsonTest(counts.prompt, counts.prefix, size, len(bins), float(chi2), p, float(effect))


@dataclass(frozen=True)
class ProbabilityBin:
    """The draws of one token, or of all rare tokens together, and its probability in both precisions."""

    drawn: int
    distribution: float
    native: float


def _bins(counts: Counts) -> list[ProbabilityBin]:
    common = torch.nonzero(counts.distribution * counts.size >= MIN_EXPECTED).flatten().tolist()
    bins = [ProbabilityBin(counts.drawn[t], float(counts.distribution[t]), float(counts.native[t])) for t in common]
    rest = ProbabilityBin(
        counts.size - sum(b.drawn for b in bins), 1 - sum(b.distribution for b in bins), 1 - sum(b.native for b in bins)
    )
    if rest.distribution * counts.size >= MIN_EXPECTED or not bins:
        return [*bins, rest]
    # Too small for its own bin: merge it into the smallest one.
    bins.sort(key=lambda b: -b.distribution)
    last = bins.pop()
    return [
        *bins,
        ProbabilityBin(last.drawn + rest.drawn, last.distribution + rest.distribution, last.native + rest.native),
    ]


def holm(p: list[float], alpha: float) -> int:
    """How many null hypotheses are rejected, where the probability that any of them was true is at most `alpha`."""
    for i, value in enumerate(sorted(p)):
        if value > alpha / (len(p) - i):
            return i
    return len(p)
