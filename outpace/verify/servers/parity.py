"""Checks of a server's answers: repeatable, equal without speculation and under concurrency, logprobs, and seeds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outpace.verify.records import Check, Divergence
from outpace.verify.servers.answers import ServerAnswers
from outpace.verify.servers.client import Server, sampling_fields
from outpace.verify.servers.compare import Pair, common_logprobs, equality, first_divergence, lag, rounding_of
from outpace.verify.servers.local import LocalJudge
from outpace.verify.servers.reply import Reply

MEAN, LARGEST = 0.05, 0.5  # differences of logprobs that 16-bit arithmetic explains


def repeatable(answers: ServerAnswers) -> Check:
    """Check that the same greedy request twice gives the same answer, on either server."""
    both = [answers.repeats, answers.plain_repeats]
    found = [d for repeats in both for d in _divergences(repeats, answers.drift)]
    note = f"; logprobs move by up to {answers.drift:.2g} between runs" if answers.drift is not None else ""
    if any(not d.explained for d in found):
        note += "; the server is not deterministic, so later checks leave out the prompts whose answers vary"
    check = equality(answers.subject, "repeatable", found, sum(map(len, both)), note)
    return replace(check, figures=check.figures | {"drift": answers.drift})


def greedy_equals_off(answers: ServerAnswers) -> Check:
    """Check that greedy answers equal those without speculation."""
    check = _equal(answers, "greedy = off", answers.pairs, answers.unstable(answers.plain_repeats))
    on, off = _accepted(answers.first), _accepted(answers.plain)
    if off:
        summary = f"nothing was compared: with speculation turned off, the server still accepted {off} draft tokens"
        return replace(check, verdict="fail", summary=summary, figures=check.figures | {"accepted_off": off})
    if on is None:
        return check
    summary = f"{check.summary}; {on} tokens were accepted draft tokens"
    return replace(check, summary=summary, figures=check.figures | {"accepted": on})


def concurrent_equals_alone(answers: ServerAnswers) -> Check:
    """Check that concurrent greedy requests get the same answers as each one alone."""
    plan, unstable = answers.plan, answers.unstable(answers.repeats)
    rounds = -(-max(plan.concurrency, len(plan.prompts)) // len(plan.prompts))  # enough requests for the concurrency
    asked = [(prompt, answers.greedy) for prompt in plan.prompts * rounds]
    together = answers.on.many(asked, plan.concurrency)
    pairs = list(zip(answers.first * rounds, together, strict=True))
    lost = {i for i in range(len(pairs)) if i % len(plan.prompts) in unstable}
    check = _equal(answers, "concurrent = alone", pairs, lost)
    found = [replace(d, prompt=d.prompt % len(plan.prompts)) for d in check.divergences]
    return replace(check, divergences=found, figures=check.figures | {"concurrency": plan.concurrency})


def logprobs(answers: ServerAnswers, local: LocalJudge | None) -> Check:
    """Check that logprobs are filled in, rank greedy tokens first, and agree with those of the reference."""
    name, subject = "logprobs", answers.subject
    shown = [token for reply in answers.first for token in reply.tokens or [] if token.logprob is not None]
    if not shown:
        return Check(subject, name, "skip", "the server shows no logprobs")
    blank = sum(token.blank for token in shown)
    if blank == len(shown):
        return Check(subject, name, "fail", "every reported logprob is 0.0")
    behind = [lag(token, [token.text]) for token in shown if not token.blank]
    allowed = 2 * (rounding_of(answers.drift) or 0.0)
    worse = sum(gap > allowed for gap in behind)
    said = [f"{worse} of {len(behind)} greedy tokens are not the likeliest" if worse else "greedy tokens are likeliest"]
    # A token with probability 1 has logprob 0.0 too, but then other tokens are shown beside it.
    hollow = blank if any(token.top for token in shown) else 0
    if hollow:
        said.append(f"{hollow} of {len(shown)} logprobs are not filled in (0.0, and no other token beside it)")
    good = not worse and not hollow
    figures: dict[str, Any] = {"tokens": len(shown), "not_likeliest": worse, "not_filled_in": hollow}
    references: dict[str, list[tuple[float, float]]] = {}
    if answers.off is not None:
        references["off"] = [pair for both in answers.pairs for pair in common_logprobs(both, chosen=True)]
    if local is not None:
        references["reference"] = local.compared
    for reference, pairs in references.items():
        agreed, summary, measured = agreement(pairs)
        good &= agreed
        said.append(f"compared with {reference}: {summary}")
        figures[reference] = measured
    return Check(subject, name, "pass" if good else "fail", "; ".join(said), figures=figures)


def agreement(pairs: list[tuple[float, float]]) -> tuple[bool, str, dict[str, float]]:
    """Whether logprobs of the same tokens agree within 16-bit rounding, with a summary and the figures."""
    if not pairs:
        return True, "nothing to compare", {}
    differences = [abs(a - b) for a, b in pairs]
    mean, largest = sum(differences) / len(differences), max(differences)
    summary = f"{len(differences)} logprobs differ by {mean:.2g} on average and {largest:.2g} at most"
    good = mean <= MEAN and largest <= LARGEST
    if not good:
        summary += f"; 16-bit arithmetic explains only {MEAN:g} and {LARGEST:g}"
    return good, summary, {"compared": len(differences), "mean": mean, "largest": largest}


def same_seed(answers: ServerAnswers) -> Check:
    """Check that the same seed gives the same text again. It need not be the text without speculation."""
    name, subject, count = "same seed", answers.subject, len(answers.plan.prompts)
    on = _seeded(answers, answers.on)
    kept = _kept(on, _seeded(answers, answers.on))
    figures = {"answers": count, "kept": kept}
    summary = f"{kept} of {count} sampled answers repeat with the same seed"
    off_keeps = True
    if answers.off is not None:
        off = _seeded(answers, answers.off)
        off_kept, shared = _kept(off, _seeded(answers, answers.off)), _kept(on, off)
        off_keeps = off_kept == count
        figures |= {"kept_off": off_kept, "same_as_off": shared}
        summary += f"; {shared} equal those without speculation, which only some servers promise"
    if kept == count:
        return Check(subject, name, "pass", summary, figures=figures)
    if not off_keeps:
        return Check(subject, name, "skip", summary + "; nor does plain decoding keep seeds", figures=figures)
    if kept and answers.drift:
        return Check(subject, name, "tie", summary + "; varying rounding can change a draw", figures=figures)
    return Check(subject, name, "fail", summary, figures=figures)


def _accepted(replies: list[Reply]) -> int | None:
    """The number of accepted draft tokens; None if the server does not report it."""
    said = [reply.accepted for reply in replies if reply.accepted is not None]
    return sum(said) if said else None


def _seeded(answers: ServerAnswers, server: Server) -> list[str]:
    plan = answers.plan
    fields = sampling_fields(plan.sampling) | {"max_tokens": plan.max_tokens}
    return [server.complete(p, **fields, seed=plan.sampling.seed + 1 + i).text for i, p in enumerate(plan.prompts)]


def _kept(first: list[str], again: list[str]) -> int:
    return sum(a == b for a, b in zip(first, again, strict=True))


def _equal(answers: ServerAnswers, name: str, pairs: list[Pair], lost: set[int]) -> Check:
    """Check that the pairs are equal, except those lost because the server is not repeatable."""
    note = f"; {len(lost)} left out, as the server is not repeatable there" if lost else ""
    if len(lost) == len(pairs):
        return Check(answers.subject, name, "skip", "the server is not repeatable on any prompt")
    found = [d for d in _divergences(pairs, answers.drift) if d.prompt not in lost]
    return equality(answers.subject, name, found, len(pairs) - len(lost), note)


def _divergences(pairs: list[tuple[Reply, Reply]], drift: float | None) -> list[Divergence]:
    found = (first_divergence(pair, index, drift) for index, pair in enumerate(pairs))
    return [divergence for divergence in found if divergence is not None]
