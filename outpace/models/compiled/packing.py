"""Packing: the inputs of a compiled pass as plain tensors, so that its sizes can change but its code need not.

A pass packs the tokens of several segments. Each token attends to the committed entries of its slot, and to the entries
of this pass that are set in its bits.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor, nn

from outpace.models.cache.pool import SCRAP
from outpace.models.hf.attention import AttentionRule
from outpace.models.hf.cache import PooledCache
from outpace.models.kernels import attention_op, cpu, linear, sample, sample_filtered  # noqa: F401 (they define operators)
from outpace.models.segment import Segment

WORDS = 2  # of 64 bits
LONGEST = 64 * WORDS  # the most tokens of a segment in a compiled pass
MOST_SEGMENTS = 256  # in a compiled pass
SIGN = 1 << 63


class CompiledAttention(NamedTuple):
    """The attention input of one layer in a compiled pass: its part of the pool, and which tokens see which entries."""

    keys: Tensor  # [pool, kv heads, dim]
    values: Tensor
    where: Tensor  # [tokens]: pool entries that this pass writes
    # [segments, 4]: first token, token count, where entry 0 of the slot's text is in the pool, committed entries. With
    # a window, that may be before the slot's region, and even before the pool: no token sees the first entries.
    segments: Tensor
    bits: Tensor  # [tokens, WORDS]; of prompts [0, WORDS]: each token sees all before it
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

    columns: list[list[int]]  # [3 + WORDS or 3][tokens]: ids, positions, pool entries, words of bits
    segments: list[list[list[int]]]  # [groups of layers][segments][4]
    more: list[list[int]]  # [groups - 1][tokens]: pool entries in the further groups


def fits(segments: Seq[Segment], windows: Seq[int | None], most: int) -> bool:
    """Return whether a compiled pass of at most `most` tokens can run these; no window may end within a segment."""
    longest = max(segment.end - segment.start for segment in segments)
    return (
        len(segments) <= MOST_SEGMENTS
        and sum(segment.count for segment in segments) <= most
        and longest <= LONGEST
        and all(window is None or window > longest for window in windows)
    )


def parts(segments: Seq[Segment], most: int) -> list[list[Segment]]:
    """Split segments, in order, into as few passes of at most `most` tokens as possible; a larger one runs alone."""
    found, tokens = [list[Segment]()], 0
    for segment in segments:
        if found[-1] and (tokens + segment.count > most or len(found[-1]) == MOST_SEGMENTS):
            found.append([])
            tokens = 0
        found[-1].append(segment)
        tokens += segment.count
    return found


def pack(segments: Seq[Segment], cache: PooledCache, tokens: int, batch: int) -> Packing:
    """Pack segments, padded to `tokens` and `batch`; the padding is written to the pool's scrap entries."""
    packed = pack_prompts(segments, cache, batch)
    columns, count = packed.columns, len(packed.columns[0])
    zeros = [0] * (tokens - count)
    bits = [mask for segment in segments for mask in _bits(segment)]
    words = [[word(mask >> 64 * i) for mask in bits] + [int(not i)] * len(zeros) for i in range(WORDS)]
    scrap = [i % SCRAP for i in range(count, tokens)]
    rows = [columns[0] + zeros, columns[1] + zeros, columns[2] + scrap, *words]
    return Packing(rows, packed.segments, [where + scrap for where in packed.more])


def pack_prompts(segments: Seq[Segment], cache: PooledCache, batch: int) -> Packing:
    """Pack segments without bits, because every token of a prompt sees all tokens before it."""
    ids, positions = list[int](), list[int]()
    entries: list[list[int]] = [[] for _ in cache.groups]
    found: list[list[list[int]]] = [[] for _ in cache.groups]
    for segment in segments:
        fed = segment.tokens
        for where, jobs, origin in zip(entries, found, cache.origins(segment.slot), strict=True):
            jobs.append([len(ids), len(fed), origin, segment.start])
            where += range(origin + segment.offset, origin + segment.offset + len(fed))
        ids += fed
        positions += segment.positions
    for jobs in found:
        jobs += [[0, 0, 0, 0]] * (batch - len(segments))
    return Packing([ids, positions, entries[0]], found, entries[1:])


def _bits(segment: Segment) -> list[int]:
    """For each token of the segment, return the entries after the committed ones that it sees, as a bit mask."""
    fed, layout = len(segment.pending), segment.layout
    if layout is not None and not fed and len(layout.tokens) == 1:
        return [1]
    bits = [(1 << (i + 1)) - 1 for i in range(fed)]
    if layout is not None:
        before = (1 << fed) - 1
        bits += [before | nodes << fed for nodes in layout.sees(segment.since)]
    return bits


def word(bits: int) -> int:
    """Return the lowest 64 bits as a signed number."""
    return bits if bits < SIGN else (bits + SIGN & 2 * SIGN - 1) - SIGN
