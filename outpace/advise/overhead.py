"""Pass times: how long a forward pass of the target takes on this machine, by the number of tokens in it.

The real engine runs with a dummy drafter, whose trees have a given size and are never accepted. So the figure includes
everything that the loop does in a pass: the model, the choice of tokens, the cache.
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
    """Drafts `size - 1` unlikely tokens, as a chain or as a tree with two branches per level."""

    size: int = 1
    tree: bool = False

    @property
    def limit(self) -> Budget:  # type: ignore[override]
        return Budget(self.size, self.size - 1, 2)

    def propose(self, seq: Sequence, budget: Budget) -> Tree:
        tree, token = Tree([seq.tokens[-1]]), len(seq.tokens)
        for node in range(self.size - 1):
            parent = max(ROOT, node - 1) if self.tree else node
            tree.add(parent, (token + 31 * node) % seq.vocab)
        return tree


@dataclass(frozen=True)
class MeasuredPasses:
    """Measured seconds of a pass by its number of tokens, for chains and for trees, and of a prompt token."""

    chain: dict[int, list[float]]  # tokens in the pass -> samples
    tree: dict[int, list[float]]
    prompt: list[float]  # samples of the seconds per prompt token

    def table(self, random: np.random.Generator | None = None) -> CostTable:
        """Return the medians; with a generator, those of resampled samples, for an interval."""

        def middle(samples: list[float]) -> float:
            drawn = samples if random is None else random.choice(samples, len(samples)).tolist()
            return statistics.median(drawn)

        kinds = [{size: middle(samples) for size, samples in kind.items()} for kind in (self.chain, self.tree)]
        return CostTable(kinds[0], kinds[1], middle(self.prompt))


@dataclass(frozen=True)
class CostTable:
    """The seconds of a pass for each number of tokens, and of a prompt token."""

    chain: dict[int, float]
    tree: dict[int, float]
    prompt: float

    def seconds(self, size: int, is_chain: bool) -> float:
        known = self.chain if is_chain else self.tree
        return float(np.interp(size, list(known), list(known.values())))


def measure(model: Model, context: int, largest: int, done: Callable[[], object]) -> MeasuredPasses:
    """Time passes of up to `largest` tokens after `context` tokens; `done` is called after each of `steps` steps."""
    sizes = sizes_up_to(largest)
    found: dict[tuple[int, bool], list[float]] = {(size, tree): [] for size in sizes for tree in (False, True)}
    prompts: list[float] = []
    for turn in range(ROUNDS + 1):  # the first round is the warm-up
        for (size, tree), samples in found.items():
            if tree and not (model.lm.trees and size > 2):
                continue
            times, prefill = _passes(model, context, size, tree)
            if turn:
                samples += times
                prompts += [prefill / max(context - 1, 1)]
            done()
    chain = {size: found[size, False] for size in sizes}
    return MeasuredPasses(chain, {size: found[size, True] or chain[size] for size in sizes}, prompts)


def sizes_up_to(largest: int) -> list[int]:
    below = [size for size in SIZES if size < largest]
    return [*below, largest] if largest > 1 else [1]


def steps(largest: int, trees: bool) -> int:
    """Return how often `measure` calls `done`."""
    sizes = sizes_up_to(largest)
    return (ROUNDS + 1) * (len(sizes) + (sum(size > 2 for size in sizes) if trees else 0))


def _passes(model: Model, context: int, size: int, tree: bool) -> tuple[list[float], float]:
    """Return the seconds of a few passes of `size` tokens, and of the prefill before them."""
    model.lm.clear()
    prompt = [(7 * i + 3) % model.lm.vocab for i in range(context)]
    request = Request(prompt, Dummy(size, tree), max_tokens=size + PASSES + 2, ignore_eos=True)
    engine = Engine(model.lm)
    engine.submit(model.sequence(request))
    spent = []
    for event in engine.run():
        spent.append({name: seconds for name, seconds in event.seconds.items() if name != "draft"})
        if len(spent) > PASSES:
            break
    # The first pass also processes the rest of the prompt.
    return [sum(s.values()) - s["prefill"] for s in spent[1:]], spent[0]["prefill"]
