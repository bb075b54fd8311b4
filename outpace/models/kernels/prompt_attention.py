"""Triton kernel for attention of prompts: many queries of a sequence, each of which sees all entries before it.

The tokens of a prompt follow each other, so no mask is read. Several prompts share a launch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.models.kernels.attention import (
    KernelRule,
    PassVisibility,
    attention_logits,
    fold,
    load_entries,
    task_at,
    weighted_mean,
    write_rows,
)
from outpace.models.kernels.triton_runtime import DTYPES, begin, constexpr, early, jit, power, tl


@dataclass(frozen=True)
class PromptTiles:
    """Rows and entries of a tile, warps, and tiles in flight at a time."""

    block_m: int
    block_n: int
    warps: int
    stages: int


def plan(q: Tensor) -> PromptTiles:
    """Choose the tiles: as large as registers and shared memory allow."""
    if q.element_size() > 2:  # no matrix unit
        return PromptTiles(32, 32, 4, 2)
    return PromptTiles(128, 64, 8, 3) if power(q.shape[2]) <= 128 else PromptTiles(64, 32, 4, 2)


def launch(
    q: Tensor, keys: Tensor, values: Tensor, seen: PassVisibility, rule: KernelRule, cut: PromptTiles | None = None
) -> Tensor:
    """Return the attention output of each token. Every token belongs to a job, and follows the one before it."""
    # [tokens, heads, dim], [pool, kv heads, dim] twice -> [tokens, heads, dim]
    (tokens, heads, dim), kv_heads, jobs = q.shape, keys.shape[1], seen.jobs.shape[0]
    if q.dtype not in DTYPES or keys.dtype != q.dtype or values.dtype != q.dtype:
        raise ValueError(f"queries in {q.dtype}, keys in {keys.dtype} and values in {values.dtype} do not match")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    cut, q, table = cut or plan(q), q if q.stride(2) == 1 else q.contiguous(), seen.jobs.contiguous()
    group = heads // kv_heads
    tiles = (tokens * group + min(jobs, tokens) * (cut.block_m - 1)) // cut.block_m  # at most, for any sizes of jobs
    strides = [side.stride(i) for side in (q, keys, values) for i in (0, 1)]
    with torch.cuda.device_of(q):
        _prompt[(tiles, kv_heads)](
            q, keys, values, table, rule.sinks, out, *strides, rule.scale, jobs, WINDOW=rule.window,
            SOFTCAP=rule.softcap, GROUP=group, D=dim, DP=max(16, power(dim)), JP=power(jobs), BM=cut.block_m,
            BN=cut.block_n, num_warps=cut.warps, num_stages=cut.stages, **early(q.device),
        )  # fmt: skip
    return out


@jit
def _prompt(
    q, keys, values, jobs, sinks, out, q0, q1, k0, k1, v0, v1, scale, count, WINDOW: constexpr, SOFTCAP: constexpr,
    GROUP: constexpr, D: constexpr, DP: constexpr, JP: constexpr, BM: constexpr, BN: constexpr, EARLY: constexpr,
):  # fmt: skip
    """Compute the attention of one tile of rows, which are the query heads of consecutive tokens that share a key."""
    head = tl.program_id(1)
    # The last tiles see the most entries, so they run first.
    tile, token0, rows, base, prefix = task_at(jobs, tl.num_programs(0) - 1 - tl.program_id(0), count, GROUP, JP, BM)
    begin(EARLY)
    if tile * BM < rows:
        row, column = tile * BM + tl.arange(0, BM), tl.arange(0, BN)
        real, position = row < rows, prefix + row // GROUP
        query = load_entries(q, (token0 + row // GROUP) * q0 + (head * GROUP + row % GROUP) * q1, real, D, DP)
        k, v = keys + base * k0 + head.to(tl.int64) * k1, values + base * v0 + head.to(tl.int64) * v1
        first, end = prefix + tile * BM // GROUP, prefix + (tl.minimum(tile * BM + BM, rows) - 1) // GROUP + 1
        low = 0
        if WINDOW > 0:  # no row of this tile sees the entries before `low`
            low = tl.maximum(first - WINDOW + 1, 0) // BN * BN
        full = tl.maximum((first + 1) // BN * BN, low)  # all rows see the entries before `full`, but for the window
        top = tl.full([BM], float("-inf"), tl.float32)
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, DP], tl.float32)
        for at in range(low, full, BN):
            entry = (at + column).to(tl.int64)
            logit = attention_logits(query, _rows(k + entry[:, None] * k0, D, DP), scale, SOFTCAP)
            if WINDOW > 0:
                logit = tl.where(position[:, None] - (at + column)[None, :] < WINDOW, logit, float("-inf"))
            top, total, acc = fold(logit, _rows(v + entry[:, None] * v0, D, DP), top, total, acc)
        for at in range(full, end, BN):
            entry, live = (at + column).to(tl.int64), at + column < end
            logit = attention_logits(query, load_entries(k, entry * k0, live, D, DP), scale, SOFTCAP)
            away = position[:, None] - (at + column)[None, :]
            seen = away >= 0
            if WINDOW > 0:
                seen &= away < WINDOW
            logit = tl.where(seen, logit, float("-inf"))
            top, total, acc = fold(logit, load_entries(v, entry * v0, live, D, DP), top, total, acc)
        top, acc = weighted_mean(top, total, acc)
        write_rows(out, sinks, token0, tile * BM, rows, head, top, acc, GROUP, D, DP, BM)


@jit
def _rows(lines, D: constexpr, DP: constexpr):
    """Load whole rows of keys or values, with zeros beyond the head dimension."""  # [rows, DP]
    dim = tl.arange(0, DP)
    if D == DP:
        found = tl.load(lines + dim[None, :])
    else:
        found = tl.load(lines + dim[None, :], mask=(dim < D)[None, :], other=0.0)
    return found
