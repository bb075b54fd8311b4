"""Comparison of two answers: where they diverge, and whether the servers' own rounding explains it.

Two runs of one model report slightly different logprobs, which shows its rounding from outside. Where two answers
diverge, it is a tie if both tokens are equally good within that rounding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outpace.text import first_difference
from outpace.verify.judge import SAFETY
from outpace.verify.records import Check, Divergence, verdict_of
from outpace.verify.servers.reply import Reply, Token

NEAR = -3.0  # tokens above this logprob (5 %) could be chosen: their rounding counts
MAX_DRIFT = 0.25  # 16-bit rounding explains no larger difference of logprobs between two runs
END = "(the end)"

Pair = tuple[Reply, Reply]


@dataclass(frozen=True)
class AnswerDifference:
    """The first position at which two answers differ."""

    at: int  # position, in tokens or in characters
    texts: tuple[str, str]
    ids: tuple[int, int]  # -1: unknown, or the end
    by_tokens: bool


def first_difference_of(wanted: Reply, got: Reply) -> AnswerDifference | None:
    """Find the first difference by token ids if both sides have them, else by token texts, else by characters."""
    if wanted.ids is not None and got.ids is not None:
        at = first_difference(wanted.ids, got.ids)
        if at is not None:
            return AnswerDifference(at, (_text(wanted, at), _text(got, at)), (_id(wanted, at), _id(got, at)), True)
    elif wanted.tokens is not None and got.tokens is not None:
        at = first_difference([t.text for t in wanted.tokens], [t.text for t in got.tokens])
        if at is not None:
            return AnswerDifference(at, (_text(wanted, at), _text(got, at)), (-1, -1), True)
    at = first_difference(wanted.text, got.text)
    if at is None:
        return None
    return AnswerDifference(at, (wanted.text[at : at + 8] or END, got.text[at : at + 8] or END), (-1, -1), False)


def first_divergence(pair: Pair, index: int, drift: float | None) -> Divergence | None:
    """Find the first divergence of two answers, and whether it is a tie or a bug."""
    found = first_difference_of(*pair)
    if found is None:
        return None
    gap, rounding = _gap(pair, found), rounding_of(drift)
    explained = gap is not None and rounding is not None and gap <= 2 * rounding
    return Divergence(index, found.at, *found.ids, gap, rounding, explained, found.texts)


def _gap(pair: Pair, found: AnswerDifference) -> float | None:
    """The larger lag of the two sides; None if logprobs are missing, or if an answer was cut off."""
    ended = [reply for reply, text in zip(pair, found.texts, strict=True) if text == END]
    if not found.by_tokens or any(reply.finish_reason != "stop" for reply in ended):
        return None
    shown = [reply.tokens[found.at] for reply in pair if reply.tokens and found.at < len(reply.tokens)]
    return max((lag(token, found.texts) for token in shown if not token.blank), default=None)


def lag(token: Token, texts: Iterable[str]) -> float:
    """How far the worst of these tokens is behind the likeliest one in logprobs; a lower bound for tokens not shown."""
    shown = dict(token.top)
    if token.logprob is not None:
        shown[token.text] = token.logprob
    least = min(shown.values())
    # Most servers do not show the token that ends an answer: the best other token stands for it.
    end = max((value for text, value in shown.items() if text != token.text), default=least)
    return max(shown.values()) - min(shown.get(text, end if text == END else least) for text in texts)


def rounding_of(drift: float | None) -> float | None:
    """Bound how far rounding moves a logprob: the measured drift with a margin, within what 16 bits can explain."""
    return None if drift is None else SAFETY * min(drift, MAX_DRIFT)


def drift_of(pairs: Iterable[Pair]) -> float | None:
    """The largest difference in logprobs of likely tokens before the answers diverge; None if there are none."""
    return max((abs(a - b) for pair in pairs for a, b in common_logprobs(pair) if max(a, b) > NEAR), default=None)


def common_logprobs(pair: Pair, chosen: bool = False) -> list[tuple[float, float]]:
    """Logprobs of the same tokens after the same text on both sides: all those shown, or only the chosen tokens'."""
    out = []
    for a, b in zip(pair[0].tokens or [], pair[1].tokens or [], strict=False):
        if a.text != b.text:
            break
        if a.blank or b.blank or a.logprob is None or b.logprob is None:
            continue
        out.append((a.logprob, b.logprob))
        if not chosen:
            out += [(a.top[text], b.top[text]) for text in a.top.keys() & b.top.keys() if text != a.text]
    return out


def equality(subject: str, name: str, divergences: list[Divergence], answers: int, note: str = "") -> Check:
    """Build the check that `answers` pairs of answers are equal, given their divergences."""
    summary = f"{answers - len(divergences)} of {answers} answers equal"
    bugs = [d for d in divergences if not d.explained]
    if divergences:
        worst = max(bugs or divergences, key=lambda d: float("inf") if d.gap is None else d.gap)
        kind = f"{len(bugs)} not explained by rounding" if bugs else "all ties"
        gap = "" if worst.gap is None else f", gap {worst.gap:.3g}"
        if worst.gap is not None and worst.rounding is not None:
            gap += f" with rounding {worst.rounding:.3g}"
        summary += f"; {kind} (prompt {worst.prompt}, position {worst.position}{gap})"
    if any(d.gap is None and END not in d.texts for d in bugs):
        summary += "; ties and bugs cannot be told apart, because the server shows no logprobs"
    figures = {"answers": answers, "divergences": len(divergences), "unexplained": len(bugs)}
    return Check(subject, name, verdict_of(divergences), summary + note, divergences, figures)


def _text(reply: Reply, at: int) -> str:
    if at >= (reply.length or 0):
        return END
    return reply.tokens[at].text if reply.tokens is not None else ""


def _id(reply: Reply, at: int) -> int:
    return reply.ids[at] if reply.ids is not None and at < len(reply.ids) else -1
