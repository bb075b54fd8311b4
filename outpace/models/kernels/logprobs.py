"""Triton kernels for the log-probabilities of chosen tokens and of the likeliest ones; nothing is sorted."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
from torch import Tensor

from outpace.models.kernels.triton_runtime import begin, constexpr, early, jit, power, tl

BLOCK = 2048  # logits of a chunk
FACTS = 3  # of a chunk: largest logit; relative to it, the mass and the sum of mass times logit


def launch(logits: Tensor, rows: Tensor, chosen: Tensor, count: int, block: int = BLOCK) -> Tensor:
    """Return for each of `rows`: the log-probability of its chosen token, the entropy in nats, the `count` likeliest
    tokens in order, and their log-probabilities."""
    # [tokens, vocab], int32 [rows], float64 [tokens] -> float64 [rows, 2 + 2 * count]
    (_, vocab), device, asked = logits.shape, logits.device, len(rows)
    chunks, each = -(-vocab // block), min(count, block)
    facts = torch.empty(FACTS, asked, chunks, dtype=torch.float64, device=device)
    best = torch.empty(asked, chunks, max(each, 1), dtype=torch.float32, device=device)
    tokens = torch.empty(asked, chunks, max(each, 1), dtype=torch.int32, device=device)
    found = torch.empty(asked, 2 + 2 * count, dtype=torch.float64, device=device)
    with torch.cuda.device_of(logits):
        _chunk[(asked, chunks)](
            logits, rows, facts, best, tokens, each, vocab, logits.stride(0), BLOCK=block, num_warps=8, **early(device)
        )
        _row[(asked,)](
            logits, rows, chosen, facts, best, tokens, found, each, count, vocab, chunks, logits.stride(0),
            CHUNKS=power(chunks), BLOCK=power(chunks * max(each, 1)), num_warps=8, **early(device),
        )  # fmt: skip
    return found


@jit
def _chunk(logits, rows, facts, best, tokens, each, vocab, stride, BLOCK: constexpr, EARLY: constexpr):
    """Sum up one chunk of a row, and find its likeliest tokens."""
    i, chunk, asked, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    begin(EARLY)
    row = tl.load(rows + i).to(tl.int64)
    x = tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    peak = tl.max(x, 0)
    far = tl.where(x > float("-inf"), x - tl.maximum(peak, -3e38), 0.0)  # a chunk may have no token that can follow
    mass = tl.where(x > float("-inf"), tl.exp(far), 0.0)
    place, apart = i * chunks + chunk, asked * chunks
    tl.store(facts + place, peak.to(tl.float64))
    tl.store(facts + apart + place, tl.sum(mass, 0).to(tl.float64))
    tl.store(facts + 2 * apart + place, tl.sum(mass * far, 0).to(tl.float64))
    for rank in range(0, each):
        most, at = tl.max(x, 0, return_indices=True)
        tl.store(best + place * each + rank, most)
        tl.store(tokens + place * each + rank, chunk * BLOCK + at)
        x = tl.where(token == chunk * BLOCK + at, float("-inf"), x)


@jit
def _row(
    logits, rows, chosen, facts, best, tokens, found, each, count, vocab, chunks, stride,
    CHUNKS: constexpr, BLOCK: constexpr, EARLY: constexpr,
):  # fmt: skip
    """Merge the chunks of a row."""
    i, asked, chunk, slot = tl.program_id(0), tl.num_programs(0), tl.arange(0, CHUNKS), tl.arange(0, BLOCK)
    begin(EARLY)
    row = tl.load(rows + i)
    place, inside, apart = facts + i * chunks + chunk, chunk < chunks, asked * chunks
    peaks = tl.load(place, mask=inside, other=float("-inf"))
    peak = tl.max(peaks, 0)
    shares = tl.where(peaks > float("-inf"), tl.exp(peaks - peak), 0.0)
    masses = tl.load(place + apart, mask=inside, other=0.0)
    far = tl.where(peaks > float("-inf"), peaks - peak, 0.0)
    mass = tl.sum(masses * shares, 0)
    mean = tl.sum((tl.load(place + 2 * apart, mask=inside, other=0.0) + far * masses) * shares, 0) / mass
    log_sum = peak + tl.log(mass)
    token = tl.load(chosen + row).to(tl.int64)
    own = tl.load(logits + row.to(tl.int64) * stride + token).to(tl.float64)
    out = found + i * (2 + 2 * count)
    tl.store(out, own - log_sum)
    tl.store(out + 1, tl.log(mass) - mean)
    held = i * chunks * each + slot
    x = tl.load(best + held, mask=slot < chunks * each, other=float("-inf"))
    for rank in range(0, count):
        most, at = tl.max(x, 0, return_indices=True)
        tl.store(out + 2 + rank, tl.load(tokens + i * chunks * each + at).to(tl.float64))
        tl.store(out + 2 + count + rank, most.to(tl.float64) - log_sum)
        x = tl.where(slot == at, float("-inf"), x)
