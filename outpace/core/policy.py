"""Policies: how much to draft. Dynamic speculation is a policy, so it works with every drafter.

One rule keeps a sampled draft exact: a policy may stop because of what was drafted, but it may never drop a token that
was sampled. So `keep_drafting` is called once a token is in the tree, and decides about the token after it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import inf
from typing import Any

from outpace.core.layout import Layout
from outpace.core.sequence import Sequence, Step
from outpace.core.tree import OFF, ROOT, Budget, Signal, Tree
from outpace.errors import check_ranges


@dataclass
class Policy:
    """Draft with the drafter's own budget, or with the one given here. Base class of all other policies."""

    depth: int | None = None
    nodes: int | None = None
    width: int | None = None

    def __post_init__(self) -> None:
        check_ranges(self, depth=(0, inf), nodes=(0, inf), width=(1, inf))

    def budget(self, seq: Sequence) -> Budget:
        """Return the limits of the next draft of this sequence."""
        limit = seq.drafter.limit
        width = limit.width if self.width is None else self.width
        if not (depth := limit.depth if self.depth is None else self.depth):
            return OFF
        # A chain that is deeper than the drafter's own limit gets as many nodes as its depth.
        nodes = self.nodes if self.nodes is not None else max(limit.nodes, depth)
        return Budget(depth, nodes, width)

    def budgets(self, seqs: Seq[Sequence], batch_size: int) -> list[Budget]:
        """Return the budgets of all sequences under this policy, in a pass of `batch_size` requests."""
        return [self.budget(seq) for seq in seqs]

    def idle(self, seq: Sequence) -> bool:
        """Return whether the next draft will surely be empty, before the result of this pass is known."""
        return not (seq.drafter.limit.depth if self.depth is None else self.depth)

    def keep_drafting(self, seq: Sequence, signal: Signal, depth: int) -> bool:
        """Return whether to continue drafting after a token at `depth` with this `signal`."""
        return True

    @property
    def watches_draft(self) -> bool:
        """Whether `keep_drafting` must be called after every token, which rules out drafting all levels in one go."""
        return type(self).keep_drafting is not Policy.keep_drafting

    def select(self, seqs: Seq[Sequence], drafts: Seq[Any], budgets: Seq[Budget], batch_size: int) -> Seq[Layout]:
        """Return the part of each draft to score, for all sequences under this policy."""
        fitting = [draft.trim(budget) for draft, budget in zip(drafts, budgets, strict=True)]
        if not self.watches_draft:
            return fitting
        return [self._prune(seq, draft) for seq, draft in zip(seqs, fitting, strict=True)]

    def _prune(self, seq: Sequence, tree: Tree) -> Tree:
        """Prune what follows tokens at which `keep_drafting` stops; while they drafted, draft models have called it."""
        if seq.drafter.model_source is not None or tree.proposals:
            return tree
        depths, grows = tree.depths, {ROOT: True}
        for node in range(1, len(tree)):
            if grows.get(tree.parents[node]):
                known = signal(tree, node)
                grows[node] = known is None or self.keep_drafting(seq, known, depths[node])
        return tree.select(grows)

    def observe(self, seq: Sequence, step: Step) -> None:
        """Learn from the result of a pass for one sequence."""

    def after_pass(self, report: PassReport) -> None:
        """Learn from the times of a whole pass."""


@dataclass(frozen=True)
class PassReport:
    """The times and sizes of one pass of the engine, over all of its requests."""

    seconds: dict[str, float]  # keys: prefill, draft, score, verify, keep
    batch_size: int  # requests
    tokens: int  # scored nodes


def signal(tree: Tree, node: int) -> Signal | None:
    """Return the signal of a node; in a tree without signals, one made from the method's own probability."""
    if tree.signals or node not in tree.probs:
        return tree.signals.get(node)
    return Signal(tree.probs[node], 0.0)
