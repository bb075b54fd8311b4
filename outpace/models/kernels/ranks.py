"""Device functions about ranks: integers that order the tokens of a row by how far a filter is from dropping them.

`top_k`, `top_p` and `min_p` rank tokens by their logits, `typical_p` by their distance from the logit with the mean
surprise. The order of the ranks is that of float32 numbers, so equal logits have equal ranks, and no others.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from outpace.models.kernels.sample import divided
from outpace.models.kernels.triton_runtime import constant, constexpr, jit, tl

TOP_K, TOP_P, MIN_P, TYPICAL_P = (constant(row) for row in range(4))  # rows of `limits`
NOWHERE = constant(0x7F800000)  # rank of a logit of -inf, which no filter keeps
CUTS = constant(16)  # ranks that are tried at once
# Rows of `notes`, after the masses of the tokens that `top_p` and that `typical_p` choose from. For `typical_p`: the
# logit with the mean surprise, the error of a distance from it, and the mass of tokens that are neither kept for sure
# nor dropped for sure by the other filters.
CENTER, ERROR, DOUBTFUL = constant(2), constant(3), constant(4)


@jit
def rank_of(x):
    """Return the rank of each logit: the largest is first. `x` is never -0.0."""
    bits = x.to(tl.int32, bitcast=True)
    return ~(bits ^ ((bits >> 31) & 0x7FFFFFFF))


@jit
def logit_of(rank):
    """Return the logit of a rank."""
    bits = ~rank
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def rank_for(x, center, FILTER: constexpr):
    """Return the rank of each logit for one filter."""
    return tl.abs(x - center).to(tl.int32, bitcast=True) if FILTER == TYPICAL_P else rank_of(x)


@jit
def ordered(x, center, FILTER: constexpr):
    """Return a number in the order of the rank of each logit: to compare numbers takes fewer instructions."""
    return tl.abs(x - center) if FILTER == TYPICAL_P else -x


@jit
def ordered_at(rank, FILTER: constexpr):
    """Return the number of a rank."""
    return rank.to(tl.float32, bitcast=True) if FILTER == TYPICAL_P else -logit_of(rank)


@jit
def distance_of(rank, top, FILTER: constexpr):
    """Return how far a rank is from the first one, in logits."""
    rank = rank.to(tl.int32)
    return rank.to(tl.float32, bitcast=True) if FILTER == TYPICAL_P else top - logit_of(rank)


@jit
def rank_at(distance, top, FILTER: constexpr):
    """Return the rank at a distance from the first one."""  # int64
    return (distance.to(tl.int32, bitcast=True) if FILTER == TYPICAL_P else rank_of(top - distance)).to(tl.int64)


@jit
def scaled(logits, temperatures, row, token, vocab, x0, t0, INVERSE: constexpr):
    """Load logits of a row, after the temperature; greedy rows (temperature 0) have no filters and are not read."""
    x = tl.load(logits + row.to(tl.int64) * x0 + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(x < float("inf"), x, float("-inf"))  # what is not finite is reported by the largest logit
    temperature = tl.load(temperatures + row * t0).to(tl.float32)
    # The sum turns -0.0 into 0.0. It also keeps the quotient from being fused into a later difference, so that all
    # kernels see the same bits.
    return divided(x, tl.where(temperature == 0, 1.0, temperature), INVERSE) + 0.0


@jit
def top_of(facts, row, rows, chunks, CHUNKS: constexpr):
    """Return of a row, after the temperature: the largest logit, the least of the chunks' largest, and the mass."""
    chunk = tl.arange(0, CHUNKS)
    at, there = facts + (rows + row) * chunks + chunk, chunk < chunks
    peaks = tl.load(at, mask=there, other=float("-inf"))
    mass = tl.load(at + rows * chunks, mask=there, other=0.0)
    top = tl.maximum(tl.max(peaks, 0), -3e38) + 0.0
    least = tl.min(tl.where(peaks > float("-inf"), peaks, top), 0)
    return top, least, tl.maximum(tl.sum(mass * tl.exp(peaks - top), 0), 1e-30)


@jit
def edge(edges, row, rows, FILTER: constexpr, TURN: constexpr):
    """Load the result of a search: the last rank that is kept for sure, and the first that is dropped for sure."""
    at = edges + ((FILTER * 3 + TURN) * rows + row) * 2
    return tl.load(at), tl.load(at + 1)


@jit
def store_edge(edges, row, rows, low, high, FILTER: constexpr, TURN: constexpr):
    """Store the result of a search."""
    at = edges + ((FILTER * 3 + TURN) * rows + row) * 2
    tl.store(at, low.to(tl.int32))
    tl.store(at + 1, high.to(tl.int32))


@jit
def kept(limits, edges, row, rows, l0, l1, top, BEFORE: constexpr):
    """Return the last rank that the filters before `BEFORE` keep for sure, and the first that they drop for sure."""
    low, high = NOWHERE + tl.full([], -1, tl.int32), NOWHERE + tl.full([], 0, tl.int32)
    count = tl.load(limits + row * l1) if BEFORE > TOP_K else tl.full([], 0, tl.float64)
    if count > 0:
        low, high = edge(edges, row, rows, TOP_K, 2)
    mass = tl.load(limits + l0 + row * l1) if BEFORE > TOP_P else tl.full([], 0, tl.float64)
    if mass > 0:
        sure, possible = edge(edges, row, rows, TOP_P, 2)
        low, high = tl.minimum(low, sure), tl.minimum(high, possible)
    share = tl.load(limits + 2 * l0 + row * l1) if BEFORE > MIN_P else tl.full([], 0, tl.float64)
    if share > 0:
        cut = top.to(tl.float64) + tl.log(share)
        error = 1e-6 * (1 + tl.abs(cut))
        certain = tl.minimum((cut + error).to(tl.float32) + 0.0, top)  # the likeliest token always stays
        low = tl.minimum(low, rank_of(certain))
        high = tl.minimum(high, rank_of((cut - error).to(tl.float32) + 0.0) + 1)
    return low, high


@jit
def target_of(limit, mass, notes, row, rows, FILTER: constexpr):
    """Return the mass that the kept tokens must reach, and its error."""
    if FILTER == TOP_K:
        return limit, limit * 0
    elif FILTER == TOP_P:
        return limit * mass, 1e-5 * mass
    else:
        return limit * mass, 1e-5 * mass + tl.load(notes + DOUBTFUL * rows + row)


@jit
def narrowed(low, high, cut, held, target, error):
    """Return the last cut that is kept for sure, and the first that is dropped for sure."""
    low = tl.maximum(low, tl.max(tl.where(held < target - error, cut, low), 0))
    low = tl.minimum(low, NOWHERE - 1)
    return low, tl.minimum(high, tl.min(tl.where(held >= target + error, cut, high), 0))
