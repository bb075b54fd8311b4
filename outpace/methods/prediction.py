"""Predicted outputs: draft from a text that the caller expects, such as the file that the answer edits.

The text of the request is followed through the prediction. Where the two part, the drafter looks for the last tokens
in the prediction, near the current place first, and goes on from there. So it goes past text that the answer inserts,
leaves out or replaces.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from outpace.core.drafter import Drafter
from outpace.core.sequence import Sequence
from outpace.core.tree import Budget, Tree
from outpace.errors import UsageError

LONG = 4  # tokens that are looked for in the whole prediction; fewer ones only near the current place
NEAR = 32  # places on each side that are compared
CLOSE = 8  # a single token is taken for the same one within this distance
START = 4  # tokens that an answer is trusted to follow from its beginning
GUESSED = 3  # tokens after the parting for which the place is guessed
# Estimated probability that the next token matches too, by the number of tokens that matched.
TRUST = [1 - 0.7 ** (n + 1) for n in range(64)]


class Found(NamedTuple):
    """A place in the prediction after the last tokens of the text."""

    matched: int  # how many of them
    place: int


@dataclass
class Alignment:
    """How far a request has followed its prediction."""

    prediction: list[int]
    read: int  # tokens of the request that have been compared
    place: int = 0  # of the prediction's token that should come next
    matched: int = START  # tokens in a row that followed the prediction
    missed: int = 0  # tokens since the text and the prediction parted
    ends: defaultdict[tuple[int, ...], list[int]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for end in range(1, len(self.prediction) + 1):
            self.ends[self.prediction[end - 1],].append(end)
            if end >= LONG:
                self.ends[tuple(self.prediction[end - LONG : end])].append(end)

    def follow(self, tokens: list[int], start: int) -> None:
        """Read the tokens that were added to a text whose answer begins at `start`."""
        for end in range(self.read + 1, len(tokens) + 1):
            if self.place < len(self.prediction) and self.prediction[self.place] == tokens[end - 1]:
                self.place, self.matched, self.missed = self.place + 1, self.matched + 1, 0
            elif (found := self._find(tokens, start, end)) is not None:
                self.place, self.matched, self.missed = found.place, found.matched, 0
            else:
                self.matched, self.missed = 0, self.missed + 1
        self.read = len(tokens)

    def _find(self, tokens: list[int], start: int, end: int) -> Found | None:
        """Find the text before `end` in the prediction: the longest match up to LONG tokens, then the nearest one."""
        keys = [(tokens[end - 1],)] + [tuple(tokens[end - LONG : end])] * (end - start >= LONG)
        places = {place for key in keys for place in self._nearest(self.ends.get(key, []))}
        found = [Found(self._matching(tokens, start, end, place), place) for place in places]
        close = [one for one in found if one.matched > 1 or abs(one.place - self.place) <= CLOSE]
        return max(close, key=lambda one: (min(one.matched, LONG), -abs(one.place - self.place)), default=None)

    def _nearest(self, ends: list[int]) -> list[int]:
        middle = bisect_left(ends, self.place)
        return ends[max(0, middle - NEAR) : middle + NEAR]

    def _matching(self, tokens: list[int], start: int, end: int, place: int) -> int:
        """Count the tokens before `end` that are those before a place of the prediction."""
        most = min(end - start, place, 2 * LONG)
        return next((n for n in range(most) if tokens[end - 1 - n] != self.prediction[place - 1 - n]), most)

    @property
    def continuations(self) -> list[int]:
        """The places from which to draft, the likeliest first. After a parting: tokens were replaced, or inserted."""
        if not self.missed:
            return [self.place]
        return [self.place + self.missed, self.place] if self.missed <= GUESSED else []


@dataclass(eq=False)
class PredictedOutput(Drafter):
    """Predicted Outputs: follows a text that the request expects."""

    remembers: ClassVar[bool] = False
    depth: int = 16
    width: int = 2  # continuations to try after the answer has parted from the prediction

    def __post_init__(self) -> None:
        if self.depth < 0 or self.width < 1:
            raise UsageError(f"prediction needs depth >= 0 and width >= 1, got {self}")

    @property
    def limit(self) -> Budget:  # type: ignore[override]
        return Budget(self.depth, max(self.depth, 2 * GUESSED), self.width)

    def propose(self, seq: Sequence, budget: Budget) -> Tree:
        tree = Tree([seq.tokens[-1]])
        if not seq.prediction:
            return tree
        known = seq.state(self, lambda: Alignment(seq.prediction, seq.prompt_length))
        known.follow(seq.tokens, seq.prompt_length)
        depth = min(budget.depth, 2 * known.matched + GUESSED)
        for place in known.continuations:
            tokens = known.prediction[place : place + depth]
            tree.add_path(tokens, budget, TRUST[known.matched : known.matched + depth])
        return tree
