"""Bitwise passes: every pass has the same shape, so every token is computed by the same kernels in the same order.

A matrix product of one token and one of eight tokens may round differently. Here every pass has `TOKENS` tokens, padded
with zeros, and every query attends alone to its own path, laid out as in plain decoding. So a token's logits depend
only on the tokens before it, bit for bit, in every dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from outpace.core.tree import Tree
from outpace.errors import UnsupportedModel
from outpace.models.hf.eager import EagerRunner
from outpace.models.segment import Segment, SegmentOutput

if TYPE_CHECKING:
    from outpace.models.hf.lm import TransformersLM

TOKENS = 16  # tokens of every pass, also of a plain decode step; a larger tree takes several passes
PROBE = 8  # tokens whose logits are compared bit for bit


class Part(NamedTuple):
    """A piece of a segment that fits into one pass, and the index of that segment."""

    owner: int
    segment: Segment


class BitwiseRunner(EagerRunner):
    """Eager passes in which a token's results do not depend on the other tokens of the pass."""

    kind = "bitwise"

    def __init__(self, lm: TransformersLM):
        super().__init__(lm, alone=True)

    def forward(self, segments: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        outputs: list[list[SegmentOutput]] = [[] for _ in segments]
        for parts in _passes(segments):
            results = super().forward([part.segment for part in parts], taps)
            for part, output in zip(parts, results, strict=True):
                outputs[part.owner].append(output)
        return [_joined(pieces) for pieces in outputs]

    def early_exit(self, count: int) -> None:
        """Return None: there are no early exits, since partial passes would need a fixed shape too."""

    def ids_and_positions(self, segments: Seq[Segment]) -> Tensor:  # [2, TOKENS]
        given = super().ids_and_positions(segments)
        return torch.nn.functional.pad(given, (0, TOKENS - given.shape[1]))

    def _pass(self, segments: Seq[Segment], nodes: list[int]) -> Tensor:  # [nodes, vocab]
        return super()._pass(segments, list(range(TOKENS)))[nodes]  # the head needs a fixed shape too

    def install_on_slice(self, part: TransformersLM) -> None:
        part.runner = BitwiseRunner(part)


def make_bitwise(lm: TransformersLM) -> None:
    """Make this model run bitwise passes; raise `UnsupportedModel` if its tokens still depend on each other."""
    lm.runner = BitwiseRunner(lm)
    if not _same_bits(lm):
        kind = f"{type(lm.model).__name__} in {lm.model.dtype} on {lm.device}"
        raise UnsupportedModel(
            f"bitwise=True cannot be guaranteed: {kind} rounds a token differently depending on the rest of its pass"
        )


@torch.no_grad()
def _same_bits(lm: TransformersLM) -> bool:
    """Return whether a text has the same logits token by token and as part of a tree."""
    tokens = [(13 + 5 * i) % lm.vocab for i in range(PROBE)]
    tree = Tree.chain(tokens)
    for i in range(PROBE):  # a second branch at each node, so that the layout is no chain
        tree.add(i, (tokens[i] + 1) % lm.vocab)
    one_by_one = []
    slot = lm.acquire([])
    for token in tokens:
        one_by_one.append(lm.score([Tree([token])], [slot])[0].logits.all())
        lm.keep([[0]], [slot])
    again = lm.acquire([])
    at_once = lm.score([tree], [again])[0].logits.all()[:PROBE]
    for held in (slot, again):
        lm.release(held)
    lm.clear()
    return torch.equal(at_once, torch.cat(one_by_one))


def _passes(segments: Seq[Segment]) -> Iterator[list[Part]]:
    """Cut all segments, in order, into pieces so that each pass has at most `TOKENS` tokens."""
    parts, room = list[Part](), TOKENS
    for index, segment in enumerate(segments):
        at, count = 0, segment.count
        while at < count:
            piece = _cut(segment, at, min(count, at + room))
            parts.append(Part(index, piece))
            at, room = at + len(piece.tokens), room - len(piece.tokens)
            if not room:
                yield parts
                parts, room = [], TOKENS
    if parts:
        yield parts


def _cut(segment: Segment, start: int, end: int) -> Segment:
    """Return the part of a segment between two of its tokens."""
    fed = len(segment.pending)
    pending = segment.pending[start:end]
    if segment.layout is None or end <= fed:
        return Segment(segment.slot, segment.start + start, pending)
    nodes = segment.since + end - fed  # parents come first, so the nodes up to here form a tree
    tree = Tree(segment.tree.tokens[:nodes], segment.tree.parents[:nodes])
    return Segment(segment.slot, segment.start + min(start, fed), pending, tree, segment.since + max(0, start - fed))


def _joined(pieces: list[SegmentOutput]) -> SegmentOutput:
    logits = [piece.logits for piece in pieces if isinstance(piece.logits, Tensor)]
    taps = pieces[0].hidden
    return SegmentOutput(
        torch.cat(logits) if logits else None, {tap: torch.cat([piece.hidden[tap] for piece in pieces]) for tap in taps}
    )
