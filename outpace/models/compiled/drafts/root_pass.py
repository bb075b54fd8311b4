"""The first pass of a draft: it feeds every slot's pending tokens and its root, and is captured like the later ones."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from outpace.core.tree import Tree
from outpace.models.compiled import packing
from outpace.models.compiled.graph_pass import SIZES, Staging, rounded
from outpace.models.hf.module import STATE, recording
from outpace.models.segment import Segment

if TYPE_CHECKING:
    from outpace.models.compiled.runner import CompiledRunner

COLUMNS = 3 + packing.WORDS  # of a token: id, position, pool entry, bits; then its entries in further groups
FEWEST = 2  # tokens and segments of a pass; a size of one would compile as another program


class RootOutputs(NamedTuple):
    """What the pass leaves of every root."""

    logits: Tensor  # [rows, vocab], or of the draft vocabulary if `narrow`
    left: Tensor | None  # [rows, hidden]: the state that a head feeds back to itself


class RootSize(NamedTuple):
    """The size of a first pass."""

    tokens: int
    rows: int
    numbers: int  # further numbers that the host sends

    @classmethod
    def of_segments(cls, segments: Seq[Segment], numbers: int, rows: int, exact: bool) -> RootSize:
        tokens = sum(segment.count for segment in segments)
        return cls(max(FEWEST, tokens) if exact else rounded(tokens, SIZES), rows, numbers)


class RootPass:
    """A first pass of one size. Everything that it reads has a fixed place."""

    def __init__(self, runner: CompiledRunner, size: RootSize, states: Tensor | None, narrow: bool):
        """`states` are examples of those that enter with the tokens, for a head."""  # [tokens, taps * hidden]
        self.runner, self.size, self.narrow = runner, size, narrow
        groups, batch = len(runner.cache.groups), max(FEWEST, size.rows)
        parts = [size.tokens * (COLUMNS + groups - 1), groups * batch * 4, size.numbers]
        self.staging = Staging(sum(parts), runner.lm.device)
        columns, segments, self.numbers = self.staging.given.split(parts)
        self.columns, self.segments = columns.view(-1, size.tokens), segments.view(groups, batch, 4)
        self.states = None if states is None else states.new_zeros(size.tokens, states.shape[1])

    def run(self) -> RootOutputs:
        """Run the pass on what was sent."""
        runner, (ids, positions, where) = self.runner, self.columns[:3]
        bits, entries = self.columns[3:COLUMNS].T.contiguous(), [where, *self.columns[COLUMNS:]]
        given = runner.module_inputs(positions, runner.attention(entries, list(self.segments), bits, positions))
        roots = (self.segments[0, : self.size.rows, :2].sum(1) - 1).clamp(min=0)
        if self.states is not None:
            given["features"] = runner.lm.fuse(self.states)[None]  # type: ignore[attr-defined]
        if self.narrow:
            given["narrow"] = True  # logits of the draft vocabulary only: the full one takes most of the time
        with recording(runner.module, STATE if self.states is not None else ()) as recorded:
            logits = runner.module(input_ids=ids[None], **given, logits_to_keep=roots).logits[0]
        return RootOutputs(logits, recorded[-1].index_select(0, roots) if recorded else None)

    @property
    def places(self) -> Tensor:
        """Of every row: its entries after this pass, 1 for a used slot, its text's place in each group of layers."""
        # [2 + groups, rows]
        rows = self.segments[:, : self.size.rows]  # [groups, rows, 4]
        count, length = rows[0, :, 1], rows[0, :, 3]
        return torch.cat([torch.stack([length + count, (count > 0).long()]), rows[:, :, 2]])

    def send(self, segments: Seq[Segment], numbers: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """Send all inputs of the pass to the device, without waiting for it."""
        packed = packing.pack(segments, self.runner.cache, self.size.tokens, self.segments.shape[1])
        host, count, end = self.staging.open(), self.columns.numel(), self.columns.numel() + self.segments.numel()
        host[:count] = np.array([*packed.columns, *packed.more]).reshape(-1)
        host[count:end] = np.array(packed.segments).reshape(-1)
        host[end:] = numbers.reshape(-1)
        self.staging.send()
        if self.states is not None:
            entering = [segment.features for segment in segments if segment.features is not None]
            torch.cat(entering, out=self.states[: sum(map(len, entering))])


def root_segments(runner: CompiledRunner, slots: Seq[int], tokens: Seq[int]) -> list[Segment]:
    """Return the segments of a first pass; for a head, with the target's states as they are."""
    lm, found = runner.lm, list[Segment]()
    for index, token in zip(slots, tokens, strict=True):
        slot = lm.slots[index]
        if slot.layout is not None:
            lm.keep_slot(index, [])  # the new draft overwrites one that was not kept
        segment = Segment(index, slot.length, slot.pending, Tree([token]))
        found.append(lm.with_states(segment))
    return found
