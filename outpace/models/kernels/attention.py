"""Triton kernel for attention of a few queries, each with its own ancestors, over long prefixes of different lengths.

Several programs split the entries of a sequence, and the last to finish merges their parts of the softmax (split-KV).
Query heads that share a key head are rows of the same tile, so no key is read twice for them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.models.kernels.triton_runtime import DTYPES, begin, constexpr, counters, early, jit, machine, power, tl

PART = 96  # rows of a part that takes about as long to merge as a chunk takes to read (H200, 256 to 8,192 entries)


class PassVisibility(NamedTuple):
    """Which entries each token sees in one pass. It is on the device, and the host reads nothing of it."""

    jobs: Tensor  # int64 [jobs, 4]: first token, number of tokens, first entry, committed entries
    # int64 [tokens, words]: bit j of word w: the token sees entry 64 w + j after the committed ones. Of prompts, [0,
    # words]: each token sees all entries before it.
    bits: Tensor
    positions: Tensor  # int64 [tokens]: position in the text


class KernelRule(NamedTuple):
    """How query-key products become attention weights."""

    scale: float
    window: int = 0  # 0 is none; entries of this pass are masked by their bits alone
    softcap: float = 0.0  # 0 is none
    sinks: Tensor | None = None  # [heads]: one more logit in the softmax denominator


@dataclass(frozen=True)
class AttentionTiles:
    """How the work is split: rows and entries of a tile, and programs that share the entries of a job."""

    block_m: int
    block_n: int  # 16, 32 or 64, so that a chunk's bits lie in one word
    splits: int
    warps: int = 4
    stages: int = 3


def plan(q: Tensor, keys: Tensor, jobs: int) -> AttentionTiles:
    """Choose the tiles for these shapes: programs for all multiprocessors, if there are enough chunks of entries."""
    (tokens, heads, dim), (pool, kv_heads, _), gpu = q.shape, keys.shape, machine(q.device)
    live = -(-3 * min(jobs, tokens) // 4) if jobs > 2 else 1  # the number of jobs is rounded up, so some are empty
    rows = -(-tokens // live) * (heads // kv_heads)  # rows per job, if the jobs are equal
    width = power(dim) * q.element_size()  # bytes of an entry's key
    wide = q.element_size() > 2  # no matrix unit: larger tiles would spill registers
    # Tall tiles read the entries less often, but there are fewer of them, and the last program has more to merge.
    most = 128 if pool // jobs >= 2**13 and dim <= 128 else 64
    block_m = 16 if wide else min(most, max(16, power(rows)))
    block_n = max(16, min(64, 2**14 // width))
    short = block_m * power(dim) == 2**13 and pool // jobs < 2**12  # most of the time goes to merging large parts
    warps = 8 if wide or short or block_m > 64 or block_m * power(dim) > 2**13 else 4
    programs = gpu.processors * (1 if short or block_m > 64 else 2)  # programs that run at a time
    useful = math.ceil(math.sqrt(pool / block_n * PART / block_m))
    splits = min(64, programs // (live * -(-rows // block_m) * kv_heads), useful)
    need = (4 if block_m < 64 else 6) * block_n * width + block_m * width + 2**13  # shared memory, three stages
    return AttentionTiles(block_m, block_n, max(1, splits), warps, 3 if need <= gpu.shared else 2)


def launch(
    q: Tensor, keys: Tensor, values: Tensor, seen: PassVisibility, rule: KernelRule, cut: AttentionTiles | None = None
) -> Tensor:
    """Launch the kernel; `cut` overrides the tiles that `plan` gives."""
    (tokens, heads, dim), kv_heads, jobs = q.shape, keys.shape[1], seen.jobs.shape[0]
    if q.dtype not in DTYPES or keys.dtype != q.dtype or values.dtype != q.dtype or keys.shape != values.shape:
        raise ValueError(
            f"queries in {q.dtype}, keys in {keys.dtype} of shape {tuple(keys.shape)} and the values do not match"
        )
    if keys.stride(2) != 1 or values.stride(2) != 1:
        raise ValueError("the head dimension of keys and values must be contiguous")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if tokens == 0 or jobs == 0:
        return out.zero_()
    cut, q = cut or plan(q, keys, jobs), q if q.stride(2) == 1 else q.contiguous()
    table, bits, positions = (part.contiguous() for part in seen)
    strides = [side.stride(i) for side in (q, keys, values) for i in (0, 1)]
    group, wide = heads // kv_heads, max(16, power(dim))
    tiles = (tokens * group + min(jobs, tokens) * (cut.block_m - 1)) // cut.block_m  # at most, for any sizes of jobs
    sums = stats = arrived = None
    if cut.splits > 1:
        sums = torch.empty(tiles, kv_heads, cut.splits, cut.block_m, dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(tiles, kv_heads, cut.splits, cut.block_m, dtype=torch.float32, device=q.device)
        arrived = counters(q.device, tiles * kv_heads)
    parts = min(8, power(cut.splits))  # read at a time; each has enough rows (LINES) for 16 numbers per thread
    lines = min(cut.block_m // 2, 512 * cut.warps // wide)
    with torch.cuda.device_of(q):
        _attention[(tiles, kv_heads, cut.splits)](
            q, keys, values, table, bits, positions, sums, stats, arrived, rule.sinks, out, *strides, rule.scale,
            jobs, tokens, WORDS=bits.shape[1], WINDOW=rule.window, SOFTCAP=rule.softcap, GROUP=group, D=dim, DP=wide,
            JP=power(jobs), BM=cut.block_m, BN=cut.block_n, PARTS=parts, LINES=lines, ROWS=PART,
            num_warps=cut.warps, num_stages=cut.stages, **early(q.device),
        )  # fmt: skip
    return out


@jit
def _attention(
    q, keys, values, jobs, bits, positions, sums, stats, arrived, sinks, out, q0, q1, k0, k1, v0, v1, scale, count,
    all_tokens, WORDS: constexpr, WINDOW: constexpr, SOFTCAP: constexpr, GROUP: constexpr, D: constexpr, DP: constexpr,
    JP: constexpr, BM: constexpr, BN: constexpr, PARTS: constexpr, LINES: constexpr, ROWS: constexpr, EARLY: constexpr,
):  # fmt: skip
    """Compute one split's part of the softmax for a tile of one job and key head; the last to arrive merges the parts.

    The chunks of a job are the full chunks of the prefix, the rest of the prefix, and then the entries of this pass.
    """
    head, split, splits = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    tile, token0, rows, base, prefix = task_at(jobs, tl.program_id(0), count, GROUP, JP, BM)
    row, column = tile * BM + tl.arange(0, BM), tl.arange(0, BN)
    real = row < rows
    token, of = token0 + row // GROUP, head * GROUP + row % GROUP  # token and all indices derived from it are int64
    low, full, position = 0, prefix // BN, row
    if WINDOW > 0:  # no row of this tile sees the chunks before `low`
        position = tl.load(positions + token, mask=real, other=2**31 - 1).to(tl.int32)
        low = tl.minimum(tl.maximum(tl.min(position) - WINDOW + 1, 0) // BN, full)
    chunks = full + 1 + WORDS * 64 // BN - low
    # Merging a part of `ROWS` rows takes about as long as reading a chunk. So this share gives the earliest end.
    share = tl.maximum(tl.cdiv(chunks, splits), (tl.sqrt(chunks * (BM / ROWS)) + 0.5).to(tl.int32))
    used = tl.cdiv(chunks, share)  # splits that have work
    start = low + split * share
    end = tl.minimum(start + share, low + chunks)
    begin(EARLY)  # everything read so far existed before the pass
    if (tile * BM < rows) & (split < used):
        query = load_entries(q, token * q0 + of * q1, real, D, DP)
        k, v = keys + head.to(tl.int64) * k1, values + head.to(tl.int64) * v1
        rest = (tl.full([], 1, tl.int64) << (prefix - full * BN)) - 1  # the rest of the prefix, as bits
        top = tl.full([BM], float("-inf"), tl.float32)
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, DP], tl.float32)
        for chunk in range(start, end):
            entry0, some = base + chunk * BN, tl.where(chunk < full, -1, rest)
            if chunk > full:
                entry0 = base + prefix + (chunk - full - 1) * BN
                some = tl.reduce_or(_bits(bits, token, real, chunk - full - 1, WORDS, BN), 0)
            live = _bit(some, column)  # an entry that no row sees may never have been written
            key = load_entries(k + entry0 * k0, column * k0, live, D, DP)
            value = load_entries(v + entry0 * v0, column * v0, live, D, DP)
            logit = attention_logits(query, key, scale, SOFTCAP)
            if WINDOW > 0:
                inside = position[:, None] - (chunk * BN + column)[None, :] < WINDOW
                logit = tl.where(inside | (chunk > full), logit, float("-inf"))
            if chunk >= full:
                mine = _bits(bits, token, real, tl.maximum(chunk - full - 1, 0), WORDS, BN)
                mine = tl.where(chunk == full, rest, mine)
                logit = tl.where(_bit(mine[:, None], column[None, :]), logit, float("-inf"))
            top, total, acc = fold(logit, value, top, total, acc)

        top, acc = weighted_mean(top, total, acc)
        if PARTS == 1:
            write_rows(out, sinks, token0, tile * BM, rows, head, top, acc, GROUP, D, DP, BM)
        else:
            place, line, dim = tl.program_id(0) * tl.num_programs(1) + head, tl.arange(0, BM), tl.arange(0, DP)
            stats, sums = stats + place * splits * BM, sums + place.to(tl.int64) * splits * BM * D
            tl.store(stats + split * BM + line, top, mask=real)
            offset = (split * BM + line)[:, None] * D + dim[None, :]
            tl.store(sums + offset, acc, mask=real[:, None] & (dim < D)[None, :])
            tl.debug_barrier()  # all threads of the program must have stored before one of them reports it
            if tl.atomic_add(arrived + place, 1, sem="acq_rel", scope="gpu") == used - 1:
                tl.store(arrived + place, 0)  # reset for the next launch
                for first in range(0, tl.minimum(rows - tile * BM, BM), LINES):
                    peak, mixed = _join(sums, stats, first, rows - tile * BM, used, D, DP, BM, PARTS, LINES)
                    write_rows(out, sinks, token0, tile * BM + first, rows, head, peak, mixed, GROUP, D, DP, LINES)
    if split == splits - 1:
        _clear(out, jobs, count, all_tokens, head, GROUP, D, DP, JP, BM)


@jit
def task_at(jobs, place, count, GROUP: constexpr, JP: constexpr, BM: constexpr):
    """Return tile number `place` among the tiles of all jobs, and its job. A tile without a job has no rows."""
    job = tl.arange(0, JP)
    tiles = tl.cdiv((tl.load(jobs + job * 4 + 1, mask=job < count, other=0) * GROUP).to(tl.int32), BM)
    before = tl.cumsum(tiles, 0) <= place
    tile, mine = place - tl.sum(tl.where(before, tiles, 0), 0), tl.sum(before.to(tl.int32), 0)
    field, real = jobs + mine * 4, mine < count
    token0, base = tl.load(field, mask=real, other=0), tl.load(field + 2, mask=real, other=0)
    rows = (tl.load(field + 1, mask=real, other=0) * GROUP).to(tl.int32)
    return tile, token0, rows, base, tl.load(field + 3, mask=real, other=0).to(tl.int32)


@jit
def _bits(bits, token, real, chunk, WORDS: constexpr, BN: constexpr):
    """Return which entries in a chunk of this pass each row sees, as bits."""
    return tl.load(bits + token * WORDS + chunk * BN // 64, mask=real, other=0) >> (chunk * BN % 64)


@jit
def _bit(word, at):
    """Return whether bit `at` of `word` is set."""
    half = tl.where(at < 32, word.to(tl.int32), (word >> 32).to(tl.int32))  # 64-bit shifts are slow
    return (half >> (at & 31)) & 1 != 0


@jit
def load_entries(side, offset, live, D: constexpr, DP: constexpr):
    """Load rows of `side`, with zeros for rows that are not live and beyond the head dimension."""  # [rows, DP]
    dim = tl.arange(0, DP)
    mask = live[:, None] if D == DP else live[:, None] & (dim < D)[None, :]
    return tl.load(side + offset[:, None] + dim[None, :], mask=mask, other=0.0)


@jit
def attention_logits(query, key, scale, SOFTCAP: constexpr):
    """Return the attention logits in units of log 2."""
    logit = tl.dot(query, tl.trans(key), input_precision="ieee")
    if SOFTCAP > 0:  # tanh without overflow
        bend = 1 - 2 / (1 + tl.exp2(logit * (scale * (2 * 1.4426950408889634 / SOFTCAP))))
        return bend * (SOFTCAP * 1.4426950408889634)
    else:
        return logit * (scale * 1.4426950408889634)


@jit
def fold(logit, value, top, total, acc):
    """Add a chunk of entries to the running maximum, sum and weighted values (online softmax)."""
    peak = tl.maximum(top, tl.max(logit, 1))
    shift = tl.where(peak == float("-inf"), 0.0, peak)  # a row that has seen nothing yet
    part = tl.exp2(logit - shift[:, None])
    fade = tl.exp2(top - shift)
    acc = tl.dot(part.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")
    return peak, total * fade + tl.sum(part, 1), acc


@jit
def weighted_mean(top, total, acc):
    """Return the base-2 logarithm of the sum, and the values divided by the sum; zeros for a row that sees nothing."""
    none = total == 0
    total = tl.where(none, 1.0, total)
    return top + tl.log2(total), tl.where(none[:, None], 0.0, acc * (1 / total)[:, None])  # NaN stays NaN


@jit
def _join(
    sums, stats, first, rows, used, D: constexpr, DP: constexpr, BM: constexpr, PARTS: constexpr, LINES: constexpr
):
    """Merge the splits' parts of a few rows, in order; .cg, since other multiprocessors wrote them."""
    line, dim = first + tl.arange(0, LINES), tl.arange(0, DP)
    written = tl.where(line < rows, used, 0)
    top = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    acc = tl.zeros([LINES, DP], tl.float32)
    for start in tl.range(0, used, PARTS, num_stages=1):
        for i in tl.static_range(PARTS):  # PARTS reads are in flight at a time
            place, there = (start + i) * BM + line, start + i < written
            logit = tl.load(stats + place, mask=there, other=float("-inf"), cache_modifier=".cg")
            inside = there[:, None] & (dim < D)[None, :]
            part = tl.load(sums + place[:, None] * D + dim[None, :], mask=inside, other=0.0, cache_modifier=".cg")
            peak = tl.maximum(top, logit)
            shift = tl.where(peak == float("-inf"), 0.0, peak)
            weight, fade = tl.exp2(logit - shift), tl.exp2(top - shift)
            total, acc = total * fade + weight, acc * fade[:, None] + part * weight[:, None]
            top = peak
    return weighted_mean(top, total, acc)


@jit
def write_rows(
    out, sinks, token0, first, rows, head, top, mixed, GROUP: constexpr, D: constexpr, DP: constexpr, LINES: constexpr
):
    """Write rows of the output once all their entries are merged."""
    row, dim = first + tl.arange(0, LINES), tl.arange(0, DP)
    of, inside = head * GROUP + row % GROUP, (row < rows)[:, None] & (dim < D)[None, :]
    if sinks is not None:
        sink = tl.load(sinks + of).to(tl.float32) * 1.4426950408889634
        shift = tl.maximum(tl.maximum(top, sink), -1e30)  # both may be -inf
        share = tl.exp2(top - shift)
        mixed *= (share / tl.maximum(share + tl.exp2(sink - shift), 0.5))[:, None]
    line = (token0 + row // GROUP) * tl.num_programs(1) * GROUP + of
    tl.store(out + line[:, None] * D + dim[None, :], mixed.to(out.dtype.element_ty), mask=inside)


@jit
def _clear(
    out, jobs, count, all_tokens, head, GROUP: constexpr, D: constexpr, DP: constexpr, JP: constexpr, BM: constexpr
):
    """Write zeros for tokens of no job. The grid has enough tiles for the rows of all tokens, whatever the jobs are."""
    row, job, dim = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, JP), tl.arange(0, DP)
    token = row // GROUP
    first = tl.load(jobs + job * 4, mask=job < count, other=0)
    last = first + tl.load(jobs + job * 4 + 1, mask=job < count, other=0)
    covered = (token[:, None] >= first[None, :]) & (token[:, None] < last[None, :])
    empty = (token < all_tokens) & (tl.max(covered.to(tl.int32), 1) == 0)
    line = token.to(tl.int64) * tl.num_programs(1) * GROUP + head * GROUP + row % GROUP
    zeros = tl.zeros([BM, DP], out.dtype.element_ty)
    tl.store(out + line[:, None] * D + dim[None, :], zeros, mask=empty[:, None] & (dim < D)[None, :])
