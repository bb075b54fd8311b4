"""Costs: what a pass of the target takes on this machine, by the number of its rows.

The real engine runs with a drafter that guesses trees of a wanted size which are never accepted, so everything that
the loop does in a pass is in the figure: the model, the choice, the cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from outpace.api.model import Model
from outpace.api.request import Request
from outpace.core.drafter import Drafter
from outpace.core.engine import Engine
from outpace.core.sequence import Sequence
from outpace.core.tree import ROOT, Budget, Tree

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 49, 64)
ROUNDS = 7
PASSES = 4  # of each size in a round


@dataclass(eq=False)
class Dummy(Drafter):
    """Guesses `rows - 1` tokens that are not likely, as a chain or as a tree of two branches a level."""

    rows: int = 1
    tree: bool = False

    @property
    def limit(self) -> Budget:  # type: ignore[override]
        return Budget(self.rows, self.rows - 1, 2)

    def propose(self, seq: Sequence, budget: Budget) -> Tree:
        tree, token = Tree([seq.tokens[-1]]), len(seq.tokens)
        for node in range(self.rows - 1):
            parent = max(ROOT, node - 1) if self.tree else node
            tree.add(parent, (token + 31 * node) % seq.vocab)
        return tree


@dataclass(frozen=True)
class MeasuredPasses:
    """Measured seconds of a pass by rows, for chains and for trees; and of a prompt's token."""

    chain: dict[int, list[float]]  # rows -> samples
    tree: dict[int, list[float]]
    prompt: list[float]  # seconds per token of a prompt, samples

    def table(self, random: np.random.Generator | None = None) -> CostTable:
        """Medians; with a generator, those of samples drawn anew, for an interval."""

        def middle(samples: list[float]) -> float:
            drawn = samples if random is None else random.choice(samples, len(samples)).tolist()
            return statistics.median(drawn)

        kinds = [{rows: middle(samples) for rows, samples in kind.items()} for kind in (self.chain, self.tree)]
        return CostTable(kinds[0], kinds[1], middle(self.prompt))


@dataclass(frozen=True)
class CostTable:
    """One cost for each number of rows."""

    chain: dict[int, float]
    tree: dict[int, float]
    prompt: float

    def seconds(self, rows: int, is_chain: bool) -> float:
        known = self.chain if is_chain else self.tree
        return float(np.interp(rows, list(known), list(known.values())))


def measure(model: Model, context: int, most: int, done: Callable[[], object]) -> MeasuredPasses:
    """Costs after `context` tokens, up to passes of `most` rows; `done` is called after each of `steps(most)`."""
    sizes = sizes_up_to(most)
    found: dict[tuple[int, bool], list[float]] = {(rows, tree): [] for rows in sizes for tree in (False, True)}
    prompts: list[float] = []
    for turn in range(ROUNDS + 1):  # the first is the warm-up
        for (rows, tree), samples in found.items():
            if tree and not (model.lm.trees and rows > 2):
                continue
            times, prefill = _passes(model, context, rows, tree)
            if turn:
                samples += times
                prompts += [prefill / max(context - 1, 1)]
            done()
    chain = {rows: found[rows, False] for rows in sizes}
    return MeasuredPasses(chain, {rows: found[rows, True] or chain[rows] for rows in sizes}, prompts)


def sizes_up_to(most: int) -> list[int]:
    below = [size for size in SIZES if size < most]
    return [*below, most] if most > 1 else [1]


def steps(most: int, trees: bool) -> int:
    """How often `measure` calls `done`."""
    sizes = sizes_up_to(most)
    return (ROUNDS + 1) * (len(sizes) + (sum(size > 2 for size in sizes) if trees else 0))


def _passes(model: Model, context: int, rows: int, tree: bool) -> tuple[list[float], float]:
    """Seconds of a few passes, and of the prefill before them."""
    model.lm.clear()
    prompt = [(7 * i + 3) % model.lm.vocab for i in range(context)]
    request = Request(prompt, Dummy(rows, tree), max_tokens=rows + PASSES + 2, ignore_eos=True)
    engine = Engine(model.lm)
    engine.submit(model.sequence(request))
    spent = []
    for event in engine.run():
        spent.append({name: seconds for name, seconds in event.seconds.items() if name != "draft"})
        if len(spent) > PASSES:
            break
    # The first pass carries what was left of the prompt.
    return [sum(s.values()) - s["prefill"] for s in spent[1:]], spent[0]["prefill"]
