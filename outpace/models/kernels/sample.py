"""Triton kernels that choose a token for each row of logits, as `Sampler` does: argmax, or Gumbel-max with keyed noise.

The noise is that of `outpace.sampling.noise.gumbel`: a pure function of two words and the token. Nothing is sorted, and
no row of vocabulary size is written.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outpace.models.kernels.triton_runtime import begin, constexpr, early, jit, power, tl

BLOCK = 2048  # logits of a chunk


def choose(logits: Tensor, words: Tensor, temperature: Tensor) -> Tensor:
    """Return for each row: the token, the largest logit, the token's probability, and 1, because the choice is certain.

    The largest logit is not finite if no token can be chosen. A greedy choice has its probability at temperature 1.
    """
    # [rows, vocab], int64 [rows, 2] of `noise.keys`, [rows] (0: greedy) -> float64 [4, rows]
    return torch.ops.outpace.choose(logits, words, temperature)


@torch.library.custom_op(
    "outpace::choose", mutates_args=(), schema="(Tensor logits, Tensor words, Tensor temperature) -> Tensor"
)
def _choose(logits: Tensor, words: Tensor, temperature: Tensor) -> Tensor:
    return launch(logits, words, temperature, BLOCK)


@_choose.register_fake
def _(logits: Tensor, words: Tensor, temperature: Tensor) -> Tensor:
    return logits.new_empty(4, logits.shape[0], dtype=torch.float64)


def launch(logits: Tensor, words: Tensor, temperature: Tensor, block: int) -> Tensor:
    """Choose for all rows, in chunks of `block` logits."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    return best(in_chunks(logits, words, temperature, block))


class ChunkChoices(NamedTuple):
    """The choice of each chunk of each row, and what the choice among them needs."""

    scores: Tensor  # float64 [rows, chunks]: logit after the temperature, with noise
    winners: Tensor  # int32 [rows, chunks]
    # float32 [5, rows, chunks]: largest logit; after the temperature: largest logit, mass relative to it, logit of the
    # winner; whether the winner is certain
    facts: Tensor


def in_chunks(
    logits: Tensor, words: Tensor, temperature: Tensor, block: int, limits: Tensor | None = None
) -> ChunkChoices:
    """Choose in each chunk of `block` logits, but not in rows with `limits`, where filters come first.

    Inputs are read in place, since copies would be more kernels.
    """
    (rows, vocab), device = logits.shape, logits.device
    chunks = -(-vocab // block)
    scores = torch.empty(rows, chunks, dtype=torch.float64, device=device)
    winners = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    facts = torch.empty(5, rows, chunks, dtype=torch.float32, device=device)
    given, strides = (words, (0, 0)) if limits is None else (limits, limits.stride())
    if rows:
        with torch.cuda.device_of(logits):
            # To divide by a scalar, PyTorch multiplies by its inverse on a GPU, and divides on a CPU.
            _chunk[(rows, chunks)](
                logits, words, temperature, given, scores, winners, facts, vocab, logits.stride(0), words.stride(0),
                words.stride(1), temperature.stride(0), *strides, BLOCK=block, INVERSE=device.type == "cuda",
                FILTERED=limits is not None, num_warps=8, **early(device),
            )  # fmt: skip
    return ChunkChoices(scores, winners, facts)


def best(found: ChunkChoices) -> Tensor:
    """Choose the best of each row's chunks."""
    _, rows, chunks = found.facts.shape
    chosen = torch.empty(4, rows, dtype=torch.float64, device=found.facts.device)
    if rows:
        with torch.cuda.device_of(chosen):
            _best[(rows,)](*found, chosen, chunks, BLOCK=power(chunks), num_warps=4, **early(chosen.device))
    return chosen


@jit
def _chunk(
    logits, words, temperatures, limits, scores, winners, facts, vocab, stride, w0, w1, t0, l0, l1,
    BLOCK: constexpr, INVERSE: constexpr, FILTERED: constexpr, EARLY: constexpr,
):  # fmt: skip
    """Find the best token of one chunk of one row, unless filters come first."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    begin(EARLY)
    x = tl.load(logits + row.to(tl.int64) * stride + token, mask=token < vocab, other=float("-inf"))
    if x.dtype != tl.float64:
        x = x.to(tl.float32)
    bad = tl.max((x != x).to(tl.int32), 0) > 0  # the maximum ignores NaN
    place, apart = row * tl.num_programs(1) + chunk, tl.num_programs(0) * tl.num_programs(1)
    largest = tl.max(x, 0)
    tl.store(facts + place, tl.where(bad, float("nan"), largest).to(tl.float32))
    temperature = tl.load(temperatures + row * t0)
    if temperature == 0:
        scaled, top = x, tl.where(largest == largest, largest, float("-inf")).to(tl.float64)
        winner = tl.min(tl.where(x == largest, token, vocab - 1), 0)  # the first one on a tie
    else:
        scaled, top, winner = divided(x, temperature.to(x.dtype), INVERSE), tl.full([], 0, tl.float64), vocab - 1
        filters = tl.load(limits + tl.arange(0, 4) * l0 + row * l1) if FILTERED else tl.zeros([4], tl.float64)
        if tl.max(filters, 0) == 0:
            top, winner = best_noised(scaled, token, token < vocab, words + row * w0, w1, vocab)
    tl.store(scores + place, top)
    tl.store(winners + place, winner)
    scaled = scaled.to(tl.float32)
    # The largest logit already reports non-finite values.
    scaled = tl.where(scaled < float("inf"), scaled, float("-inf"))
    peak = tl.max(scaled, 0)
    mass = tl.sum(tl.exp(scaled - tl.where(peak == float("-inf"), 0.0, peak)), 0)
    tl.store(facts + apart + place, peak)
    tl.store(facts + 2 * apart + place, mass)
    tl.store(facts + 3 * apart + place, tl.max(tl.where(token == winner, scaled, float("-inf")), 0))
    tl.store(facts + 4 * apart + place, 1.0)


@jit
def best_noised(x, token, live, words, apart, vocab):
    """Return the largest `x + gumbel` of the live ones of consecutive tokens, and its token; the first one on a tie.

    Noise in float64 takes long, so it is computed for one token after the other, from the highest rough score down,
    until no other token can be better: mostly for one.
    """
    rough = x + _rough_gumbel(_hashed(token, words, apart), x)
    rough = tl.where(live & (rough == rough), rough, float("-inf"))
    top, winner, first = tl.full([], float("-inf"), tl.float64), vocab - 1, tl.min(token, 0)
    most, place = tl.max(rough, 0, return_indices=True)
    while (most > float("-inf")) & (most + (0.001 + tl.abs(tl.maximum(most, -3e38)) * 1e-6) >= top):  # float32's error
        at = first + place
        score = tl.max(tl.where(token == at, x, float("-inf")), 0).to(tl.float64) + gumbel(at, words, apart)
        better = (score > top) | ((score == top) & (at < winner))
        top, winner = tl.where(better, score, top), tl.where(better, at, winner)
        rough = tl.where(token == at, float("-inf"), rough)
        most, place = tl.max(rough, 0, return_indices=True)
    return top, winner


@jit
def _rough_gumbel(hashed, x):
    """Compute the noise of each token in the dtype of `x`, with an error of less than 0.0005.

    With u the uniform number of a token: near 1, where the noise is large, -log(u) is a series of 1 - u.
    """
    u = (hashed.to(x.dtype) + 0.5) * (1.0 / 4294967296)
    v = ((hashed ^ 0xFFFFFFFF).to(x.dtype) + 0.5) * (1.0 / 4294967296)  # 1 - u, without cancellation
    minus_log = tl.where(v < 0.004, v * (1 + v * (0.5 + v * (0.33333334 + v * 0.25))), -tl.log(u))
    return -tl.log(minus_log)


@jit
def divided(x, temperature, INVERSE: constexpr):
    """Divide `x` by the temperature, in the dtype of x, bit for bit as PyTorch does."""
    one = temperature * 0 + 1
    if x.dtype == tl.float64:
        return x * (one / temperature) if INVERSE else x / temperature
    else:  # the plain float32 division is approximate
        return x * tl.div_rn(one, temperature) if INVERSE else tl.div_rn(x, temperature + tl.zeros_like(x))


@jit
def gumbel(token, words, apart):
    """Compute `outpace.sampling.noise.gumbel` of each token from the two words of its key."""  # float64
    return -tl.log(-tl.log((_hashed(token, words, apart).to(tl.float64) + 0.5) * (1.0 / 4294967296)))


@jit
def _hashed(token, words, apart):
    """Compute the 32 random bits of each token."""
    a, b = tl.load(words).to(tl.uint32), tl.load(words + apart).to(tl.uint32)
    return _mix(_mix(token.to(tl.uint32) * 0x9E3779B1 + a) ^ b)


@jit
def _mix(x):
    """Compute `outpace.sampling.noise.mix`; 32-bit products wrap around without a mask."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@jit
def _best(scores, winners, facts, chosen, chunks, BLOCK: constexpr, EARLY: constexpr):
    """Choose the best of a row's chunks; the first one on a tie."""
    row, rows, chunk = tl.program_id(0), tl.num_programs(0), tl.arange(0, BLOCK)
    place, inside = row * chunks + chunk, chunk < chunks
    begin(EARLY)
    score = tl.load(scores + place, mask=inside, other=float("-inf"))
    winner = tl.load(winners + place, mask=inside, other=2**31 - 1)
    largest = tl.load(facts + place, mask=inside, other=float("-inf"))
    apart = rows * chunks
    peak = tl.load(facts + apart + place, mask=inside, other=float("-inf"))
    mass = tl.load(facts + 2 * apart + place, mask=inside, other=0.0)
    held = tl.load(facts + 3 * apart + place, mask=inside, other=float("-inf"))
    first = tl.min(tl.where(score == tl.max(score, 0), winner, 2**31 - 1), 0)
    bad = tl.max((largest != largest).to(tl.int32), 0) > 0
    top = tl.maximum(tl.max(peak, 0), -3e38)
    kept = tl.max(tl.where(winner == first, held, float("-inf")), 0)
    total = tl.maximum(tl.sum(mass * tl.exp(peak - top), 0), 1e-30)
    tl.store(chosen + row, first.to(tl.float64))
    tl.store(chosen + rows + row, tl.where(bad, float("nan"), tl.max(largest, 0)).to(tl.float64))
    tl.store(chosen + 2 * rows + row, (tl.exp(kept - top) / total).to(tl.float64))
    certain = tl.load(facts + 4 * apart + place, mask=inside, other=1.0)
    tl.store(chosen + 3 * rows + row, tl.min(tl.where(winner == first, certain, 1.0), 0).to(tl.float64))
