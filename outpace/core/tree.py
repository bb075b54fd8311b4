"""Tree: draft tokens and their parents, the usual layout that a pass scores.

Node 0 is the root: the last committed token, whose key and value are not in the cache yet. Everything else about a
tree (depths, masks, paths) is derived from `tokens` and `parents` and is never passed separately.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from outpace.core.layout import Layout

ROOT = 0


@dataclass(frozen=True)
class Signal:
    """What the drafter knew about a node when it proposed it. Policies decide and learn from signals."""

    prob: float  # the draft's probability of the token
    entropy: float  # of the draft's distribution, in nats
    top: tuple[float, ...] = ()  # the draft's largest probabilities, in descending order


@dataclass(frozen=True)
class Budget:
    """Limits of a draft: `depth` tokens on a path, `nodes` in total, `width` children per node."""

    depth: int
    nodes: int
    width: int = 1
    model_depth: int | None = None  # depth limit for a draft model, if lower than `depth`
    # stop(depth, prob): whether a draft model stops at this depth, where its best path has this probability.
    stop: Callable[[int, float], bool] | None = None

    @property
    def levels(self) -> int:
        """Number of levels that a draft model drafts."""
        return self.depth if self.model_depth is None else min(self.model_depth, self.depth)

    def within(self, depth: int, trees: bool) -> Budget:
        """Return this budget limited to `depth`, and to a chain if the target cannot score trees."""
        depth = max(0, min(self.depth, depth))
        width = self.width if trees else 1
        nodes = min(self.nodes, depth) if width == 1 else self.nodes * (depth > 0)
        same = (depth, nodes, width) == (self.depth, self.nodes, self.width)
        return self if same else replace(self, depth=depth, nodes=nodes, width=width)


OFF = Budget(depth=0, nodes=0)


@dataclass(frozen=True)
class Decision:
    """Why a policy verified this much of a tree: the gain it expected from the draft tokens at their cost."""

    drafted: int  # proposed nodes
    kept: int  # verified nodes
    expected: float  # tokens that the pass was expected to commit to this request
    speedup: float  # of the whole pass over one without draft tokens
    reason: str


@dataclass
class Tree(Layout):
    """`tokens[i]` follows `tokens[parents[i]]`; parents come before their children."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    signals: dict[int, Signal] = field(default_factory=dict)  # node -> what the drafter knew
    # node -> distribution its children were sampled from, [vocab]
    proposals: dict[int, Tensor] = field(default_factory=dict)
    sources: dict[int, str] = field(default_factory=dict)  # node -> its source, if the drafter has several
    probs: dict[int, float] = field(default_factory=dict)  # node -> estimated P(accepted | parent accepted)
    trusted: set[int] = field(default_factory=set)  # nodes that the verifier `tiered` accepts without the target
    decision: Decision | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        self._children: list[dict[int, int]] = [{} for _ in self.tokens]
        if self.parents == [-1] and len(self.tokens) == 1:  # a lone root, of which every plain pass makes some
            return
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"a tree needs one parent per token, got {len(self.tokens)} and {len(self.parents)}")
        if any(not (i > p >= 0) for i, p in enumerate(self.parents) if i) or self.parents[:1] != [-1]:
            raise ValueError(f"parents must come before children and the root has parent -1, got {self.parents}")
        for node in range(1, len(self.tokens)):
            siblings = self._children[self.parents[node]]
            if self.tokens[node] in siblings:
                raise ValueError(f"token {self.tokens[node]} occurs twice under node {self.parents[node]}")
            siblings[self.tokens[node]] = node

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> Tree:
        """Make a tree that is a single path; the first token is the root."""
        return cls(list(tokens), [i - 1 for i in range(len(tokens))])

    def add(
        self, parent: int, token: int, signal: Signal | None = None, source: str = "", prob: float | None = None
    ) -> int:
        """Return the child of `parent` with this token, creating it if needed."""
        node = self._children[parent].get(token)
        if node is None:
            node = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self._children[parent][token] = node
            self._children.append({})
            if signal is not None:
                self.signals[node] = signal
            if source:
                self.sources[node] = source
            if prob is not None:
                self.probs[node] = prob
        return node

    def add_path(self, tokens: Iterable[int], budget: Budget, probs: Sequence[float] = ()) -> None:
        """Add a path from the root, up to the limits of the budget."""
        node = ROOT
        for depth, token in enumerate(tokens):
            known = self.child(node, token)
            full = len(self) > budget.nodes or len(self._children[node]) >= budget.width
            if depth >= budget.depth or (known is None and full):
                return
            node = self.add(node, token, prob=probs[depth] if depth < len(probs) else None)

    def child(self, node: int, token: int) -> int | None:
        return self._children[node].get(token)

    def children(self, node: int) -> list[int]:
        """Return the children in the order in which they were added."""
        return list(self._children[node].values())

    @property
    def is_chain(self) -> bool:  # type: ignore[override]
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    @property
    def depths(self) -> list[int]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths

    def path(self, node: int) -> list[int]:
        """Return the nodes from the root to `node`."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def walk(self, tokens: Sequence[int]) -> list[int]:
        """Return the longest path, root first, whose tokens are a prefix of `tokens`."""
        if not tokens or tokens[0] != self.tokens[ROOT]:
            return []
        path = [ROOT]
        for token in tokens[1:]:
            child = self.child(path[-1], token)
            if child is None:
                break
            path.append(child)
        return path

    def positions(self, start: int, since: int = 0) -> list[int]:
        return [start + depth for depth in self.depths[since:]]

    def sees(self, since: int = 0) -> list[int]:
        seen: list[int] = []
        for node, parent in enumerate(self.parents):
            seen.append((seen[parent] if parent >= 0 else 0) | 1 << node)
        return seen[since:]

    def visible(self, since: int = 0) -> Tensor:  # [new nodes, nodes]
        if self.is_chain:
            return torch.ones(len(self), len(self), dtype=torch.bool).tril_()[since:]
        mask = torch.eye(len(self), dtype=torch.bool)
        for node in range(1, len(self)):
            mask[node] |= mask[self.parents[node]]
        return mask[since:]

    def trim(self, budget: Budget) -> Tree:
        """Return the part that fits the budget: the first nodes within its depth, at most `width` under each parent."""
        if len(self) == 1:
            return self
        depths, kept, used = self.depths, {ROOT: None}, [0] * len(self)
        for node in range(1, len(self)):
            parent = self.parents[node]
            if len(kept) > budget.nodes:
                break
            if parent in kept and depths[node] <= budget.depth and used[parent] < budget.width:
                kept[node] = None
                used[parent] += 1
        return self.select(kept)

    def select(self, nodes: Collection[int]) -> Tree:
        """Return the tree of only these nodes, in this order: the root first, parents before their children."""
        if len(nodes) == len(self) and all(node == i for i, node in enumerate(nodes)):
            return self
        place = {node: i for i, node in enumerate(nodes)}
        return Tree(
            [self.tokens[n] for n in nodes],
            [-1 if n == ROOT else place[self.parents[n]] for n in nodes],
            {place[n]: s for n, s in self.signals.items() if n in place},
            {place[n]: q for n, q in self.proposals.items() if n in place},
            {place[n]: s for n, s in self.sources.items() if n in place},
            {place[n]: c for n, c in self.probs.items() if n in place},
            {place[n] for n in self.trusted if n in place},
        )
