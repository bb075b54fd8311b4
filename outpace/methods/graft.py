"""Graft: stops another method's draft where it is unsure, and fills the free places with successors of the root.

A pruned tree can never have more accepted tokens than the full tree, but nodes from another source can. So the number
of nodes stays the same, the draft costs less, and its unsure part is replaced by the target's earlier predictions.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import ClassVar

from outpace import registry
from outpace.core.drafter import Drafter
from outpace.core.lm import LM, Scores
from outpace.core.sequence import Sequence, Step
from outpace.core.tree import Budget, Tree
from outpace.drafting import graft_gates, tuning_file
from outpace.drafting.graft_gates import Grafting
from outpace.drafting.rank_template import TemplateNode, template
from outpace.drafting.successor_table import Successors
from outpace.errors import UsageError

SPARE = 3  # size of the template, in `nodes`: some of its tokens are in the tree already, some are unknown


@dataclass(eq=False)
class Graft(Drafter):
    """Another method's draft, its unlikely part replaced by recycled tokens."""

    reads_logits: ClassVar[bool] = True
    draft: LM | None = None
    inner: str | Drafter | None = None  # the wrapped method; None: draft, or suffix if there is no draft
    nodes: int = 60
    calibration: str | None = None  # a file from `outpace calibrate`
    _inner: Drafter = field(init=False, repr=False)
    _grafting: Grafting = field(init=False, repr=False)
    _known: Successors = field(init=False, repr=False)
    _slots: list[TemplateNode] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise UsageError(f"graft needs nodes >= 1, got {self.nodes}")
        found = Grafting() if self.calibration is None else _read(self.calibration)
        self._inner, self._grafting = registry.inner(self.inner, self.draft), found
        width = max(map(len, found.ranks))
        self._known = Successors(width)
        own = self._inner.limit
        self.limit = Budget(max(own.depth, len(found.ranks)), self.nodes, own.width + width)
        self._slots = template(found.ranks, SPARE * self.nodes, self.limit.depth)

    @property
    def model_source(self) -> str | None:  # type: ignore[override]
        return self._inner.model_source or (None if self._inner.model_source is None else self._inner.name)

    def models(self) -> list[LM]:
        return self._inner.models()

    def open(self, seq: Sequence) -> None:
        self._inner.open(seq)
        self.taps = self._inner.taps

    def propose(self, seq: Sequence, budget: Budget) -> Tree:
        return self.propose_batch([seq], [budget])[0]

    def propose_batch(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> list[Tree]:
        shares = [self._share(budget) for budget in budgets]
        drafted = [
            tree if tree.proposals else tree.trim(share)
            for tree, share in zip(self._inner.propose_batch(seqs, shares), shares, strict=True)
        ]
        return [self._grafted(*given) for given in zip(seqs, drafted, budgets, strict=True)]

    def _share(self, budget: Budget) -> Budget:
        """The budget of the wrapped method, with the gates at which it may stop."""
        own = self._inner.limit
        return replace(
            budget, depth=min(budget.depth, own.depth), nodes=min(budget.nodes, own.nodes),
            width=min(budget.width, own.width), stop=self._grafting.stops if self._grafting.gates else None,
        )  # fmt: skip

    def _grafted(self, seq: Sequence, drafted: Tree, budget: Budget) -> Tree:
        self._learn_prompt(seq)
        if drafted.proposals:  # tokens drawn from a distribution must stay, and must not get siblings
            return drafted
        tree = graft_gates.prune(drafted, self._grafting.gates, budget.nodes)
        for node in range(1, len(tree)):
            tree.sources.setdefault(node, self._inner.name)
        source = f"{self.name}: retrieved"
        if budget.width == 1:
            return graft_gates.extend(tree, self._known, self._grafting.ranks, budget, source)
        return graft_gates.fill(tree, self._slots, self._known, budget, source)

    def observe(self, seq: Sequence, step: Step, scores: Scores) -> None:
        self._inner.observe(seq, step, scores)
        self._learn_prompt(seq)
        self._known.learn(step.tree, scores.logits)

    def _learn_prompt(self, seq: Sequence) -> None:
        def learn() -> bool:
            self._known.sized(seq.vocab)
            self._known.learn_text(seq.tokens)
            return True

        seq.state(self, learn)

    def close(self, seq: Sequence) -> None:
        self._inner.close(seq)


def _read(path: str) -> Grafting:
    found = tuning_file.section(path, "graft")
    try:
        return Grafting.from_section(found)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"the calibration file {path!r} has an invalid section for graft: {error!r}") from error
