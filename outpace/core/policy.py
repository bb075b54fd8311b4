"""Policies: how much to draft. Dynamic speculation is a policy, and works with every drafter.

The rule that keeps a sampled draft exact: a policy may look at what was drafted and stop, it may never drop a token
that was drawn. So `keep_drafting` is asked after a token is in the tree, about the token after it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from outpace.core.layout import Layout
from outpace.core.sequence import Sequence, Step
from outpace.core.tree import ROOT, Budget, Signal, Tree
from outpace.errors import UsageError


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
        limit = seq.drafter.limit
        depth = limit.depth if self.depth is None else self.depth
        width = limit.width if self.width is None else self.width
        # A chain that is asked to be deeper than the drafter's own has as many nodes as it is deep.
        nodes = self.nodes if self.nodes is not None else max(limit.nodes, depth)
        return Budget(depth, nodes, width)

    def budgets(self, seqs: Seq[Sequence], batch_size: int) -> list[Budget]:
        """The budgets of all sequences under this policy, in a pass that `batch_size` requests share."""
        return [self.budget(seq) for seq in seqs]

    def idle(self, seq: Sequence) -> bool:
        """Whether the next draft will be empty, as far as is known before this pass was read."""
        return not (seq.drafter.limit.depth if self.depth is None else self.depth)

    def keep_drafting(self, seq: Sequence, signal: Signal, depth: int) -> bool:
        """Whether to draft on after a token at `depth` for which the draft gave `signal`."""
        return True

    @property
    def watches_draft(self) -> bool:
        """Whether `keep_drafting` must be asked after every token, so that a draft cannot run on by itself."""
        return type(self).keep_drafting is not Policy.keep_drafting

    def select(self, seqs: Seq[Sequence], drafts: Seq[Any], budgets: Seq[Budget], batch_size: int) -> Seq[Layout]:
        """The part of each draft that is scored, for all sequences under this policy."""
        fitting = [draft.trim(budget) for draft, budget in zip(drafts, budgets, strict=True)]
        if not self.watches_draft:
            return fitting
        return [self._sure(seq, draft) for seq, draft in zip(seqs, fitting, strict=True)]

    def _sure(self, seq: Sequence, tree: Tree) -> Tree:
        """The tree without what follows tokens after which `keep_drafting` would have stopped. A draft model has asked
        it token by token; other methods draft at once."""
        if seq.drafter.model_source is not None or tree.proposals:
            return tree
        depths, grows = tree.depths, {ROOT: True}
        for node in range(1, len(tree)):
            if grows.get(tree.parents[node]):
                known = signal(tree, node)
                grows[node] = known is None or self.keep_drafting(seq, known, depths[node])
        return tree.select(grows)

    def observe(self, seq: Sequence, step: Step) -> None:
        """Learn from what a pass did to one sequence."""

    def after_pass(self, report: PassReport) -> None:
        """Learn from what a whole pass took."""


@dataclass(frozen=True)
class PassReport:
    """What one pass of the engine took, for all requests that shared it."""

    seconds: dict[str, float]  # prefill, draft, score, verify, keep
    batch_size: int  # requests
    tokens: int  # nodes that were scored


def signal(tree: Tree, node: int) -> Signal | None:
    """What is known of a node: what the draft knew of it or, in a tree without a draft, how sure the method was."""
    if tree.signals or node not in tree.probs:
        return tree.signals.get(node)
    return Signal(tree.probs[node], 0.0)
