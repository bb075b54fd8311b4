"""Exact passes: one shape for everything, so that every token is computed by the same kernels in the same order.

A matrix product of one row and one of eight rows may round differently. Here every pass has `ROWS` rows, filled up
with zeros where there is less to do, and every query attends alone to its own path, laid out as plain decoding has it.
So a token's logits depend on the tokens before it and on nothing else, bit for bit, in every dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outpace.core.lm import LM
from outpace.core.tree import Tree
from outpace.errors import UnsupportedModel
from outpace.models.hf.attention import EagerAttention
from outpace.models.hf.lm import PROBE, PackedLM
from outpace.models.segment import Segment, SegmentOutput

ROWS = 16  # a plain pass costs as much as one of so many rows; a larger tree takes several passes


class Part(NamedTuple):
    """A piece of a job that fits into one pass, and which job it is of."""

    owner: int
    job: Segment


class BitwiseLM(PackedLM):
    """A packed model whose results do not depend on what else is in a pass."""

    def forward(self, jobs: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        outputs: list[list[SegmentOutput]] = [[] for _ in jobs]
        for parts in _passes(jobs):
            for part, output in zip(parts, super().forward([part.job for part in parts], taps), strict=True):
                outputs[part.owner].append(output)
        return [_joined(pieces) for pieces in outputs]

    def early(self, layers: int) -> LM | None:
        return None  # parts of a pass would have to have one shape too

    def _inputs(self, jobs: Seq[Segment]) -> Tensor:  # [2, ROWS]: token ids and positions
        given = super()._inputs(jobs)
        return torch.nn.functional.pad(given, (0, ROWS - given.shape[1]))

    def _reach(self, jobs: Seq[Segment]) -> EagerAttention:
        return EagerAttention(self.cache, jobs, self.windows, self.device, alone=True)

    def _pass(self, jobs: Seq[Segment], nodes: list[int]) -> Tensor:  # [nodes, vocab]
        return super()._pass(jobs, list(range(ROWS)))[nodes]  # the head is a matrix product too

    @classmethod
    def fitting(cls, model: PreTrainedModel, cache_limit: int | None = None) -> PackedLM | None:
        """The adapter, if the model can be packed; `UnsupportedModel` if its rows depend on each other even so."""
        lm = super().fitting(model, cache_limit)
        if isinstance(lm, BitwiseLM) and not lm._same_bits():
            kind = f"{type(model).__name__} in {model.dtype} on {lm.device}"
            raise UnsupportedModel(f"exact=True cannot be kept: {kind} rounds a row by what else is in the pass")
        return lm

    @torch.no_grad()
    def _same_bits(self) -> bool:
        """Whether a text has the same logits token by token and as part of a tree."""
        tokens = [(13 + 5 * i) % self.vocab for i in range(PROBE)]
        tree = Tree.chain(tokens)
        for i in range(PROBE):  # a sibling of each, so that the chain's nodes lie apart
            tree.add(i, (tokens[i] + 1) % self.vocab)
        one_by_one = []
        row = self.acquire([])
        for token in tokens:
            one_by_one.append(self.score([Tree([token])], [row])[0].logits)
            self.keep([[0]], [row])
        again = self.acquire([])
        at_once = self.score([tree], [again])[0].logits[:PROBE]
        for held in (row, again):
            self.release(held)
        self.clear()
        return torch.equal(at_once, torch.cat(one_by_one))


def _passes(jobs: Seq[Segment]) -> Iterator[list[Part]]:
    """All jobs in order, cut into pieces so that each pass has at most `ROWS` tokens."""
    parts, room = list[Part](), ROWS
    for index, job in enumerate(jobs):
        at, count = 0, len(job.tokens)
        while at < count:
            piece = _cut(job, at, min(count, at + room))
            parts.append(Part(index, piece))
            at, room = at + len(piece.tokens), room - len(piece.tokens)
            if not room:
                yield parts
                parts, room = [], ROWS
    if parts:
        yield parts


def _cut(job: Segment, start: int, end: int) -> Segment:
    """The part of a job between two of its tokens."""
    fed = len(job.pending)
    pending = job.pending[start:end]
    if job.tree is None or end <= fed:
        return Segment(job.row, job.start + start, pending)
    nodes = job.since + end - fed  # a tree up to here is a tree: parents come first
    tree = Tree(job.tree.tokens[:nodes], job.tree.parents[:nodes])
    return Segment(job.row, job.start + min(start, fed), pending, tree, job.since + max(0, start - fed))


def _joined(pieces: list[SegmentOutput]) -> SegmentOutput:
    logits = [piece.logits for piece in pieces if piece.logits is not None]
    taps = pieces[0].hidden
    return SegmentOutput(
        torch.cat(logits) if logits else None, {tap: torch.cat([piece.hidden[tap] for piece in pieces]) for tap in taps}
    )
