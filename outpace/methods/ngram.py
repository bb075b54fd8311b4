"""Prompt lookup: find the last tokens earlier in the text and copy what followed them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import ClassVar

from outpace.core.drafter import Drafter
from outpace.core.sequence import Sequence
from outpace.core.tree import Budget, Tree
from outpace.errors import UsageError

# Estimated probability that the next token matches too, by the number of tokens that matched.
TRUST = [1 - 0.75**n for n in range(64)]


@dataclass
class Index:
    """Where each n-gram of a sequence ended, oldest first."""

    ends: defaultdict[tuple[int, ...], list[int]] = field(default_factory=lambda: defaultdict(list))
    done: int = 0  # n-grams that end here or earlier are indexed


@dataclass(eq=False)
class NGram(Drafter):
    """Prompt lookup: copies what followed the last tokens before."""

    remembers: ClassVar[bool] = False
    max_n: int = 4
    min_n: int = 1
    depth: int = 10
    matches: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.min_n <= self.max_n or self.matches < 1 or self.depth < 0:
            raise UsageError(f"ngram needs 1 <= min_n <= max_n, matches >= 1 and depth >= 0, got {self}")

    @property
    def limit(self) -> Budget:  # type: ignore[override]
        return Budget(self.depth, self.depth * self.matches, self.matches)

    def propose(self, seq: Sequence, budget: Budget) -> Tree:
        index = self._index(seq)
        tree, seen = Tree([seq.tokens[-1]]), set[int]()
        for n in range(self.max_n, self.min_n - 1, -1):
            for end in reversed(index.ends.get(tuple(seq.tokens[-n:]), ())):
                if end not in seen and len(seen) < self.matches:
                    seen.add(end)
                    tree.add_path(continuation(seq.tokens, end, budget.depth), budget, TRUST[n : n + budget.depth])
        return tree

    def _index(self, seq: Sequence) -> Index:
        index = seq.state(self, Index)
        # The last token has no continuation yet, so n-grams that end with it are added later.
        for end in range(index.done + 1, len(seq.tokens)):
            for n in range(self.min_n, min(self.max_n, end) + 1):
                index.ends[tuple(seq.tokens[end - n : end])].append(end)
            index.done = end
        return index


def continuation(tokens: list[int], start: int, count: int) -> list[int]:
    """The tokens from `start` on. At the end of the text they start over, so a repetition is drafted in full."""
    period = len(tokens) - start
    return [tokens[start + i % period] for i in range(count)]
