"""Lane: what one layer of a compiled pass attends to, as tensors alone: the shape of a pass changes, its code does not.

A pass packs the tokens of several jobs. Each token sees the committed entries of its row, and those entries of this
pass that its ancestor bits name.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor, nn

from outpace.models.hf.attention import AttentionRule
from outpace.models.hf.pooled_cache import PooledCache
from outpace.models.kernels import attention, cpu, linear, sample, sample_filtered  # noqa: F401 (they define the operators)
from outpace.models.segment import Segment

WORDS = 2  # of 64 ancestor bits
LONGEST = 64 * WORDS  # tokens that a request has in a compiled pass
MOST_JOBS = 64  # requests in a compiled pass
SIGN = 1 << 63


class CompiledAttention(NamedTuple):
    """One layer's side of the pool, and who sees what in it."""

    keys: Tensor  # [pool, kv heads, dim]
    values: Tensor
    where: Tensor  # [tokens]: entries of the pool that this pass writes
    jobs: Tensor  # [jobs, 4]: first token, tokens, where its row begins in the pool, committed entries
    bits: Tensor  # [tokens, WORDS]
    positions: Tensor  # [tokens]
    window: int  # 0: none

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """Write the new keys and values, then attend to all at once."""  # out: [1, tokens, heads, dim]
        self.keys.index_copy_(0, self.where, key[0].transpose(0, 1))
        self.values.index_copy_(0, self.where, value[0].transpose(0, 1))
        ops = torch.ops.outpace if query.is_cuda else torch.ops.outpace_cpu
        seen, options = [self.jobs, self.bits, self.positions], [rule.scaling, float(self.window), rule.softcap or 0.0]
        return ops.attend(query[0].transpose(0, 1), self.keys, self.values, seen, rule.sinks, options)[None]


class Packing(NamedTuple):
    """The tokens of a pass and where they go, on the host."""

    columns: list[list[int]]  # [3 + WORDS][tokens]: ids, positions, entries of the pool, words of ancestor bits
    jobs: list[list[int]]  # [jobs][4]


def fits(jobs: Seq[Segment], windows: Seq[int | None], most: int) -> bool:
    """Whether a compiled pass of at most `most` tokens can run these, with no window that ends within one."""
    longest = max(job.end - job.start for job in jobs)
    return (
        len(jobs) <= MOST_JOBS
        and sum(len(job.tokens) for job in jobs) <= most
        and longest <= LONGEST
        and all(window is None or window > longest for window in windows)
    )


def parts(jobs: Seq[Segment], most: int) -> list[list[Segment]]:
    """Jobs in as few passes of at most `most` tokens as hold them, in their order; one that is larger has its own."""
    found, tokens = [list[Segment]()], 0
    for job in jobs:
        if found[-1] and (tokens + len(job.tokens) > most or len(found[-1]) == MOST_JOBS):
            found.append([])
            tokens = 0
        found[-1].append(job)
        tokens += len(job.tokens)
    return found


def pack(jobs: Seq[Segment], cache: PooledCache, tokens: int, slots: int) -> Packing:
    """Jobs as numbers, filled up to `tokens` and `slots`; what only fills up is written to the pool's scrap."""
    ids, positions, entries, bits = list[int](), list[int](), list[int](), list[int]()
    found: list[list[int]] = []
    for job in jobs:
        base, fed = cache.base(job.row), job.tokens
        found.append([len(ids), len(fed), base, job.start])
        first = base + job.offset
        ids += fed
        positions += job.positions
        entries += range(first, first + len(fed))
        bits += _bits(job)
    at, spare = len(ids), tokens - len(ids)
    zeros = [0] * spare
    words = [[_word(mask >> 64 * i) for mask in bits] + [int(not i)] * spare for i in range(WORDS)]
    entries += [i % slots for i in range(at, tokens)]
    found += [[0, 0, 0, 0]] * (slots - len(jobs))
    return Packing([ids + zeros, positions + zeros, entries, *words], found)


def _bits(job: Segment) -> list[int]:
    """Of each token of the job: the entries behind the committed ones that it sees, as bits of one number."""
    fed = len(job.pending)
    bits = [(1 << (i + 1)) - 1 for i in range(fed)]
    if job.tree is not None:
        nodes: list[int] = []
        for node, parent in enumerate(job.tree.parents):
            nodes.append((nodes[parent] if parent >= 0 else (1 << fed) - 1) | 1 << (fed + node))
        bits += nodes[job.since :]
    return bits


def _word(bits: int) -> int:
    """The lowest 64 bits, as a signed number."""
    return bits if bits < SIGN else (bits + SIGN & 2 * SIGN - 1) - SIGN
