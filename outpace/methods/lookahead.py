"""Lookahead decoding: Jacobi iterations on a window of draft tokens fill a pool of n-grams, which are tried as drafts.

The window is a comb: a spine of draft tokens for the next positions and, under each, what the target predicted after
it in the passes before. That is a tree, so the ordinary pass scores it together with the n-grams from the pool. It is
scored in every pass, whether it helps or not, so its size depends on what a token costs.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from outpace.core.drafter import Drafter
from outpace.core.lm import Scores
from outpace.core.sequence import Sequence, Step
from outpace.core.tree import ROOT, Budget, Tree
from outpace.errors import UsageError

ALLOWANCE = 1 / 3  # what all draft tokens of a pass may cost, as a share of a pass without


class LookaheadShape(NamedTuple):
    """The size of a draft."""

    window: int  # positions; 0: nothing is drafted
    n: int
    guesses: int

    @property
    def nodes(self) -> int:
        return (self.n - 1) * (self.window + self.guesses)


@dataclass
class LookaheadWindow:
    """The window of a request, and its n-gram pool."""

    shape: LookaheadShape
    levels: list[list[int]]  # [k][i]: the draft token for the position i + k + 1 after the root; the oldest level first
    # First token of an n-gram -> the tokens after it, oldest first.
    pool: dict[int, OrderedDict[tuple[int, ...], None]] = field(default_factory=dict)


@dataclass(eq=False)
class Lookahead(Drafter):
    """Drafts n-grams from the target's Jacobi iterations.

    The draft is smaller, or empty, where its tokens would cost more than a third of a pass. On a GPU they cost nothing.
    """

    remembers: ClassVar[bool] = False
    reads_logits: ClassVar[bool] = True
    window: int = 5
    n: int = 4
    guesses: int = 4
    price: float | None = None  # of a draft token, as a share of a pass; None: what a token costs on the target

    def __post_init__(self) -> None:
        if self.window < 1 or self.n < 2 or self.guesses < 1 or (self.price is not None and self.price < 0):
            raise UsageError(f"lookahead needs window >= 1, n >= 2, guesses >= 1 and price >= 0, got {self}")

    @property
    def limit(self) -> Budget:  # type: ignore[override]
        nodes = LookaheadShape(self.window, self.n, self.guesses).nodes
        return Budget(self.window + self.n - 2, nodes, self.guesses + 2)

    def _shape(self, seq: Sequence) -> LookaheadShape:
        """Return the largest shape that the price allows: with shorter n-grams, then with fewer bigrams."""
        price = self.price if self.price is not None else 0.0 if seq.target is None else seq.target.token_price
        for n in range(self.n, 1, -1):
            whole = LookaheadShape(self.window, n, self.guesses)
            if whole.nodes * price <= ALLOWANCE:
                return whole
        nodes = int(ALLOWANCE / price)
        guesses = min(self.guesses, nodes // 2)
        return LookaheadShape(min(self.window, nodes - guesses) if guesses else 0, 2, guesses)

    def propose(self, seq: Sequence, budget: Budget) -> Tree:
        state = self._state(seq)
        tree = Tree([seq.tokens[-1]])
        if not state.shape.window:
            return tree
        for rest in reversed(state.pool.get(seq.tokens[-1], OrderedDict())):
            tree.add_path(rest, budget)
        spine, window = ROOT, f"{self.name}: window"
        for column in range(state.shape.window):
            spine = node = tree.add(spine, state.levels[0][column], source=window)
            for level in state.levels[1:]:
                node = tree.add(node, level[column], source=window)
        return tree

    def observe(self, seq: Sequence, step: Step, scores: Scores) -> None:
        """One Jacobi iteration: the prediction after a tooth completes an n-gram, and the oldest level is dropped."""
        state = self._state(seq)
        if not state.shape.window:
            return
        predicted = scores.logits.likeliest().tokens
        newest = list(state.levels[-1])
        for column in range(state.shape.window):
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
        if len(known) > state.shape.guesses:
            known.popitem(last=False)

    def _state(self, seq: Sequence) -> LookaheadWindow:
        def fresh() -> LookaheadWindow:
            # Any tokens can fill the first window; the prompt's are at least in its language.
            shape = self._shape(seq)
            seeds = [seq.tokens[-1 - i % len(seq.tokens)] for i in range(shape.window + shape.n - 2)]
            return LookaheadWindow(shape, [seeds[k : k + shape.window] for k in range(shape.n - 1)])

        return seq.state(self, fresh)
