"""The judge of finished answers: is each token the model's own choice, or as good within rounding?

The model runs over the finished answer in one plain pass, in higher precision, without our loop, attention or cache. A
token that it would not choose is a tie if moving every logit by the model's own rounding makes it the choice, and a
bug otherwise. This judges every token, also after a tie, where two answers diverge.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.core.lm import Reference
from outpace.sampling.sampler import Sampler
from outpace.text import first_difference
from outpace.verify.records import Divergence

NEAR = 16  # likeliest tokens, which could be chosen: the rounding of their logits counts
SAFETY = 2.0  # margin: passes of other shapes round differently from the measured one


@dataclass(frozen=True)
class Answer:
    """A finished answer, and how its tokens were chosen."""

    prompt: list[int]
    tokens: list[int]
    sampler: Sampler


@dataclass
class Judge:
    """Judges the answers of one model; an answer that several methods give is judged once."""

    reference: Reference
    _known: dict[tuple[object, ...], list[Divergence]] = field(default_factory=dict)

    def answer(self, answer: Answer, index: int = 0) -> list[Divergence]:
        """Find the tokens that the model itself would not have chosen."""
        key = (index, tuple(answer.prompt), tuple(answer.tokens), repr(answer.sampler.sampling), answer.sampler.seed)
        if key not in self._known:
            self._known[key] = self._judge(answer, index)
        return self._known[key]

    def _judge(self, answer: Answer, index: int) -> list[Divergence]:
        text, count = answer.prompt + answer.tokens, len(answer.tokens)
        if not count:
            return []
        precise = self.reference.precise(text[:-1], count)  # [count, vocab]
        rounding = rounding_of(self.reference.native(text[:-1], count), precise)
        found = []
        for i, token in enumerate(answer.tokens):
            prefix = text[: len(answer.prompt) + i]
            difference = compare(precise[i], token, rounding, answer.sampler, prefix)
            if difference is not None:
                found.append(Divergence(index, i, difference.choice, token, difference.gap, rounding, difference.tie))
        return found

    def between(self, expected: Answer, got: Seq[int], index: int = 0) -> Divergence | None:
        """Find the first token of `got` that differs from the expected answer, as a tie or a bug."""
        at = first_difference(expected.tokens, got)
        if at is None:
            return None
        wanted, other = _token(expected.tokens, at), _token(got, at)
        if wanted < 0 or other < 0:  # one of them ended: rounding cannot explain that
            return Divergence(index, at, wanted, other, None, None, explained=False)
        prefix = expected.prompt + expected.tokens[:at]
        precise = self.reference.precise(prefix, at + 1)  # [at + 1, vocab]
        rounding = rounding_of(self.reference.native(prefix, at + 1), precise)
        scores = expected.sampler.noised(expected.sampler.process(precise[-1], prefix), len(prefix))
        differences = [compare(precise[-1], token, rounding, expected.sampler, prefix) for token in (wanted, other)]
        gap = float(scores[wanted] - scores[other])
        return Divergence(index, at, wanted, other, gap, rounding, all(d is None or d.tie for d in differences))


@dataclass(frozen=True)
class Difference:
    """The token that the model chooses instead; `tie` if rounding explains the difference."""

    choice: int
    gap: float
    tie: bool


def compare(logits: Tensor, token: int, rounding: float, sampler: Sampler, prefix: list[int]) -> Difference | None:
    """Compare `token` with the model's choice after `prefix`; None if they are the same."""  # [vocab]
    scores = sampler.noised(sampler.process(logits, prefix), len(prefix))
    choice = int(scores.argmax())
    if choice == token:
        return None
    moved = logits - rounding
    moved[token] += 2 * rounding
    return Difference(choice, float(scores[choice] - scores[token]), sampler.choose(moved, prefix) == token)


def rounding_of(native: Tensor, precise: Tensor) -> float:
    """Bound how far the model's own arithmetic moves the logits of the likeliest tokens."""  # [count, vocab]
    near = precise.topk(min(NEAR, precise.shape[-1])).indices
    measured = (native.to(precise).gather(-1, near) - precise.gather(-1, near)).abs().max()
    least = torch.finfo(native.dtype).eps * precise.abs().max()  # the rounding of the logits themselves
    return SAFETY * float(torch.maximum(measured, least))


def _token(tokens: Seq[int], at: int) -> int:
    return tokens[at] if at < len(tokens) else -1
