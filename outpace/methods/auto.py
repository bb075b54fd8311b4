"""Auto: merges the trees of several methods into one, of which the policy "auto" verifies the part that pays.

More is drafted than verified. One of the methods may run a model for each level: a draft model, or a head that drafts
token by token. It costs passes of that model, so it drafts only as deep as the budget's `levels` allow.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

from outpace import registry
from outpace.core.drafter import Drafter
from outpace.core.lm import LM, Scores
from outpace.core.sequence import Sequence, Step
from outpace.core.tree import ROOT, Budget, Tree
from outpace.errors import UsageError

# Retrieval whose tree is pruned may draft more freely than retrieval that is verified as it is.
FREER: dict[str, dict[str, Any]] = {
    "suffix": {"per_match": 4.0},
    "recycling": {"nodes": 20, "depth": 5},
    "prediction": {"depth": 32},
}


@dataclass(eq=False)
class Auto(Drafter):
    """Drafts of several methods; verifies the part that pays."""

    policy = "auto"
    draft: LM | None = None
    candidates: str = "prediction+suffix+recycling"  # "name:option=value" each; heads too, one of them level by level
    _parts: list[Drafter] = field(init=False, repr=False)
    _limits: list[Budget] = field(init=False, repr=False)
    _model: Drafter | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        named = [registry.parse(spec) for spec in self.candidates.split("+") if spec.strip()]
        wrong = [name for name, _ in named if name == "auto" or _needs_model(registry.find(name))]
        if wrong:
            raise UsageError(
                f"{wrong[0]!r} cannot be a candidate of auto, which takes methods that need no model, and trained heads"
            )
        made = [registry.method(name, **FREER.get(name, {}) | options) for name, options in named]
        by_level = [part for part in made if part.model_source is not None]
        if self.draft is not None:
            by_level.append(registry.method("draft", draft=self.draft))
        if len(by_level) > 1:
            raise UsageError(
                f"auto drafts level by level with one model, not with both {by_level[0].name} and {by_level[1].name}"
            )
        self._model = by_level[0] if by_level else None
        self._parts = [part for part in made if part.model_source is None]
        self._limits = [part.limit for part in self._parts]
        self.limit = Budget(
            max((limit.depth for limit in self._limits), default=8),
            sum(limit.nodes for limit in self._limits) or 8,
            max((limit.width for limit in self._limits), default=1),
        )

    @property
    def model_source(self) -> str | None:  # type: ignore[override]
        return None if self._model is None else self._model.name

    def models(self) -> list[LM]:
        return [] if self._model is None else self._model.models()

    def open(self, seq: Sequence) -> None:
        parts = self._parts if self._model is None else [*self._parts, self._model]
        for part in parts:
            part.open(seq)
        read = {part.taps: part.name for part in parts if part.taps}
        if len(read) > 1:
            raise UsageError(
                f"{' and '.join(read.values())} read different hidden states and cannot be combined in auto"
            )
        self.taps = next(iter(read), ())
        if seq.target is not None and seq.target.lazy_logits:
            self._drop_logit_readers()

    def _drop_logit_readers(self) -> None:
        """Drop the methods that read the logits of every pass, if there are others."""
        able = [i for i, part in enumerate(self._parts) if not part.reads_logits]
        if able:
            self._parts, self._limits = [self._parts[i] for i in able], [self._limits[i] for i in able]

    def propose(self, seq: Sequence, budget: Budget) -> Tree:
        return self.propose_batch([seq], [budget])[0]

    def propose_batch(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> list[Tree]:
        trees = self._retrieve(seqs, budgets)
        deep = [i for i, budget in enumerate(budgets) if self._model is not None and budget.levels]
        if self._model is not None and deep:
            alike = [replace(budgets[i], width=self._model.limit.width) for i in deep]
            drafted = self._model.propose_batch([seqs[i] for i in deep], alike)
            for i, tree in zip(deep, drafted, strict=True):
                # Draft tokens that were drawn from a distribution must not get siblings from other methods.
                trees[i] = tree if tree.proposals else merge(trees[i], tree, self._model.name)
        return trees

    def _retrieve(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> list[Tree]:
        trees = [Tree([seq.tokens[-1]]) for seq in seqs]
        for part, limit in zip(self._parts, self._limits, strict=True):
            own = [
                Budget(min(b.depth, limit.depth), min(b.nodes, limit.nodes), min(b.width, limit.width)) for b in budgets
            ]
            for tree, found in zip(trees, part.propose_batch(seqs, own), strict=True):
                merge(tree, found, part.name)
                tree.signals.clear()  # only the draft model's signals stay: they mark its nodes
        for seq in seqs:
            seq.state(self, list[bool])[:] = [True]
        return trees

    def observe(self, seq: Sequence, step: Step, scores: Scores) -> None:
        """Learn from a pass, unless nothing was proposed for it: while drafting is off, it should cost nothing."""
        proposed = seq.state(self, list[bool])
        if proposed and proposed.pop():
            for part in self._parts:
                part.observe(seq, step, scores)

    def close(self, seq: Sequence) -> None:
        for part in (*self._parts, *([] if self._model is None else [self._model])):
            part.close(seq)


def _needs_model(cls: type[Drafter]) -> bool:
    """Return whether a method runs a model other than a trained head."""
    return bool(registry.required(cls)) or (cls.model_source is not None and not cls.has_head)


def merge(tree: Tree, other: Tree, source: str) -> Tree:
    """Add the nodes of `other`. A node that both have keeps its source, and its probability rises."""
    place = [ROOT]
    for node in range(1, len(other)):
        parent, signal = place[other.parents[node]], other.signals.get(node)
        prob = other.probs.get(node, None if signal is None else signal.prob)
        known = tree.child(parent, other.tokens[node])
        if known is None:
            known = tree.add(parent, other.tokens[node], signal, other.sources.get(node, source), prob)
        else:
            if signal is not None:
                tree.signals[known] = signal
            if prob is not None:
                tree.probs[known] = 1 - (1 - tree.probs.get(known, 0.0)) * (1 - prob)
        place.append(known)
    return tree
