"""Policies: how much to draft. Dynamic speculation is a policy, and works with every drafter.

The rule that keeps a sampled draft exact: a policy may look at what was drafted and stop, it may never drop a token
that was drawn. So `proceed` is asked after a token is in the tree, about the token after it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from outpace.errors import UsageError
from outpace.sequence import Sequence, Step
from outpace.tree import ROOT, Budget, Signal, Tree

TOP = 10  # draft probabilities that are features of the learned policy


@dataclass
class Policy:
    """The drafter's own budget, or the one given here. Base of all other policies."""

    depth: int | None = None
    nodes: int | None = None
    width: int | None = None

    def __post_init__(self) -> None:
        for name in ("depth", "nodes", "width"):
            value = getattr(self, name)
            if value is not None and value < (name == "width"):
                raise UsageError(f"{name}={value} is out of range")

    def budget(self, seq: Sequence) -> Budget:
        """What the drafter may use for its next tree."""
        shape = seq.drafter.shape
        depth = shape.depth if self.depth is None else self.depth
        width = shape.width if self.width is None else self.width
        # A chain that is asked to be deeper than the drafter's own has as many nodes as it is deep.
        nodes = self.nodes if self.nodes is not None else max(shape.nodes, depth)
        return Budget(depth, nodes, width)

    def budgets(self, seqs: Seq[Sequence], rows: int) -> list[Budget]:
        """The same for all that run under this policy, in a pass that `rows` requests share."""
        return [self.budget(seq) for seq in seqs]

    def rests(self, seq: Sequence) -> bool:
        """Whether its next tree will be a root alone, as far as is known before this pass was read."""
        return not (seq.drafter.shape.depth if self.depth is None else self.depth)

    def proceed(self, seq: Sequence, signal: Signal, depth: int) -> bool:
        """Whether to draft on after a token at `depth` for which the draft gave `signal`."""
        return True

    @property
    def looks(self) -> bool:
        """Whether `proceed` must be asked after every token, so that a draft cannot run on by itself."""
        return type(self).proceed is not Policy.proceed

    def prune(self, seqs: Seq[Sequence], trees: Seq[Tree], budgets: Seq[Budget], rows: int) -> list[Tree]:
        """What to verify of the trees of all that run under this policy, in a pass that `rows` requests share."""
        fitting = [tree.trim(budget) for tree, budget in zip(trees, budgets, strict=True)]
        return [self._sure(seq, tree) for seq, tree in zip(seqs, fitting, strict=True)] if self.looks else fitting

    def _sure(self, seq: Sequence, tree: Tree) -> Tree:
        """The tree without what follows tokens after which `proceed` would have stopped: a draft model has asked it
        as it went, other methods draft at once."""
        if seq.drafter.model_source is not None or tree.probs:
            return tree
        depths, grows = tree.depths, {ROOT: True}
        for node in range(1, len(tree)):
            if grows.get(tree.parents[node]):
                known = signal(tree, node)
                grows[node] = known is None or self.proceed(seq, known, depths[node])
        return tree.select(grows)

    def observe(self, seq: Sequence, step: Step) -> None:
        """Learn from a pass."""


@dataclass
class Heuristic(Policy):
    """Two deeper when everything was accepted, one shallower when not."""

    start: int = 5
    most: int = 20

    def budget(self, seq: Sequence) -> Budget:
        depth = seq.memory(self, lambda: [self.start])[0]
        base = super().budget(seq)
        depth = depth if self.depth is None else min(depth, self.depth)
        nodes = max(base.nodes, depth) if base.width > 1 else depth
        return Budget(depth, nodes if self.nodes is None else min(nodes, self.nodes), base.width)

    def observe(self, seq: Sequence, step: Step) -> None:
        if step.drafted == 0:
            return
        depth = seq.memory(self, lambda: [self.start])
        full = not step.tree.children(step.path[-1])
        depth[0] = min(self.most, depth[0] + 2) if full else max(1, depth[0] - 1)


@dataclass
class Confidence(Policy):
    """Stop after a token the draft was unsure of; the threshold is refitted from what was accepted and rejected."""

    threshold: float = 0.4
    refit: bool = True
    miss_cost: float = 3.0  # a stop that was wrong costs this many drafts that were wrong
    history: int = 512
    _seen: deque[tuple[float, bool]] = field(default_factory=deque, init=False, repr=False)

    def proceed(self, seq: Sequence, signal: Signal, depth: int) -> bool:
        return signal.prob >= self.threshold

    def observe(self, seq: Sequence, step: Step) -> None:
        if not self.refit:
            return
        self._seen.extend((example.signal.prob, example.accepted) for example in examples(step))
        while len(self._seen) > self.history:
            self._seen.popleft()
        self.threshold = best_threshold(self._seen, self.threshold, self.miss_cost)


def best_threshold(seen: Iterable[tuple[float, bool]], default: float, miss_cost: float) -> float:
    """The threshold with the least false-positive rate plus `miss_cost` times the false-negative rate."""
    ordered = sorted(seen)
    good = sum(accepted for _, accepted in ordered)
    bad = len(ordered) - good
    if len(ordered) <= 5 or not good or not bad:
        return default
    best, cost = ordered[0][0], 1.0  # accept everything: every rejected draft is a false positive
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
    """AdaEDL: stop when the bound 1 - sqrt(gamma * H) on acceptance falls under a floor that follows acceptance."""

    gamma: float = 0.2
    floor: float = 0.3
    target: float = 0.9
    rate: float = 0.01

    def proceed(self, seq: Sequence, signal: Signal, depth: int) -> bool:
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
        return seq.memory(self, lambda: [self.floor, self.target])  # the floor, mean acceptance


@dataclass(frozen=True)
class Example:
    """A drafted token that the target judged: what the draft knew of it, and whether it was accepted."""

    signal: Signal
    depth: int
    accepted: bool

    def features(self) -> list[float]:
        return features(self.signal, self.depth)


def features(signal: Signal, depth: int) -> list[float]:
    top = (*signal.top[:TOP], *[0.0] * (TOP - len(signal.top)))
    return [*top, signal.prob, signal.entropy, math.log1p(depth)]


def examples(step: Step) -> Iterator[Example]:
    """Only where a choice was made were guesses judged: not under a rejected node, nor after the end of a request."""
    for depth, node in enumerate(step.path[: len(step.tokens)], start=1):
        for child in step.tree.children(node):
            known = signal(step.tree, child)
            if known is not None:
                yield Example(known, depth, child in step.path)


def signal(tree: Tree, node: int) -> Signal | None:
    """What is known of a node: what the draft knew of it or, in a tree without a draft, how sure the method was."""
    if tree.signals or node not in tree.chances:
        return tree.signals.get(node)
    return Signal(tree.chances[node], 0.0)


def classifier() -> nn.Sequential:
    return nn.Sequential(nn.Linear(TOP + 3, 16), nn.SiLU(), nn.Linear(16, 1))


def fit(seen: Iterable[Example], epochs: int = 200, seed: int = 0) -> nn.Sequential:
    """Train the learned policy's classifier on judged drafts, as DISCO does offline."""
    rows = list(seen)
    if not rows:
        raise UsageError("no examples to fit: run a draft method first and collect `examples(step)`")
    x = torch.tensor([e.features() for e in rows])
    y = torch.tensor([float(e.accepted) for e in rows])
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        model = classifier()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        for _ in range(epochs):
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(-1), y).backward()
            optimizer.step()
    return model.requires_grad_(False)


@dataclass
class Learned(Policy):
    """DISCO: a small classifier on draft features predicts acceptance; stop under the threshold.

    Without weights it drafts to the full depth and trains itself on the first drafts that the target judged.
    """

    threshold: float = 0.5
    weights: str | Path | None = None  # a safetensors file written by `save`
    refit_every: int = 256  # examples between two trainings of a policy that came without weights; 0: never
    _model: nn.Sequential | None = field(default=None, init=False, repr=False)
    _seen: deque[Example] = field(default_factory=lambda: deque(maxlen=4096), init=False, repr=False)
    _new: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights is not None:
            from safetensors.torch import load_file

            self._model = classifier().requires_grad_(False)
            self._model.load_state_dict(load_file(self.weights))

    @classmethod
    def trained(cls, seen: Iterable[Example], threshold: float = 0.5) -> Learned:
        """A policy fitted ahead, on `examples(step)` of earlier runs."""
        policy = cls(threshold=threshold, refit_every=0)
        policy._model = fit(seen)
        return policy

    def save(self, path: str | Path) -> None:
        from safetensors.torch import save_file

        if self._model is None:
            raise UsageError("this policy has not been trained yet")
        save_file(self._model.state_dict(), path)

    def proceed(self, seq: Sequence, signal: Signal, depth: int) -> bool:
        if self._model is None:
            return True
        logit: Tensor = self._model(torch.tensor(features(signal, depth)))
        return logit.sigmoid().item() >= self.threshold

    def observe(self, seq: Sequence, step: Step) -> None:
        if self.weights is not None or not self.refit_every:
            return
        new = list(examples(step))
        self._seen.extend(new)
        self._new += len(new)
        if self._new >= self.refit_every:
            self._model, self._new = fit(self._seen, epochs=100), 0
