"""Compare: where two answers part, and whether the servers' own rounding explains it.

Two runs of one model report logprobs that differ a little: that is its rounding, seen from outside. At the place where
two answers part, both tokens should be as good as each other within that rounding. Else it is no tie.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outpace.text import first_difference
from outpace.verify.judge import SAFETY
from outpace.verify.records import Check, Divergence, verdict_of
from outpace.verify.servers.reply import Reply, Token

NEAR = -3.0  # tokens with at least this logprob (5 %) could be chosen: their rounding counts
MOST = 0.25  # more than this between two runs is not the rounding of 16-bit arithmetic
END = "(the end)"

Pair = tuple[Reply, Reply]


@dataclass(frozen=True)
class AnswerDifference:
    """The first place at which two answers differ."""

    at: int  # in tokens, or in characters
    texts: tuple[str, str]
    ids: tuple[int, int]  # -1: not known, or the end
    by_tokens: bool


def parting(wanted: Reply, got: Reply) -> AnswerDifference | None:
    """By token ids where both show them, else by token texts, else by characters."""
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


def between(pair: Pair, index: int, drift: float | None) -> Divergence | None:
    """The first divergence of two answers, told apart as a tie or a bug."""
    found = parting(*pair)
    if found is None:
        return None
    gap, rounding = _gap(pair, found), rounding_of(drift)
    explained = gap is not None and rounding is not None and gap <= 2 * rounding
    return Divergence(index, found.at, *found.ids, gap, rounding, explained, found.texts)


def _gap(pair: Pair, found: AnswerDifference) -> float | None:
    """The largest lag on either side; None where it is not shown, or where an answer was cut off."""
    ended = [reply for reply, text in zip(pair, found.texts, strict=True) if text == END]
    if not found.by_tokens or any(reply.finish_reason != "stop" for reply in ended):
        return None
    shown = [reply.tokens[found.at] for reply in pair if reply.tokens and found.at < len(reply.tokens)]
    return max((lag(token, found.texts) for token in shown if not token.blank), default=None)


def lag(token: Token, texts: Iterable[str]) -> float:
    """How far the worst of these tokens lies behind the best one, by one side's logprobs; at least, if not shown."""
    shown = dict(token.top)
    if token.logprob is not None:
        shown[token.text] = token.logprob
    least = min(shown.values())
    # The token that ends an answer is mostly not shown by name: the best other one stands for it.
    end = max((value for text, value in shown.items() if text != token.text), default=least)
    return max(shown.values()) - min(shown.get(text, end if text == END else least) for text in texts)


def rounding_of(drift: float | None) -> float | None:
    """How far a logprob may move: as two runs showed it, with a margin, but no more than 16 bits can explain."""
    return None if drift is None else SAFETY * min(drift, MOST)


def drift_of(pairs: Iterable[Pair]) -> float | None:
    """The largest difference of logprobs of likely tokens before the answers part; None where there are none."""
    return max((abs(a - b) for pair in pairs for a, b in common_logprobs(pair) if max(a, b) > NEAR), default=None)


def common_logprobs(pair: Pair, chosen: bool = False) -> list[tuple[float, float]]:
    """Logprobs of the same tokens after the same text on both sides: all that are shown, or those of chosen tokens."""
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
    """The verdict over so many answers."""
    summary = f"{answers - len(divergences)} of {answers} answers equal"
    bugs = [d for d in divergences if not d.explained]
    if divergences:
        worst = max(bugs or divergences, key=lambda d: float("inf") if d.gap is None else d.gap)
        kind = f"{len(bugs)} not explained by rounding" if bugs else "all ties"
        gap = "" if worst.gap is None else f", gap {worst.gap:.3g}"
        if worst.gap is not None and worst.rounding is not None:
            gap += f" with rounding {worst.rounding:.3g}"
        summary += f"; {kind} (prompt {worst.prompt}, place {worst.position}{gap})"
    if any(d.gap is None and END not in d.texts for d in bugs):
        summary += "; logprobs, which the server does not show, would tell ties from bugs"
    figures = {"answers": answers, "divergences": len(divergences), "unexplained": len(bugs)}
    return Check(subject, name, verdict_of(divergences), summary + note, divergences, figures)


def _text(reply: Reply, at: int) -> str:
    if at >= (reply.length or 0):
        return END
    return reply.tokens[at].text if reply.tokens is not None else ""


def _id(reply: Reply, at: int) -> int:
    return reply.ids[at] if reply.ids is not None and at < len(reply.ids) else -1
