"""Triton kernels that choose among the tokens that `top_k`, `top_p` and `min_p` keep, without sorting the vocabulary.

The likeliest tokens of a row, as many as one program can sort, are collected by the distance of their logits from the
largest. If the filters drop all others, the choice among the collected tokens is certain. It is also certain if the
choice among all tokens is a collected token that the filters keep. Otherwise the host makes the choice. Sums run in a
fixed order, so the other rows of a pass change no bit.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
from torch import Tensor

from outpace.models.kernels import sample
from outpace.models.kernels.sample import divided, gumbel
from outpace.models.kernels.triton_runtime import begin, constexpr, early, jit, power, tl

MOST = 1024  # the most tokens of a row that are sorted
LEVELS = 64  # of distance from the largest logit; all larger distances are on the last one
STEPS = 8.0  # levels per doubling of 1 + distance: near levels are narrow, and the last one is 233 away


@torch.library.custom_op(
    "outpace::choose_kept",
    mutates_args=(),
    schema="(Tensor logits, Tensor words, Tensor temperature, Tensor limits) -> Tensor",
)
def _choose_kept(logits: Tensor, words: Tensor, temperature: Tensor, limits: Tensor) -> Tensor:
    """Choose like `choose`, with the filters of each row in `limits`: top_k, top_p, min_p, each 0 for none.

    The last result says whether the choice is certain. The probability is relative to the kept tokens that were
    sorted; the filters may keep more.
    """
    # float64 [3, rows] -> float64 [4, rows]
    return launch(logits, words, temperature, limits, sample.BLOCK, MOST)


@_choose_kept.register_fake
def _(logits: Tensor, words: Tensor, temperature: Tensor, limits: Tensor) -> Tensor:
    return logits.new_empty(4, logits.shape[0], dtype=torch.float64)


def launch(logits: Tensor, words: Tensor, temperature: Tensor, limits: Tensor, block: int, most: int) -> Tensor:
    """Choose for all rows, then again for rows with filters, where at most `most` tokens are sorted."""
    (rows, vocab), device = logits.shape, logits.device
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    chosen, facts = sample.launch(logits, words, temperature, block)
    if rows == 0:
        return chosen
    chunks, most = facts.shape[2], min(most, power(vocab))
    counts = torch.empty(rows, chunks, LEVELS, dtype=torch.int32, device=device)
    levels = torch.empty(rows, vocab, dtype=torch.int8, device=device)
    entries = torch.empty(rows, most, dtype=torch.int64, device=device)
    strides = (logits.stride(0), temperature.stride(0), limits.stride(0), limits.stride(1))
    fixed = dict(CHUNKS=power(chunks), LEVELS=LEVELS, num_warps=8, **early(device))
    tiles = dict(BLOCK=block, INVERSE=device.type == "cuda", **fixed)
    with torch.cuda.device_of(logits):
        _levels[(rows, chunks)](
            logits, temperature, limits, facts, counts, levels, vocab, *strides, STEPS=STEPS, **tiles
        )  # fmt: skip
        _collect[(rows, chunks)](
            logits, temperature, limits, counts, levels, entries, vocab, *strides, MOST=most, **tiles
        )  # fmt: skip
        _kept[(rows,)](
            words, limits, facts, counts, entries, chosen, chunks, vocab, words.stride(0), words.stride(1),
            limits.stride(0), limits.stride(1), STEPS=STEPS, MOST=most, **fixed,
        )  # fmt: skip
    return chosen


@jit
def _filtered(limits, row, l0, l1):
    """Return whether a row has filters."""
    k, p, m = tl.load(limits + row * l1), tl.load(limits + l0 + row * l1), tl.load(limits + 2 * l0 + row * l1)
    return (k > 0) | (p > 0) | (m > 0)


@jit
def _top(facts, row, rows, chunks, CHUNKS: constexpr):
    """Return the largest logit of a row after the temperature, always as a finite number."""
    chunk = tl.arange(0, CHUNKS)
    peaks = tl.load(facts + (rows + row) * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    return tl.maximum(tl.max(peaks, 0), -3e38)


@jit
def _logits(logits, temperatures, row, token, vocab, x0, t0, INVERSE: constexpr):
    """Load a chunk of a row, after the temperature; greedy rows (temperature 0) have no filters and are not read."""
    x = tl.load(logits + row.to(tl.int64) * x0 + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures + row * t0).to(tl.float32)
    return divided(x, tl.where(temperature == 0, 1.0, temperature), INVERSE) + 0.0  # turns -0.0 into 0.0


@jit
def _level(x, top, LEVELS: constexpr, STEPS: constexpr):
    """Return the level of each logit: its distance from the largest one, on a logarithmic scale."""
    far = top - x
    far = tl.log2(1 + tl.where((far >= 0) & (far < 1e9), far, 1e9)) * STEPS  # non-finite values are far, too
    return tl.minimum(far, LEVELS - 1.0).to(tl.int32)


@jit
def _within(counts, row, chunks, CHUNKS: constexpr, LEVELS: constexpr, MOST: constexpr):
    """Return a row's token counts by chunk and level, and how many levels can be collected with all their tokens."""
    chunk, level = tl.arange(0, CHUNKS), tl.arange(0, LEVELS)
    place = (row * chunks + chunk)[:, None] * LEVELS + level[None, :]
    found = tl.load(counts + place, mask=(chunk < chunks)[:, None], other=0)
    upto = tl.cumsum(tl.sum(found, 0), 0)
    return found, tl.sum(((upto <= MOST) & (level < LEVELS - 1)).to(tl.int32), 0)


@jit
def _levels(
    logits, temperatures, limits, facts, counts, levels, vocab, x0, t0, l0, l1,
    BLOCK: constexpr, INVERSE: constexpr, CHUNKS: constexpr, LEVELS: constexpr, STEPS: constexpr, EARLY: constexpr,
):  # fmt: skip
    """Store the level of each token of a chunk, and the count per level; computed twice, levels might differ."""
    row, chunk, rows, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    begin(EARLY)
    if _filtered(limits, row, l0, l1):
        x = _logits(logits, temperatures, row, token, vocab, x0, t0, INVERSE)
        level = _level(x, _top(facts, row, rows, chunks, CHUNKS), LEVELS, STEPS)
        tl.store(levels + row.to(tl.int64) * vocab + token, level.to(tl.int8), mask=token < vocab)
        found = tl.histogram(level, LEVELS)
        tl.store(counts + (row * chunks + chunk) * LEVELS + tl.arange(0, LEVELS), found)


@jit
def _collect(
    logits, temperatures, limits, counts, levels, entries, vocab, x0, t0, l0, l1,
    BLOCK: constexpr, INVERSE: constexpr, CHUNKS: constexpr, LEVELS: constexpr, MOST: constexpr, EARLY: constexpr,
):  # fmt: skip
    """Collect the tokens of a chunk that are likely enough, as integers that sort by logit and then by token."""
    row, chunk, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    begin(EARLY)
    if _filtered(limits, row, l0, l1):
        found, within = _within(counts, row, chunks, CHUNKS, LEVELS, MOST)
        before = (tl.arange(0, CHUNKS) < chunk)[:, None] & (tl.arange(0, LEVELS) < within)[None, :]
        start = tl.sum(tl.sum(tl.where(before, found, 0), 1), 0)
        x = _logits(logits, temperatures, row, token, vocab, x0, t0, INVERSE)
        level = tl.load(levels + row.to(tl.int64) * vocab + token, mask=token < vocab, other=LEVELS - 1)
        mine = level.to(tl.int32) < within
        bits = x.to(tl.int32, bitcast=True)
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the logits
        place = start + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(entries + row.to(tl.int64) * MOST + place, (bits.to(tl.int64) << 32) | token.to(tl.int64), mask=mine)


@jit
def _kept(
    words, limits, facts, counts, entries, chosen, chunks, vocab, w0, w1, l0, l1,
    CHUNKS: constexpr, LEVELS: constexpr, STEPS: constexpr, MOST: constexpr, EARLY: constexpr,
):  # fmt: skip
    """Choose among the collected tokens of a row that its filters keep."""
    row, rows, place = tl.program_id(0), tl.num_programs(0), tl.arange(0, MOST)
    begin(EARLY)
    if _filtered(limits, row, l0, l1):
        found, within = _within(counts, row, chunks, CHUNKS, LEVELS, MOST)
        count = tl.sum(tl.sum(tl.where((tl.arange(0, LEVELS) < within)[None, :], found, 0), 1), 0)
        keys = tl.load(entries + row.to(tl.int64) * MOST + place, mask=place < count, other=-(2**63))
        keys = tl.sort(keys)  # empty places come first
        live = place >= MOST - count
        bits, token = (keys >> 32).to(tl.int32), (keys & 0xFFFFFFFF).to(tl.int32)
        value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        top = _top(facts, row, rows, chunks, CHUNKS)
        share = tl.where(live, tl.exp(value - top), 0.0)  # probability relative to the likeliest token
        chunk = tl.arange(0, CHUNKS)
        at, there = (rows + row) * chunks + chunk, chunk < chunks
        peaks = tl.load(facts + at, mask=there, other=float("-inf"))
        mass = tl.load(facts + rows * chunks + at, mask=there, other=0.0)
        total = tl.sum(mass * tl.exp(peaks - top), 0)
        rest = tl.where(count == vocab, 0.0, tl.maximum(total - tl.sum(share, 0), 0.0))  # of tokens not collected

        k = tl.minimum(tl.load(limits + row * l1), vocab).to(tl.int32)
        many = k > count  # top_k keeps some tokens that were not collected
        edge = tl.sum(tl.where(place == MOST - k, value, 0.0), 0)
        share = tl.where((k == 0) | many | (value >= edge), share, 0.0)
        rest = tl.where((k == 0) | many, rest, 0.0)

        p = tl.load(limits + l0 + row * l1)
        whole = tl.maximum(tl.sum(share, 0) + rest, 1e-30)
        dropped = tl.where(p > 0, 1 - p, -1.0).to(tl.float32)  # mass that top_p drops
        upto = (tl.cumsum(share, 0) + rest) / whole
        share = tl.where((upto <= dropped) & (place < MOST - 1), 0.0, share)
        unknown = many & (p > 0)  # the mass that top_p is a share of
        rest = tl.where((p > 0) & (rest / whole <= dropped), 0.0, rest)

        m = tl.load(limits + 2 * l0 + row * l1).to(tl.float32)
        share = tl.where(share < m, 0.0, share)
        least = (tl.exp2(within / STEPS) - 1) * 0.999  # least distance of the tokens not collected
        rest = tl.where(tl.exp(-least) < m, 0.0, rest)  # what remains may be chosen

        score = tl.where(share > 0, value.to(tl.float64) + gumbel(token, words + row * w0, w1), float("-inf"))
        winner = tl.min(tl.where(score == tl.max(score, 0), token, vocab - 1), 0)
        # If the winner among all tokens is kept, it also wins among the kept ones.
        first = tl.load(chosen + row).to(tl.int32)
        sure = (rest == 0) | (tl.sum(((token == first) & (share > 0)).to(tl.int32), 0) > 0)
        held = tl.sum(tl.where((token == winner) & live, share, 0.0), 0)
        tl.store(chosen + row, winner.to(tl.float64))
        tl.store(chosen + 2 * rows + row, (held / tl.maximum(tl.sum(share, 0), 1e-30)).to(tl.float64))
        tl.store(chosen + 3 * rows + row, tl.where(unknown, 0.0, sure.to(tl.float64)))
