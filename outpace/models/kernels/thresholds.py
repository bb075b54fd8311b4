"""Triton kernels that find, without sorting, the threshold of each filter on the ranks of a row's tokens.

Two passes over the row weigh the tokens before each of 16 ranks, a third collects the tokens between the two ranks that
remain, and one program per row searches among those. `top_k` counts, `top_p` and `typical_p` add up probabilities. Sums
run in a fixed order, and the other rows of a pass change no bit.

A search ends with two ranks: tokens up to the first are kept for sure, and tokens from the second on are dropped for
sure. Where rounding may decide, a few tokens are in between.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from outpace.models.kernels.ranks import (
    CENTER,
    CUTS,
    DOUBTFUL,
    ERROR,
    NOWHERE,
    TOP_K,
    TYPICAL_P,
    distance_of,
    edge,
    kept,
    logit_of,
    narrowed,
    ordered,
    ordered_at,
    rank_at,
    rank_for,
    rank_of,
    scaled,
    store_edge,
    target_of,
    top_of,
)
from outpace.models.kernels.threshold_search import search_row
from outpace.models.kernels.triton_runtime import begin, constexpr, early, jit, power, tl

SPAN = 128  # tokens that one step of a program compares with all cuts: one for each thread, so that none moves
SEARCHED = 2048  # the same for a search, which has one program per row


class Thresholds:
    """The thresholds of all rows, and the memory in which they are found."""

    def __init__(self, rows: int, chunks: int, block: int, device: torch.device):
        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.edges = empty(4, 3, rows, 2, dtype=torch.int32)  # after each pass of each filter
        self.notes = empty(5, rows, dtype=torch.float64)
        self.cuts = empty(2, rows, 16, dtype=torch.int32)
        self.masses = empty(2, rows, chunks, 16)  # before the cuts
        self.means = empty(4, rows, chunks)
        self.found = empty(rows, chunks * block)  # collected logits
        self.counts = empty(rows, chunks, dtype=torch.int32)
        self.before = empty(rows, chunks)  # mass before the collected tokens


def find(
    logits: Tensor, temperature: Tensor, limits: Tensor, facts: Tensor, block: int, filters: Seq[int]
) -> Thresholds:
    """Find the thresholds of these filters, in chunks of `block` logits; `facts` are those of `sample.in_chunks`."""
    (rows, vocab), device = logits.shape, logits.device
    chunks = facts.shape[2]
    at = Thresholds(rows, chunks, block, device)
    strides = (logits.stride(0), temperature.stride(0), limits.stride(0), limits.stride(1))
    inputs = logits, temperature, limits, facts, at.edges, at.notes
    shape: dict[str, Any] = dict(CHUNKS=power(chunks), num_warps=8, **early(device))
    tiles = dict(BLOCK=block, INVERSE=device.type == "cuda", **shape)
    with torch.cuda.device_of(logits):
        for name in sorted({0, 1, 3} & {*filters}):  # as in ranks.py; min_p needs no search
            if name == 3:
                _mean[(rows, chunks)](*inputs, at.means, vocab, *strides, **tiles)
            for turn in (0, 1):
                _cut[(rows, chunks)](
                    *inputs, at.means, at.cuts, at.masses, vocab, *strides, FILTER=name, TURN=turn,
                    SPAN=min(SPAN, block), **tiles | {"num_warps": 4},
                )  # fmt: skip
            _collect[(rows, chunks)](
                *inputs, at.cuts, at.masses, at.found, at.counts, at.before, vocab, *strides, FILTER=name, **tiles
            )  # fmt: skip
            search_row[(rows,)](
                *inputs[2:], at.found, at.counts, at.before, chunks, *strides[2:], FILTER=name, BLOCK=block,
                WIDTH=max(1, SEARCHED // power(chunks)), **shape | {"num_warps": 16},
            )  # fmt: skip
    return at


@jit
def _held(masses, row, rows, chunks, TURN: constexpr, CHUNKS: constexpr):
    """Return the mass of a row before each cut."""  # float64 [CUTS]
    chunk, cut = tl.arange(0, CHUNKS), tl.arange(0, CUTS)
    place = ((TURN * rows + row) * chunks + chunk)[:, None] * CUTS + cut[None, :]
    return tl.sum(tl.load(masses + place, mask=(chunk < chunks)[:, None], other=0.0).to(tl.float64), 0)


@jit
def _mean(
    logits, temperatures, limits, facts, edges, notes, means, vocab, x0, t0, l0, l1,
    BLOCK: constexpr, INVERSE: constexpr, CHUNKS: constexpr, EARLY: constexpr,
):  # fmt: skip
    """Sum up the masses of a chunk's tokens and their distances from the largest logit, for `typical_p`.

    Of the tokens that earlier filters keep for sure, and of those that they may keep.
    """
    row, chunk, rows, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    begin(EARLY)
    if tl.load(limits + 3 * l0 + row * l1) > 0:
        top, _, _ = top_of(facts, row, rows, chunks, CHUNKS)
        low, high = kept(limits, edges, row, rows, l0, l1, top, TYPICAL_P)
        x = scaled(logits, temperatures, row, token, vocab, x0, t0, INVERSE)
        far, at, apart = tl.where(x > float("-inf"), top - x, 0.0), row * chunks + chunk, rows * chunks
        sure = tl.where(rank_of(x) <= low, tl.exp(x - top), 0.0)
        possible = tl.where(rank_of(x) < high, tl.exp(x - top), 0.0)
        tl.store(means + at, tl.sum(sure, 0))
        tl.store(means + apart + at, tl.sum(sure * far, 0))
        tl.store(means + 2 * apart + at, tl.sum(possible, 0))
        tl.store(means + 3 * apart + at, tl.sum(possible * far, 0))


@jit
def _center(means, row, rows, chunks, top, CHUNKS: constexpr):
    """Return the logit with the mean surprise, the error of a distance from it, and the mass of doubtful tokens."""
    part, chunk = tl.arange(0, 4), tl.arange(0, CHUNKS)
    place = (part[:, None] * rows + row) * chunks + chunk[None, :]
    sums = tl.sum(tl.load(means + place, mask=(chunk < chunks)[None, :], other=0.0).to(tl.float64), 1)
    sure, possible = tl.sum(tl.where(part == 0, sums, 0.0), 0), tl.sum(tl.where(part == 2, sums, 0.0), 0)
    mean = tl.sum(tl.where(part == 1, sums, 0.0), 0) / tl.maximum(sure, 1e-30)
    other = tl.sum(tl.where(part == 3, sums, 0.0), 0) / tl.maximum(possible, 1e-30)
    return (top - mean).to(tl.float32), 1e-5 * (1 + mean) + tl.abs(other - mean), possible - sure


@jit
def _reach(limit, sure, center, top, least, total, vocab, FILTER: constexpr):
    """Return a distance within which the threshold of a filter usually lies."""
    if FILTER == TOP_K:
        return 6 * (top - least) + 1.0  # each chunk has a token within top - least
    else:  # all tokens farther than this from the largest logit hold less than what the filter drops
        far = tl.log(vocab / (tl.maximum(1 - limit, 1e-6) * total)).to(tl.float32)
        far = tl.minimum(tl.maximum(far, 0.01), top - logit_of(sure))
        return tl.maximum(far, top - center)


@jit
def _cut(
    logits, temperatures, limits, facts, edges, notes, means, cuts, masses, vocab, x0, t0, l0, l1,
    FILTER: constexpr, TURN: constexpr, BLOCK: constexpr, SPAN: constexpr, INVERSE: constexpr, CHUNKS: constexpr,
    EARLY: constexpr,
):  # fmt: skip
    """Sum up the mass of a chunk before each of 16 ranks; in the second turn they divide what the first one left."""
    row, chunk, rows, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1)
    i = tl.arange(0, CUTS)
    begin(EARLY)
    limit = tl.load(limits + FILTER * l0 + row * l1)
    if limit > 0:
        top, least, total = top_of(facts, row, rows, chunks, CHUNKS)
        sure, _ = kept(limits, edges, row, rows, l0, l1, top, FILTER)
        center = top
        if FILTER == TYPICAL_P:
            if TURN == 0:
                center, error, doubtful = _center(means, row, rows, chunks, top, CHUNKS)
                if chunk == 0:
                    tl.store(notes + CENTER * rows + row, center.to(tl.float64))
                    tl.store(notes + ERROR * rows + row, error)
                    tl.store(notes + DOUBTFUL * rows + row, doubtful)
            else:
                center = tl.load(notes + CENTER * rows + row).to(tl.float32)
        reach = _reach(limit, sure, center, top, least, total, vocab, FILTER)
        if TURN == 0:
            part = (i + 1) / 15.0
            cut = tl.where(i < 15, rank_at(reach * part * part, top, FILTER), NOWHERE)  # near ones are closer together
        else:
            held = _held(masses, row, rows, chunks, 0, CHUNKS)
            mass = tl.sum(tl.where(i == 15, held, 0.0), 0)
            target, error = target_of(limit, mass, notes, row, rows, FILTER)
            low = rank_at(tl.zeros_like(top), top, FILTER)
            low, high = narrowed(low, low * 0 + NOWHERE, tl.load(cuts + row * CUTS + i), held, target, error)
            if chunk == 0:
                tl.store(notes + FILTER // 3 * rows + row, mass)
                store_edge(edges, row, rows, low, high, FILTER, 0)
            near, far = distance_of(low, top, FILTER), distance_of(high, top, FILTER)
            near = tl.minimum(near, 1e30)
            far = tl.where(high == NOWHERE, 4 * near + reach, far)
            cut = rank_at(near + (far - near) * ((i + 1) / 17.0), top, FILTER)
            cut = tl.minimum(tl.maximum(cut, low), high)
        cut = cut.to(tl.int32)
        if chunk == 0:
            tl.store(cuts + (TURN * rows + row) * CUTS + i, cut)
        peak = tl.load(facts + (rows + row) * chunks + chunk) + 0.0
        stop = tl.where((rank_of(peak) < tl.max(cut, 0)) | (FILTER == TYPICAL_P), BLOCK, 0)
        sums = tl.zeros([CUTS, SPAN], tl.float32)
        for start in range(0, stop, SPAN):
            token = chunk * BLOCK + start + tl.arange(0, SPAN)
            x = scaled(logits, temperatures, row, token, vocab, x0, t0, INVERSE)
            weight = tl.exp(x - top) if FILTER > TOP_K else tl.full([SPAN], 1.0, tl.float32)
            weight = tl.where(rank_of(x) <= sure, weight, 0.0)
            before = ordered(x, center, FILTER)[None, :] < ordered_at(cut, FILTER)[:, None]
            sums += before.to(tl.float32) * weight[None, :]
        tl.store(masses + ((TURN * rows + row) * chunks + chunk) * CUTS + i, tl.sum(sums, 1))


@jit
def _collect(
    logits, temperatures, limits, facts, edges, notes, cuts, masses, found, counts, before, vocab, x0, t0, l0, l1,
    FILTER: constexpr, BLOCK: constexpr, INVERSE: constexpr, CHUNKS: constexpr, EARLY: constexpr,
):  # fmt: skip
    """Collect the tokens of a chunk between the two ranks that remain, and sum up the mass before them."""
    row, chunk, rows, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    begin(EARLY)
    limit = tl.load(limits + FILTER * l0 + row * l1)
    if limit > 0:
        top, _, _ = top_of(facts, row, rows, chunks, CHUNKS)
        sure, _possible = kept(limits, edges, row, rows, l0, l1, top, FILTER)
        target, error = target_of(limit, tl.load(notes + FILTER // 3 * rows + row), notes, row, rows, FILTER)
        low, high = edge(edges, row, rows, FILTER, 0)
        cut = tl.load(cuts + (rows + row) * CUTS + tl.arange(0, CUTS))
        low, high = narrowed(low, high, cut, _held(masses, row, rows, chunks, 1, CHUNKS), target, error)
        if chunk == 0:
            store_edge(edges, row, rows, low, high, FILTER, 1)
        first, last, center = low + 1, high, top
        if FILTER == TYPICAL_P:  # what is so close to the threshold that rounding may order it, too
            center = tl.load(notes + CENTER * rows + row).to(tl.float32)
            error = 2 * tl.load(notes + ERROR * rows + row).to(tl.float32)
            first = rank_at(tl.maximum(distance_of(low, top, FILTER) - error, 0.0), top, FILTER).to(tl.int32)
            last = rank_at(distance_of(high, top, FILTER) + error, top, FILTER).to(tl.int32)
        count, mass = 0, 0.0
        peak = tl.load(facts + (rows + row) * chunks + chunk) + 0.0
        if (rank_of(peak) < last) | (FILTER == TYPICAL_P):
            x = scaled(logits, temperatures, row, token, vocab, x0, t0, INVERSE)
            rank, live = rank_for(x, center, FILTER), rank_of(x) <= sure
            weight = tl.exp(x - top) if FILTER > TOP_K else tl.full([BLOCK], 1.0, tl.float32)
            mass = tl.sum(tl.where(live & (rank < first), weight, 0.0), 0)
            mine = (live & (rank >= first) & (rank < last)).to(tl.int32)
            place = (row * chunks + chunk).to(tl.int64) * BLOCK + tl.cumsum(mine, 0) - 1
            tl.store(found + place, x, mask=mine > 0)
            count = tl.sum(mine, 0)
        tl.store(counts + row * chunks + chunk, count)
        tl.store(before + row * chunks + chunk, mass)
