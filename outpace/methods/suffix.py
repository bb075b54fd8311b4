"""Suffix decoding: continue the longest context seen before with what followed it most often.

It has two memories: an automaton over the request itself, and a store of finished answers that all requests share.
Both index every substring. When the store is full, its older half is dropped.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from outpace.core.drafter import Drafter
from outpace.core.sequence import Sequence
from outpace.core.tree import ROOT, Budget, Signal, Tree
from outpace.errors import UsageError, check_ranges

START = 0
SEPARATOR = -1  # between answers in the store: not a real token, so nothing is continued across it
DOUBT = 0.75  # each matched token multiplies the doubt that the next one matches by this
COUNTED = 64  # suffix links followed per token to count occurrences: longer chains only arise in long repetitions


class Automaton:
    """A suffix automaton with counts: each state is a set of contexts, and its count says how often they occurred."""

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link: list[int] = [-1]
        self.length: list[int] = [0]
        self.count: list[int] = [0]
        self.last = START
        self.tokens = 0

    def add(self, token: int) -> None:
        """Append a token to the text (Blumer et al., online construction)."""
        current = self._state(self.length[self.last] + 1, {}, START, 0)
        state = self.last
        while state != -1 and token not in self.next[state]:
            self.next[state][token] = current
            state = self.link[state]
        if state != -1:
            self.link[current] = self._shared(state, token)
        self.last = current
        self.tokens += 1
        for _ in range(COUNTED):
            if current == START:
                break
            self.count[current] += 1
            current = self.link[current]

    def _shared(self, state: int, token: int) -> int:
        """The state of exactly the contexts of `state` followed by `token`, split off if it holds longer ones."""
        target = self.next[state][token]
        if self.length[target] == self.length[state] + 1:
            return target
        clone = self._state(self.length[state] + 1, dict(self.next[target]), self.link[target], self.count[target])
        self.link[target] = clone
        while state != -1 and self.next[state].get(token) == target:
            self.next[state][token] = clone
            state = self.link[state]
        return clone

    def _state(self, length: int, following: dict[int, int], link: int, count: int) -> int:
        self.length.append(length)
        self.next.append(following)
        self.link.append(link)
        self.count.append(count)
        return len(self.length) - 1

    def follow(self, match: SuffixMatch, token: int) -> SuffixMatch:
        """The longest context that ends with `token`, given the longest one before it."""
        state, length = match
        while state != START and self.length[self.link[state]] >= length:
            state = self.link[state]  # other requests have added text since and split the state
        while state != START and token not in self.next[state]:
            state = self.link[state]
            length = self.length[state]
        return SuffixMatch(self.next[state][token], length + 1) if token in self.next[state] else NO_MATCH


class SuffixMatch(NamedTuple):
    """A state, and the number of last tokens that it matches."""

    state: int
    length: int


NO_MATCH = SuffixMatch(START, 0)


class Continuation(NamedTuple):
    """A token that may be added to the tree next; the one with the smallest cost comes first."""

    cost: float  # minus the probability of the path, by counts
    order: int
    state: int
    parent: int
    depth: int
    token: int
    share: float  # of the parent's continuations


@dataclass
class Reader:
    """The position of a request in one automaton."""

    automaton: Automaton
    source: str
    match: SuffixMatch = NO_MATCH
    read: int = 0  # tokens of the request seen


@dataclass(eq=False)
class Suffix(Drafter):
    """Suffix decoding: continues the longest match in earlier text."""

    depth: int = 16
    width: int = 1
    min_match: int = 1
    per_match: float = 1.0  # tokens drafted for each token matched
    min_prob: float = 0.1  # lowest probability of a whole path
    store_tokens: int = 200_000  # maximum number of tokens remembered across requests
    _store: list[Automaton] = field(default_factory=lambda: [Automaton()], init=False, repr=False)  # newest last

    def __post_init__(self) -> None:
        if self.min_match < 1 or self.width < 1 or self.store_tokens < 0:
            raise UsageError(f"suffix needs min_match >= 1, width >= 1 and store_tokens >= 0, got {self}")
        check_ranges(self, depth=(0, math.inf), per_match=(0, math.inf), min_prob=(0, 1))

    @property
    def limit(self) -> Budget:  # type: ignore[override]
        return Budget(self.depth, self.depth * self.width, self.width)

    def propose(self, seq: Sequence, budget: Budget) -> Tree:
        best, score = Tree([seq.tokens[-1]]), 0.0
        for reader in self._readers(seq):
            if reader.match.length >= self.min_match:
                tree, expected = self._continue(reader, seq.tokens[-1], budget)
                if expected > score:
                    best, score = tree, expected
        return best

    def _continue(self, reader: Reader, root: int, budget: Budget) -> tuple[Tree, float]:
        """Grow a tree best-first by counts; return it with its expected number of accepted tokens."""
        automaton, tree, expected = reader.automaton, Tree([root]), 0.0
        depth = min(budget.depth, int(self.per_match * reader.match.length))
        frontier: list[Continuation] = []

        def push(state: int, parent: int, prob: float, level: int) -> None:
            total = sum(automaton.count[s] for token, s in automaton.next[state].items() if token != SEPARATOR)
            for token, child in automaton.next[state].items() if level <= depth else ():
                share = automaton.count[child] / total if total and token != SEPARATOR else 0.0
                if prob * share >= self.min_prob:
                    # Of two equally frequent tokens, the one with the newer state comes first.
                    heapq.heappush(frontier, Continuation(-prob * share, -child, child, parent, level, token, share))

        push(reader.match.state, ROOT, 1.0, 1)
        while frontier and len(tree) <= budget.nodes:
            best = heapq.heappop(frontier)
            if len(tree.children(best.parent)) >= budget.width:
                continue
            prob = best.share * (1 - DOUBT ** (reader.match.length + best.depth - 1))
            node = tree.add(best.parent, best.token, Signal(-best.cost, 0.0), reader.source, prob)
            expected -= best.cost
            push(best.state, node, -best.cost, best.depth + 1)
        return tree, expected

    def _readers(self, seq: Sequence) -> list[Reader]:
        readers = seq.state(self, self._fresh)
        for i, reader in enumerate(readers):
            for token in seq.tokens[reader.read :]:
                reader.match = reader.automaton.follow(reader.match, token)
                if i == 0:  # the request's own automaton: match first, then add, or the text would match itself
                    reader.automaton.add(token)
            reader.read = len(seq.tokens)
        return readers

    def _fresh(self) -> list[Reader]:
        earlier = [Reader(automaton, f"{self.name}: earlier answers") for automaton in self._store]
        return [Reader(Automaton(), f"{self.name}: this request"), *earlier]

    def close(self, seq: Sequence) -> None:
        if seq.generated:
            self.remember(seq.generated)

    def remember(self, tokens: Iterable[int]) -> None:
        """Add a text to the store; when the store is full, drop its older half."""
        half = self.store_tokens // 2
        text = [*tokens, SEPARATOR][-half:] if half else []
        if self._store[-1].tokens + len(text) > half:
            self._store = [self._store[-1], Automaton()]
        for token in text:
            self._store[-1].add(token)
