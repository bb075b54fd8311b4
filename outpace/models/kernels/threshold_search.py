"""Triton kernel that searches the threshold of a filter among the collected tokens of a row."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from outpace.models.kernels.ranks import (
    CENTER,
    CUTS,
    ERROR,
    NOWHERE,
    TOP_K,
    TYPICAL_P,
    edge,
    narrowed,
    rank_for,
    store_edge,
    target_of,
    top_of,
)
from outpace.models.kernels.triton_runtime import begin, constant, constexpr, jit, tl

TURNS = constant(32)  # most rounds of a search; each leaves a 15th of the ranks


@jit
def _some(found, counts, row, chunks, start, BLOCK: constexpr, CHUNKS: constexpr, WIDTH: constexpr):
    """Load the next collected logits of each chunk of a row; -inf where there are no more."""
    slot = tl.arange(0, CHUNKS * WIDTH)
    chunk, place = slot // WIDTH, start + slot % WIDTH
    there = place < tl.load(counts + row * chunks + chunk, mask=chunk < chunks, other=0)
    at = (row * chunks + chunk).to(tl.int64) * BLOCK + place
    return tl.load(found + at, mask=there, other=float("-inf"))


@jit
def search_row(
    limits, facts, edges, notes, found, counts, before, chunks, l0, l1,
    FILTER: constexpr, BLOCK: constexpr, WIDTH: constexpr, CHUNKS: constexpr, EARLY: constexpr,
):  # fmt: skip
    """Search the threshold of a row among the collected tokens."""
    row, rows, i = tl.program_id(0), tl.num_programs(0), tl.arange(0, CUTS)
    begin(EARLY)
    limit = tl.load(limits + FILTER * l0 + row * l1)
    if limit > 0:
        top, _, _ = top_of(facts, row, rows, chunks, CHUNKS)
        target, error = target_of(limit, tl.load(notes + FILTER // 3 * rows + row), notes, row, rows, FILTER)
        center = tl.load(notes + CENTER * rows + row).to(tl.float32) if FILTER == TYPICAL_P else top
        chunk = tl.arange(0, CHUNKS)
        nearer = tl.load(before + row * chunks + chunk, mask=chunk < chunks, other=0.0)
        begin_mass = tl.sum(nearer.to(tl.float64), 0)
        most = tl.max(tl.load(counts + row * chunks + chunk, mask=chunk < chunks, other=0), 0)
        low, high = edge(edges, row, rows, FILTER, 1)
        low, high = low.to(tl.int64), high.to(tl.int64)
        first, last, turn = low + 1, high, 0  # ranks of the tokens in between
        while (first < last) & (turn < TURNS):
            cut = first + (last - first) * i // 15
            sums = tl.zeros([CUTS, CHUNKS * WIDTH], tl.float32)
            nearest = tl.full([CHUNKS * WIDTH], 0, tl.int32) + high.to(tl.int32)
            farthest = tl.full([CHUNKS * WIDTH], 0, tl.int32) + low.to(tl.int32)
            for start in range(0, most, WIDTH):
                x = _some(found, counts, row, chunks, start, BLOCK, CHUNKS, WIDTH)
                rank = rank_for(x, center, FILTER)
                weight = tl.exp(x - top) if FILTER > TOP_K else tl.where(x > float("-inf"), 1.0, 0.0)
                sums += tl.where(rank[None, :] < cut.to(tl.int32)[:, None], weight[None, :], 0.0)
                between = (rank > low) & (rank < high)
                nearest = tl.where(between, tl.minimum(nearest, rank), nearest)
                farthest = tl.where(between, tl.maximum(farthest, rank), farthest)
            low, high = narrowed(low, high, cut, begin_mass + tl.sum(sums, 1).to(tl.float64), target, error)
            begins, ends = tl.min(nearest, 0).to(tl.int64), tl.max(farthest, 0).to(tl.int64) + 1
            begins, ends = tl.maximum(begins, low + 1), tl.minimum(ends, high)
            turn = tl.where((begins == first) & (ends == last), TURNS, turn + 1)  # rounding may decide the rest
            first, last = begins, ends
        if FILTER == TYPICAL_P:
            low, high = _apart(low, high, found, counts, notes, row, rows, chunks, most, BLOCK, CHUNKS, WIDTH)
        store_edge(edges, row, rows, low, high, FILTER, 2)


@jit
def _apart(
    low, high, found, counts, notes, row, rows, chunks, most, BLOCK: constexpr, CHUNKS: constexpr, WIDTH: constexpr
):
    """Return thresholds of `typical_p` that are sure, although the center of the distances is rounded.

    It moves tokens above it and tokens below it apart. They stay as they are if only equal logits are close to them.
    """
    center = tl.load(notes + CENTER * rows + row).to(tl.float32)
    error = 2 * tl.load(notes + ERROR * rows + row).to(tl.float32)
    near, far = low.to(tl.int32).to(tl.float32, bitcast=True), high.to(tl.int32).to(tl.float32, bitcast=True)
    least, largest, others = tl.full([], float("inf"), tl.float32), tl.full([], float("-inf"), tl.float32), 0
    for start in range(0, most, WIDTH):
        x = _some(found, counts, row, chunks, start, BLOCK, CHUNKS, WIDTH)
        rank = rank_for(x, center, TYPICAL_P)
        least = tl.minimum(least, tl.min(tl.where(rank == low, x, float("inf")), 0))
        largest = tl.maximum(largest, tl.max(tl.where(rank == low, x, float("-inf")), 0))
        close = (tl.abs(tl.abs(x - center) - near) <= error) | ((rank > low) & (rank < high))
        others += tl.sum((close & (rank != low)).to(tl.int32), 0)
    certain = (others == 0) & (least == largest)
    sure = tl.where(near < error, -1, (tl.maximum(near - error, 0.0)).to(tl.int32, bitcast=True))
    possible = tl.where(high == NOWHERE, NOWHERE, (far + error).to(tl.int32, bitcast=True) + 1)
    return tl.where(certain, low.to(tl.int32), sure), tl.where(certain, high.to(tl.int32), possible)
