"""Judged draft tokens: the features of each token and whether the target accepted it. Policies learn from these."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from outpace.core.policy import signal
from outpace.core.sequence import Step
from outpace.core.tree import Signal

TOP = 10  # number of top draft probabilities that are features of the learned policy


@dataclass(frozen=True)
class Example:
    """A draft token that the target judged: its signal, its depth, and whether it was accepted."""

    signal: Signal
    depth: int
    accepted: bool

    def features(self) -> list[float]:
        return features(self.signal, self.depth)


def features(signal: Signal, depth: int) -> list[float]:
    top = (*signal.top[:TOP], *[0.0] * (TOP - len(signal.top)))
    return [*top, signal.prob, signal.entropy, math.log1p(depth)]


def examples(step: Step) -> Iterator[Example]:
    """Yield the draft tokens that the target judged: none below a rejected node or after the end of a request."""
    for depth, node in enumerate(step.path[: len(step.tokens)], start=1):
        for child in step.tree.children(node):
            known = signal(step.tree, child)
            if known is not None:
                yield Example(known, depth, child in step.path)
