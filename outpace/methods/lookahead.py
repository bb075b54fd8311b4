"""Lookahead decoding: Jacobi iterations on a window of draft tokens fill a pool of n-grams, which are tried as drafts.

The window is a comb: a spine of draft tokens for the next positions and, under each, what the target predicted after
it in the passes before. That is a tree, so the ordinary pass scores it together with the n-grams from the pool.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import ClassVar

from outpace.core.drafter import Drafter
from outpace.core.lm import Scores
from outpace.core.sequence import Sequence, Step
from outpace.core.tree import ROOT, Budget, Tree
from outpace.errors import UsageError


@dataclass
class LookaheadWindow:
    """The window of a request, and its n-gram pool."""

    levels: list[list[int]]  # [k][i]: the draft token for the position i + k + 1 after the root; the oldest level first
    # First token of an n-gram -> the tokens after it, oldest first.
    pool: dict[int, OrderedDict[tuple[int, ...], None]] = field(default_factory=dict)


@dataclass(eq=False)
class Lookahead(Drafter):
    """Drafts n-grams from the target's Jacobi iterations."""

    reads_logits: ClassVar[bool] = True
    window: int = 5
    n: int = 4
    guesses: int = 4

    def __post_init__(self) -> None:
        if self.window < 1 or self.n < 2 or self.guesses < 1:
            raise UsageError(f"lookahead needs window >= 1, n >= 2 and guesses >= 1, got {self}")

    @property
    def limit(self) -> Budget:  # type: ignore[override]
        nodes = (self.n - 1) * (self.window + self.guesses)
        return Budget(self.window + self.n - 2, nodes, self.guesses + 2)

    def propose(self, seq: Sequence, budget: Budget) -> Tree:
        state = self._state(seq)
        tree = Tree([seq.tokens[-1]])
        for rest in reversed(state.pool.get(seq.tokens[-1], OrderedDict())):
            tree.add_path(rest, budget)
        spine, window = ROOT, f"{self.name}: window"
        for column in range(self.window):
            spine = node = tree.add(spine, state.levels[0][column], source=window)
            for level in state.levels[1:]:
                node = tree.add(node, level[column], source=window)
        return tree

    def observe(self, seq: Sequence, step: Step, scores: Scores) -> None:
        """One Jacobi iteration: the prediction after a tooth completes an n-gram, and the oldest level is dropped."""
        state = self._state(seq)
        predicted = scores.logits.top_k(1)[:, 0].tolist()
        newest = list(state.levels[-1])
        for column in range(self.window):
            tooth = [level[column] for level in state.levels]
            path = step.tree.walk([step.tree.tokens[ROOT], *state.levels[0][:column], *tooth])
            if len(path) == 1 + column + len(tooth):
                newest[column] = predicted[path[-1]]
                self._remember(state, [*tooth, newest[column]])
        state.levels = [*state.levels[1:], newest]

    def _remember(self, state: LookaheadWindow, gram: list[int]) -> None:
        known = state.pool.setdefault(gram[0], OrderedDict())
        known.pop(tuple(gram[1:]), None)
        known[tuple(gram[1:])] = None
        if len(known) > self.guesses:
            known.popitem(last=False)

    def _state(self, seq: Sequence) -> LookaheadWindow:
        def fresh() -> LookaheadWindow:
            # Any tokens can fill the first window; the prompt's are at least in its language.
            size = self.window + self.n - 2
            seeds = [seq.tokens[-1 - i % len(seq.tokens)] for i in range(size)]
            return LookaheadWindow([seeds[k : k + self.window] for k in range(self.n - 1)])

        return seq.state(self, fresh)
