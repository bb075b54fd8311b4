"""LM: what the loop needs of a model, as target or as draft. SlotLM: the bookkeeping that adapters share.

A model holds sequences in slots, called rows, of different lengths. Tokens are committed to a row by `keep` or fed by
`sync`; nodes that were scored and not kept are provisional: the next pass overwrites them, so rollback costs nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from outpace.core.lm import LM, DraftShape, DraftToken, Embeddings, MemoryNeed, Picks, Reference, Scores
from outpace.core.sequence import common_prefix
from outpace.core.tree import Tree
from outpace.errors import UnsupportedModel, UsageError
from outpace.models.segment import Segment, SegmentOutput, Slot
from outpace.sampling.sampler import Pick
from outpace.threads.worker import Worker

CHUNK = 512  # tokens of a prompt per pass: bounds the memory of a long prefill
RIDE = 16  # so few tokens are not worth a pass of their own: they are fed together with the next tree


class SlotLM(ABC):
    """Rows, common prefixes and provisional trees; an adapter adds how a pass runs and how its cache moves."""

    vocab: int
    context: int
    trees: bool = True
    asynchronous: bool = False
    handy: bool = True
    stack: int = 0
    version: int = 0
    ends: Embeddings | None = None
    chunk: int = CHUNK

    def __init__(self) -> None:
        self.rows: list[Slot] = []
        self.worker = Worker()

    @abstractmethod
    def forward(self, jobs: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        """Run one pass and write its keys and values."""

    @abstractmethod
    def reference(self) -> Reference:
        """The model by itself, to compare with."""

    @abstractmethod
    def reserve(self, jobs: Seq[Segment]) -> None:
        """Make room in the cache for these jobs, or raise `CacheFull`."""

    @abstractmethod
    def commit(self, row: int, path: list[int]) -> None:
        """Move the nodes of `path` to directly behind the row's tokens in its cache."""

    @abstractmethod
    def crop(self, row: int, length: int) -> int:
        """Forget what lies beyond `length`; returns how many tokens could be kept."""

    @abstractmethod
    def copy(self, source: int, target: int, length: int) -> bool:
        """Copy the first `length` tokens' state between rows; False when this model cannot."""

    def acquire(self, tokens: list[int], taps: tuple[int, ...] = ()) -> int:
        def known(index: int) -> int:
            row = self.rows[index]
            return common_prefix(row.tokens, tokens) if row.taps == taps else 0

        free = [i for i, row in enumerate(self.rows) if not row.busy]
        if not free:
            self.rows.append(Slot())
            free = [len(self.rows) - 1]
        best = max(free, key=lambda i: (known(i), -len(self.rows[i].tokens)))
        source = max(range(len(self.rows)), key=known)
        if known(source) > known(best) and self.copy(source, best, known(source)):
            self._truncate(best, self.rows[source], known(source))
        elif self.rows[best].taps != taps:
            self._truncate(best, self.rows[best], self.crop(best, 0))
        row = self.rows[best]
        row.taps, row.busy = taps, True
        return best

    def _truncate(self, index: int, source: Slot, length: int) -> None:
        hidden = self._joined(source)
        self.rows[index].tokens = source.tokens[:length]
        self.rows[index].hidden = [] if hidden is None or not length else [hidden[:length]]

    def release(self, row: int) -> None:
        left = self.rows[row]
        left.busy, left.pending = False, []
        left.forget_tree()

    def clear(self) -> None:
        for index, row in enumerate(self.rows):
            if not row.busy:
                self._truncate(index, row, self.crop(index, 0))

    def refresh(self) -> None:
        self.clear()
        self.version += 1

    def sync(self, tokens: Seq[list[int]], rows: Seq[int]) -> None:
        for wanted, index in zip(tokens, rows, strict=True):
            self._sync(wanted, index)

    def _sync(self, wanted: list[int], index: int) -> None:
        row = self.rows[index]
        row.begun = None
        held = row.tokens + row.pending
        common = common_prefix(held, wanted)
        if row.tree is not None:
            guessed = row.tree.walk(wanted[common:]) if common == len(held) else []
            self.keep_row(index, [node for node in guessed if node < row.scored])
            common = common_prefix(row.tokens, wanted)
        if common < len(row.tokens):
            self._truncate(index, row, self.crop(index, common))
        row.pending = wanted[len(row.tokens) :]
        if len(row.pending) > RIDE:
            self.reserve([Segment(index, len(row.tokens), row.pending)])  # all of it, or nothing is begun
        # A long rest runs now, in chunks; a short one rides on the next pass.
        while len(row.pending) > RIDE:
            self._run([Segment(index, len(row.tokens), row.pending[: self.chunk])])

    def score(
        self, trees: Seq[Tree], rows: Seq[int], since: Seq[int] | None = None, picks: Picks = None
    ) -> list[Scores]:
        jobs = []
        for i, (tree, index) in enumerate(zip(trees, rows, strict=True)):
            row = self.rows[index]
            if not self.trees and not tree.is_chain:
                raise UsageError("this model can only score chains; give its tree a width of 1")
            if row.tree is not None and not (since and since[i]):
                self.keep_row(index, [])  # a new tree overwrites one that was not kept
            pick = picks[i] if picks else None
            jobs.append(Segment(index, len(row.tokens), row.pending, tree, since[i] if since else 0, pick))
        if not any(self.rows[index].taps for index in rows):  # of the first layers there would be none
            jobs = [job.resume(begun) if (begun := self.rows[job.row].begun) else job for job in jobs]
        return self._run(jobs)

    def _run(self, jobs: list[Segment]) -> list[Scores]:
        self.reserve(jobs)
        taps = tuple(sorted({tap for job in jobs for tap in self.rows[job.row].taps}))
        scores = []
        for job in jobs:
            self.rows[job.row].begun = None  # used up, also if the pass breaks off
        for job, output in zip(jobs, self.forward(jobs, taps), strict=True):
            row = self.rows[job.row]
            fed = len(job.pending)
            row.tokens.extend(job.pending)
            row.pending = row.pending[fed:]
            hidden = None
            if row.taps:
                states = torch.cat([output.hidden[tap] for tap in row.taps], dim=-1)
                if fed:
                    row.hidden.append(states[:fed])
                hidden = states[fed:]
                old = [row.provisional] if job.since and row.provisional is not None else []
                row.provisional = torch.cat([*old, hidden])
            if job.tree is not None:
                row.tree, row.scored = job.tree, len(job.tree)
                row.order = None if job.resumed is None else job.resumed.order
                assert output.logits is not None
                logits = output.logits if row.order is None else output.logits[row.order]
                scores.append(Scores(logits, hidden, output.chosen))
        return scores

    def ahead(self, rows: Seq[int], picks: Seq[Pick | None]) -> bool:
        return False

    def guess(
        self, rows: Seq[int], tokens: Seq[int], shapes: Seq[DraftShape], picks: Seq[Pick]
    ) -> list[list[DraftToken]] | None:
        return None

    def slice(self, layers: Seq[int], eager: bool = False) -> LM:
        raise UnsupportedModel(f"{type(self).__name__} cannot be run without some of its layers")

    def early(self, layers: int) -> LM | None:
        return None

    def share(self, layers: int) -> float:
        return layers / max(self.stack, 1)

    def begin(self, jobs: Seq[Segment], layers: int) -> list[SegmentOutput]:
        """For models with `early`: a pass of the first layers and the head, with what leaves them as tap `layers`."""
        raise NotImplementedError

    def memory(self, tokens: int) -> MemoryNeed | None:
        return None

    def keep(self, paths: Seq[list[int]], rows: Seq[int]) -> None:
        for path, index in zip(paths, rows, strict=True):
            order = self.rows[index].order
            self.keep_row(index, path if order is None else [order[node] for node in path])

    def keep_row(self, index: int, path: list[int]) -> None:
        row = self.rows[index]
        assert row.tree is not None, "keep follows score"
        self.commit(index, path)
        row.tokens.extend(row.tree.tokens[node] for node in path)
        if row.provisional is not None:
            row.hidden.append(row.provisional[path])
        row.forget_tree()

    def hidden(self, row: int) -> Tensor | None:
        return self._joined(self.rows[row])

    def _joined(self, row: Slot) -> Tensor | None:
        if len(row.hidden) > 1:
            row.hidden = [torch.cat(row.hidden)]
        return row.hidden[0] if row.hidden else None
