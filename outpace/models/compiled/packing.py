"""Packing: the inputs of a compiled pass as plain tensors, so that its sizes can change but its code need not.

A pass packs the tokens of several segments. Each token attends to the committed entries of its slot, and to the entries
of this pass that are set in its bits.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor, nn

from outpace.models.hf.attention import AttentionRule
from outpace.models.hf.cache import PooledCache
from outpace.models.kernels import attention, cpu, linear, sample, sample_filtered  # noqa: F401 (they define operators)
from outpace.models.segment import Segment

WORDS = 2  # of 64 bits
LONGEST = 64 * WORDS  # the most tokens of a segment in a compiled pass
MOST_SEGMENTS = 64  # in a compiled pass
SIGN = 1 << 63


class CompiledAttention(NamedTuple):
    """The attention input of one layer in a compiled pass: its part of the pool, and which tokens see which entries."""

    keys: Tensor  # [pool, kv heads, dim]
    values: Tensor
    where: Tensor  # [tokens]: pool entries that this pass writes
    segments: Tensor  # [segments, 4]: first token, token count, first pool entry of the slot, committed entries
    bits: Tensor  # [tokens, WORDS]
    positions: Tensor  # [tokens]
    window: int  # 0: none

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """Write the new keys and values, then run attention over old and new ones."""  # out: [1, tokens, heads, dim]
        self.keys.index_copy_(0, self.where, key[0].transpose(0, 1))
        self.values.index_copy_(0, self.where, value[0].transpose(0, 1))
        ops = torch.ops.outpace if query.is_cuda else torch.ops.outpace_cpu
        seen = [self.segments, self.bits, self.positions]
        options = [rule.scaling, float(self.window), rule.softcap or 0.0]
        return ops.attend(query[0].transpose(0, 1), self.keys, self.values, seen, rule.sinks, options)[None]


class Packing(NamedTuple):
    """The tokens of a pass and their places, on the host."""

    columns: list[list[int]]  # [3 + WORDS][tokens]: ids, positions, pool entries, words of bits
    segments: list[list[int]]  # [segments][4]


def fits(segments: Seq[Segment], windows: Seq[int | None], most: int) -> bool:
    """Return whether a compiled pass of at most `most` tokens can run these; no window may end within a segment."""
    longest = max(segment.end - segment.start for segment in segments)
    return (
        len(segments) <= MOST_SEGMENTS
        and sum(len(segment.tokens) for segment in segments) <= most
        and longest <= LONGEST
        and all(window is None or window > longest for window in windows)
    )


def parts(segments: Seq[Segment], most: int) -> list[list[Segment]]:
    """Split segments, in order, into as few passes of at most `most` tokens as possible; a larger one runs alone."""
    found, tokens = [list[Segment]()], 0
    for segment in segments:
        if found[-1] and (tokens + len(segment.tokens) > most or len(found[-1]) == MOST_SEGMENTS):
            found.append([])
            tokens = 0
        found[-1].append(segment)
        tokens += len(segment.tokens)
    return found


def pack(segments: Seq[Segment], cache: PooledCache, tokens: int, batch: int) -> Packing:
    """Pack segments, padded to `tokens` and `batch`; the padding is written to the pool's scrap entries."""
    ids, positions, entries, bits = list[int](), list[int](), list[int](), list[int]()
    found: list[list[int]] = []
    for segment in segments:
        base, fed = cache.base(segment.slot), segment.tokens
        found.append([len(ids), len(fed), base, segment.start])
        first = base + segment.offset
        ids += fed
        positions += segment.positions
        entries += range(first, first + len(fed))
        bits += _bits(segment)
    at, spare = len(ids), tokens - len(ids)
    zeros = [0] * spare
    words = [[_word(mask >> 64 * i) for mask in bits] + [int(not i)] * spare for i in range(WORDS)]
    entries += [i % batch for i in range(at, tokens)]
    found += [[0, 0, 0, 0]] * (batch - len(segments))
    return Packing([ids + zeros, positions + zeros, entries, *words], found)


def _bits(segment: Segment) -> list[int]:
    """For each token of the segment, return the entries after the committed ones that it sees, as a bit mask."""
    fed = len(segment.pending)
    bits = [(1 << (i + 1)) - 1 for i in range(fed)]
    if segment.layout is not None:
        before = (1 << fed) - 1
        bits += [before | nodes << fed for nodes in segment.layout.sees(segment.since)]
    return bits


def _word(bits: int) -> int:
    """Return the lowest 64 bits as a signed number."""
    return bits if bits < SIGN else (bits + SIGN & 2 * SIGN - 1) - SIGN
