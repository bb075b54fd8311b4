"""Rule-based policies: a draft depth that adapts to acceptance, and drafts that stop when the draft model is unsure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from outpace.core.policy import Policy
from outpace.core.sequence import Sequence, Step
from outpace.core.tree import Budget, Signal
from outpace.errors import check_ranges
from outpace.policies.judged import examples


@dataclass
class Heuristic(Policy):
    """Draft two tokens deeper after a fully accepted draft, and one less deep after any other."""

    start: int = 5
    most: int = 20

    def budget(self, seq: Sequence) -> Budget:
        depth = seq.state(self, lambda: [self.start])[0]
        base = super().budget(seq)
        depth = depth if self.depth is None else min(depth, self.depth)
        nodes = max(base.nodes, depth) if base.width > 1 else depth
        return Budget(depth, nodes if self.nodes is None else min(nodes, self.nodes), base.width)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, start=(0, math.inf), most=(1, math.inf))

    def observe(self, seq: Sequence, step: Step) -> None:
        if step.drafted == 0:
            return
        depth = seq.state(self, lambda: [self.start])
        full = not step.tree.children(step.path[-1])
        depth[0] = min(self.most, depth[0] + 2) if full else max(1, depth[0] - 1)


@dataclass
class Confidence(Policy):
    """Stop after a token with low draft probability; the threshold is refitted on accepted and rejected tokens."""

    threshold: float = 0.4
    refit: bool = True
    miss_cost: float = 3.0  # cost of a wrong stop, relative to that of a rejected draft token
    history: int = 512
    _seen: deque[tuple[float, bool]] = field(default_factory=deque, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, threshold=(0, 1), miss_cost=(0, math.inf), history=(1, math.inf))

    def keep_drafting(self, seq: Sequence, signal: Signal, depth: int) -> bool:
        return signal.prob >= self.threshold

    def observe(self, seq: Sequence, step: Step) -> None:
        if not self.refit:
            return
        self._seen.extend((example.signal.prob, example.accepted) for example in examples(step))
        while len(self._seen) > self.history:
            self._seen.popleft()
        self.threshold = best_threshold(self._seen, self.threshold, self.miss_cost)


def best_threshold(seen: Iterable[tuple[float, bool]], default: float, miss_cost: float) -> float:
    """Return the threshold that minimizes the false-positive rate plus `miss_cost` times the false-negative rate."""
    ordered = sorted(seen)
    good = sum(accepted for _, accepted in ordered)
    bad = len(ordered) - good
    if len(ordered) <= 5 or not good or not bad:
        return default
    best, cost = ordered[0][0], 1.0  # never stop: every rejected draft token is a false positive
    good_below = bad_below = 0
    for i, (prob, accepted) in enumerate(ordered):
        good_below, bad_below = good_below + accepted, bad_below + (not accepted)
        if i + 1 < len(ordered) and ordered[i + 1][0] > prob:
            here = (bad - bad_below) / bad + miss_cost * good_below / good
            if here < cost:
                best, cost = ordered[i + 1][0], here
    return best


@dataclass
class Entropy(Policy):
    """AdaEDL: stop when the bound 1 - sqrt(gamma * H) on acceptance falls below a floor that adapts to acceptance."""

    gamma: float = 0.2
    floor: float = 0.3
    target: float = 0.9
    rate: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, floor=(0, 1), target=(0, 1), rate=(0, 1))

    def keep_drafting(self, seq: Sequence, signal: Signal, depth: int) -> bool:
        return 1 - math.sqrt(self.gamma * signal.entropy) >= self._state(seq)[0]

    def observe(self, seq: Sequence, step: Step) -> None:
        if step.drafted == 0:
            return
        state = self._state(seq)
        longest = max(step.tree.depths)
        state[1] = 0.5 * state[1] + 0.5 * (len(step.path) - 1) / longest
        wish = state[0] + (self.rate if state[1] < self.target else -self.rate)
        state[0] = min(1.0, max(0.0, 0.9 * state[0] + 0.1 * wish))

    def _state(self, seq: Sequence) -> list[float]:
        return seq.state(self, lambda: [self.floor, self.target])  # floor, mean acceptance
