"""Triton kernels that choose among the tokens that filters keep, without sorting the vocabulary.

Every filter is a threshold, which `thresholds` finds. The choice is the best score among the tokens that the filters
may keep. It is certain if they keep that token for sure; otherwise rounding decides, and the host makes the choice.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from outpace.models.kernels import sample, thresholds
from outpace.models.kernels.ranks import CENTER, TYPICAL_P, edge, kept, rank_for, rank_of, scaled, top_of
from outpace.models.kernels.sample import best_noised
from outpace.models.kernels.triton_runtime import begin, constexpr, early, jit, power, tl

BLOCK = 4096  # logits of a chunk


@torch.library.custom_op(
    "outpace::choose_kept",
    mutates_args=(),
    schema="(Tensor logits, Tensor words, Tensor temperature, Tensor limits, int[] filters) -> Tensor",
)
def _choose_kept(logits: Tensor, words: Tensor, temperature: Tensor, limits: Tensor, filters: list[int]) -> Tensor:
    """Choose like `choose`, with the filters of each row in `limits`: top_k, top_p, min_p, typical_p, each 0 for none.

    `filters` are the rows of `limits` that are not all 0: there are no launches for the others.

    The last result says whether the choice is certain. The probability is relative to the tokens that are kept for
    sure, without those that rounding may keep.
    """
    # float64 [4, rows] -> float64 [4, rows]
    return launch(logits, words, temperature, limits, BLOCK, filters)


@_choose_kept.register_fake
def _(logits: Tensor, words: Tensor, temperature: Tensor, limits: Tensor, filters: list[int]) -> Tensor:
    return logits.new_empty(4, logits.shape[0], dtype=torch.float64)


def launch(
    logits: Tensor, words: Tensor, temperature: Tensor, limits: Tensor, block: int, filters: Seq[int] = range(4)
) -> Tensor:
    """Choose for rows without filters, then for rows with filters, in chunks of `block` logits."""
    (rows, vocab), device = logits.shape, logits.device
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    found = sample.in_chunks(logits, words, temperature, block, limits)
    if rows:
        at = thresholds.find(logits, temperature, limits, found.facts, block, filters)
        chunks = found.facts.shape[2]
        with torch.cuda.device_of(logits):
            _kept_chunk[(rows, chunks)](
                logits, words, temperature, limits, at.edges, at.notes, *found, vocab, logits.stride(0),
                words.stride(0), words.stride(1), temperature.stride(0), limits.stride(0), limits.stride(1),
                BLOCK=block, CHUNKS=power(chunks), INVERSE=device.type == "cuda", num_warps=8, **early(device),
            )  # fmt: skip
    return sample.best(found)


@jit
def _kept_chunk(
    logits, words, temperatures, limits, edges, notes, scores, winners, facts, vocab, x0, w0, w1, t0, l0, l1,
    BLOCK: constexpr, CHUNKS: constexpr, INVERSE: constexpr, EARLY: constexpr,
):  # fmt: skip
    """Find the best token of a chunk among those that the filters of its row may keep."""
    row, chunk, rows, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    begin(EARLY)
    filters = tl.load(limits + tl.arange(0, 4) * l0 + row * l1)
    if tl.max(filters, 0) > 0:
        top, _, _ = top_of(facts, row, rows, chunks, CHUNKS)
        low, high = kept(limits, edges, row, rows, l0, l1, top, TYPICAL_P)
        place, apart = row * chunks + chunk, rows * chunks
        score, winner, mass = tl.full([], float("-inf"), tl.float64), vocab - 1, 0.0
        held, certain = tl.full([], float("-inf"), tl.float32), tl.full([], 1, tl.int32)
        if rank_of(tl.load(facts + apart + place) + 0.0) < high:
            x = scaled(logits, temperatures, row, token, vocab, x0, t0, INVERSE)
            sure, possible = rank_of(x) <= low, rank_of(x) < high
            if tl.load(limits + 3 * l0 + row * l1) > 0:
                center = tl.load(notes + CENTER * rows + row).to(tl.float32)
                rank = rank_for(x, center, TYPICAL_P)
                low, high = edge(edges, row, rows, TYPICAL_P, 2)
                sure, possible = sure & (rank <= low), possible & (rank < high)
            score, winner = best_noised(x, token, possible, words + row * w0, w1, vocab)
            mass = tl.sum(tl.where(sure, tl.exp(x - top), 0.0), 0)
            held = tl.max(tl.where(token == winner, x, float("-inf")), 0)
            certain = tl.min(tl.where(token == winner, sure.to(tl.int32), 1), 0)
        tl.store(scores + place, score)
        tl.store(winners + place, winner)
        tl.store(facts + apart + place, top)  # other chunks may read it or what was here: the largest is the same
        tl.store(facts + 2 * apart + place, mass)
        tl.store(facts + 3 * apart + place, held)
        tl.store(facts + 4 * apart + place, certain.to(tl.float32))
