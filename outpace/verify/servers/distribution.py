"""The check that a server's sampled tokens are distributed as without speculation, and as the local model says.

Many short answers to one prompt give counts of the next token after the prompt and after each frequent prefix. A server
without speculation gives other draws, not a distribution: a chi-squared test of homogeneity compares the two samples.
With a local model the distribution is known, and the tests are those of `outpace.verify.distribution`. If a server
shows no tokens, characters take their place.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from outpace.sampling.settings import Sampling
from outpace.verify.distribution import (
    DEPTH,
    MIN_DRAWS,
    MIN_EXPECTED,
    POWER,
    Counts,
    Following,
    PearsonTest,
    chi_squared,
    describe_power,
    following,
    holm,
)
from outpace.verify.expected import expected_distribution
from outpace.verify.judge import rounding_of
from outpace.verify.records import Check
from outpace.verify.servers.answers import ServerAnswers
from outpace.verify.servers.client import Server, sampling_fields
from outpace.verify.servers.compare import END, MAX_DRIFT
from outpace.verify.servers.local import LocalJudge
from outpace.verify.servers.reply import Reply

COIN = math.log(0.5)


@dataclass(frozen=True)
class PairedCounts:
    """The counts of next tokens after one text, with speculation and without."""

    prompt: int
    prefix: list[Any]
    on: Counter[Any]
    off: Counter[Any]


@dataclass(frozen=True)
class TestOutcome:
    """The result of one test, of either kind."""

    against: str  # "off" or "reference"
    prompt: int
    prefix: list[Any]
    draws: int
    bins: int
    chi2: float
    p: float
    effect: float  # the smallest deviation (Cohen's w) that is detected with a power of 90 %


def sampled_distribution(answers: ServerAnswers, local: LocalJudge | None) -> Check:
    """Test every prefix with enough draws, corrected for multiple testing."""
    plan, both, counts = answers.plan, list[PairedCounts](), list[Counts]()
    unread = 0
    for index in contexts(answers):
        drawn = draw(answers, answers.on, index)
        if answers.off is not None:
            both += compared(index, drawn, draw(answers, answers.off, index))
        if local is not None:
            readable = [reply for reply in drawn if local.tokens(reply)[1] != "text"]
            unread += len(drawn) - len(readable)
            prompt = local.prompt(plan.prompts[index], drawn[0])
            distribution = Expected(local, plan.sampling, prompt, local.rounding)
            counts += distribution.counts(index, readable)
    each = plan.alpha / max(1, len(both) + len(counts))
    found = [homogeneity(pair, each, answers.drift or 0.0) for pair in both]
    found += [_found(chi_squared(count, each)) for count in counts]
    if not found:
        return Check(
            answers.subject, "sampled distribution", "skip", "the server does not show the tokens of its samples"
        )
    return _check(answers, found, sum(count.impossible for count in counts), unread)


def _check(answers: ServerAnswers, found: list[TestOutcome], impossible: int, unread: int) -> Check:
    plan, wrong = answers.plan, holm([test.p for test in found], answers.plan.alpha)
    draws, least = sum(test.draws for test in found), min(test.p for test in found)
    effects = [test.effect for test in found if test.bins > 1]
    summary = (
        f"{draws} draws after {len(found)} texts, {plan.samples} answers per prompt: least p {least:.2g} (Holm, alpha "
        f"{plan.alpha:g}), {impossible} impossible; {describe_power(effects)}"
    )
    if unread:
        summary += f"; {unread} answers left out, as their tokens could not be read"
    figures: dict[str, Any] = {
        "draws": draws, "tests": len(found), "rejected": wrong, "impossible": impossible, "alpha": plan.alpha,
        "power": POWER, "effects": effects, "p": [test.p for test in found], "each": [vars(test) for test in found],
    }  # fmt: skip
    name, bad = "sampled distribution", bool(wrong or impossible)
    return Check(answers.subject, name, "fail" if bad else "pass", summary, figures=figures)


def contexts(answers: ServerAnswers) -> list[int]:
    """Choose the prompts whose first token has a probability nearest to 1/2; without logprobs, the first prompts.

    Then several first tokens are drawn, each often enough to test the tokens after it, which may be draft tokens.
    """
    logprobs = [(reply.logprobs or [None])[0] or 0.0 for reply in answers.first]
    return sorted(range(len(logprobs)), key=lambda index: abs(logprobs[index] - COIN))[: answers.plan.contexts]


def draw(answers: ServerAnswers, server: Server, index: int) -> list[Reply]:
    """Request short answers, each with its own seed: speculation acts from the second token on."""
    plan = answers.plan
    fields = sampling_fields(plan.sampling) | {"max_tokens": DEPTH}
    asked = [(plan.prompts[index], fields | {"seed": plan.sampling.seed + 1 + i}) for i in range(plan.samples)]
    return server.many(asked, plan.concurrency)


def compared(index: int, on: list[Reply], off: list[Reply]) -> list[PairedCounts]:
    """Count the next tokens on both sides, after each prefix with enough draws on both."""
    by_tokens = all(reply.tokens is not None for reply in [*on, *off] if reply.text)
    first, second = (following([_units(reply, by_tokens) for reply in replies]) for replies in (on, off))
    often = [prefix for prefix, drawn in first.items() if min(drawn.total(), _total(second, prefix)) >= MIN_DRAWS]
    return [PairedCounts(index, list(prefix), first[prefix], second[prefix]) for prefix in often]


def _units(reply: Reply, by_tokens: bool) -> list[str]:
    units = [token.text for token in reply.tokens or []] if by_tokens else list(reply.text)
    return [*units, END] if reply.finish_reason == "stop" else units


def _total(found: Following, prefix: tuple[Any, ...]) -> int:
    return found[prefix].total() if prefix in found else 0


def homogeneity(both: PairedCounts, alpha: float, drift: float) -> TestOutcome:
    """Run Pearson's test that two samples share one distribution, up to the server's own rounding."""
    from scipy.optimize import brentq
    from scipy.stats import ncx2

    sizes = (both.on.total(), both.off.total())
    bins = _bins(both, sizes)
    about = ("off", both.prompt, both.prefix, sum(sizes), len(bins))
    if len(bins) < 2:
        return TestOutcome(*about, 0.0, 1.0, float("inf"))
    cells = [(n, size * sum(pair) / sum(sizes)) for pair in bins for n, size in zip(pair, sizes, strict=True)]
    chi2 = sum((n - mean) ** 2 / mean for n, mean in cells)
    weight, freedom = sizes[0] * sizes[1] / sum(sizes), len(bins) - 1
    slack = weight * min(drift, MAX_DRIFT) ** 2  # a logprob that moves by d moves its probability by the share d
    critical = float(ncx2.isf(alpha, freedom, slack))
    effect = brentq(lambda w: ncx2.sf(critical, freedom, weight * w * w) - POWER, 1e-6, 1e3)
    return TestOutcome(*about, float(chi2), float(ncx2.sf(chi2, freedom, slack)), float(effect))


def _bins(both: PairedCounts, sizes: tuple[int, int]) -> list[tuple[int, int]]:
    """Draws of each token on both sides; rare tokens share a bin."""
    share = min(sizes) / sum(sizes)
    counts = sorted(((both.on[unit], both.off[unit]) for unit in both.on | both.off), key=sum, reverse=True)
    common = [pair for pair in counts if sum(pair) * share >= MIN_EXPECTED]
    rest = _sum(counts[len(common) :])
    if sum(rest) * share >= MIN_EXPECTED or not common:
        return [*common, rest]
    return [*common[:-1], _sum([common[-1], rest])]


def _sum(pairs: Seq[tuple[int, int]]) -> tuple[int, int]:
    return sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)


@dataclass(frozen=True)
class Expected:
    """The local model's distribution after one prompt."""

    local: LocalJudge
    sampling: Sampling
    prompt: list[int]
    rounding: float  # of the server's logits, compared with the local model

    def counts(self, index: int, replies: list[Reply]) -> list[Counts]:
        """Count the next tokens after each prefix with enough draws, and add the expected distribution."""
        found = following([self._read(reply) for reply in replies])
        often = {prefix: drawn for prefix, drawn in found.items() if drawn.total() >= MIN_DRAWS}
        return [self._counts(index, list(prefix), drawn) for prefix, drawn in often.items()]

    @property
    def _stops(self) -> list[int]:
        return sorted(self.local.model.stop_token_ids)

    def _read(self, reply: Reply) -> list[int]:
        """Read the tokens; the first stop token stands for all, as a server does not say which one ended the answer."""
        stops = self._stops
        tokens = [stops[0] if token in stops else token for token in self.local.tokens(reply)[0]]
        ended = reply.finish_reason == "stop" and stops and tokens[-1:] != stops[:1]
        return [*tokens, stops[0]] if ended else tokens

    def _counts(self, index: int, prefix: list[int], drawn: Counter[int]) -> Counts:
        reference, text = self.local.judge.reference, self.prompt + prefix
        precise, native = reference.precise(text, 1), reference.native(text, 1)
        distribution = self._distribution(precise[0], text)
        rounding = max(rounding_of(native, precise), self.rounding)
        strange = {token: count for token, count in drawn.items() if distribution[token] == 0}
        impossible = sum(n for token, n in strange.items() if not self._could_be(precise[0], token, rounding, text))
        return Counts(index, prefix, drawn, distribution, self._distribution(native[0], text), impossible)

    def _could_be(self, logits: Tensor, token: int, rounding: float, text: list[int]) -> bool:
        """Whether rounding alone can give the token a probability above 0."""
        moved = logits - rounding
        moved[token] += 2 * rounding
        return bool(self._distribution(moved, text)[token] > 0)

    def _distribution(self, logits: Tensor, text: list[int]) -> Tensor:
        distribution = expected_distribution(logits, text, len(self.prompt), self.sampling)  # [vocab]
        if self._stops:
            mass = distribution[self._stops].sum()
            distribution[self._stops] = 0.0
            distribution[self._stops[0]] = mass
        return distribution


def _found(test: PearsonTest) -> TestOutcome:
    return TestOutcome("reference", test.prompt, test.prefix, test.draws, test.bins, test.chi2, test.p, test.effect)
