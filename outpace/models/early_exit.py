"""EarlyLM: the first layers of a model, and its final norm and head, as a draft on the model's own rows.

What it scores is written where the model itself would write it, and the states that leave its last layer are kept. So
when the model scores the drafted tree, nodes that were fed here go on from there: no layer runs twice for a node.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from outpace.core.lm import DraftShape, DraftToken, Embeddings, MemoryNeed, Picks, Reference, Scores
from outpace.core.tree import Tree
from outpace.errors import UsageError
from outpace.models.segment import PartialPass, Segment
from outpace.models.slots import SlotLM
from outpace.sampling.sampler import Pick


class EarlyLM:
    """A model's first layers. Its rows are the model's; what it began, only the model can keep."""

    asynchronous = False
    handy = True

    def __init__(self, whole: SlotLM, layers: int):
        if not 0 < layers < whole.stack:
            raise UsageError(f"a model of {whole.stack} layers has exits after 1 to {whole.stack - 1}, got {layers}")
        self.whole, self.stack = whole, layers
        self.vocab, self.context, self.trees = whole.vocab, whole.context, whole.trees
        self.ends: Embeddings | None = None
        self.worker = whole.worker

    def acquire(self, tokens: list[int], taps: tuple[int, ...] = ()) -> int:
        return self.whole.acquire(tokens, taps)

    def release(self, row: int) -> None:
        self.whole.release(row)

    def sync(self, tokens: Seq[list[int]], rows: Seq[int]) -> None:
        self.whole.sync(tokens, rows)

    def score(
        self, trees: Seq[Tree], rows: Seq[int], since: Seq[int] | None = None, picks: Picks = None
    ) -> list[Scores]:
        jobs = []
        for i, (tree, index) in enumerate(zip(trees, rows, strict=True)):
            row, first = self.whole.rows[index], since[i] if since else 0
            if row.tree is not None:
                self.whole.keep_row(index, [])  # a new tree overwrites one that was not kept
            if first:  # what is pending was begun with the first nodes
                jobs.append(Segment(index, len(row.tokens) + len(row.pending), [], tree, first))
            else:
                jobs.append(Segment(index, len(row.tokens), row.pending, tree))
        self.whole.reserve(jobs)
        scores = []
        for job, output in zip(jobs, self.whole.begin(jobs, self.stack), strict=True):
            assert job.tree is not None and output.logits is not None
            row, states = self.whole.rows[job.row], output.hidden[self.stack]
            if job.since:
                assert row.begun is not None, "nodes are scored after those before them"
                states = torch.cat([row.begun.states, states])
            row.begun = PartialPass(job.tree, self.stack, states)
            scores.append(Scores(output.logits))
        return scores

    def keep(self, paths: Seq[list[int]], rows: Seq[int]) -> None:
        """What was begun is kept by the model, or forgotten."""

    def ahead(self, rows: Seq[int], picks: Seq[Pick | None]) -> bool:
        return False

    def guess(
        self, rows: Seq[int], tokens: Seq[int], shapes: Seq[DraftShape], picks: Seq[Pick]
    ) -> list[list[DraftToken]] | None:
        return None

    def slice(self, layers: Seq[int], eager: bool = False) -> SlotLM:
        raise UsageError("slice the model, not its first layers")

    def early(self, layers: int) -> None:
        return None

    def share(self, layers: int) -> float:
        return self.whole.share(layers)

    def clear(self) -> None:
        self.whole.clear()

    @property
    def version(self) -> int:
        return self.whole.version

    def refresh(self) -> None:
        """It has neither rows nor weights of its own."""

    def hidden(self, row: int) -> Tensor | None:
        return None

    def reference(self) -> Reference:
        return self.whole.slice(range(self.stack), eager=True).reference()

    def memory(self, tokens: int) -> MemoryNeed | None:
        return self.whole.memory(tokens)
