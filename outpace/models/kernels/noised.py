"""Triton kernel that adds the target's noise to the logits of a draft, which then ranks tokens as the target will."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
from torch import Tensor

from outpace.models.kernels.sample import divided, gumbel
from outpace.models.kernels.triton_runtime import begin, constexpr, early, jit, tl

BLOCK = 1024  # logits of a program


@torch.library.custom_op(
    "outpace::noised",
    mutates_args=(),
    schema="(Tensor logits, Tensor words, Tensor temperature, Tensor? ids) -> Tensor",
)
def _noised(logits: Tensor, words: Tensor, temperature: Tensor, ids: Tensor | None) -> Tensor:
    """Return logits after the temperature, plus the noise of each token; logits of greedy rows stay as they are.

    `ids` are the tokens of the columns, if these are not all tokens in order.
    """
    # float32 [rows, vocab], int64 [rows, 2] of `noise.keys`, [rows] (0: greedy), int64 [vocab] -> float32 [rows, vocab]
    return launch(logits, words, temperature, ids)


@_noised.register_fake
def _(logits: Tensor, words: Tensor, temperature: Tensor, ids: Tensor | None) -> Tensor:
    return logits.new_empty(logits.shape, dtype=torch.float32)


def launch(logits: Tensor, words: Tensor, temperature: Tensor, ids: Tensor | None) -> Tensor:
    """Score all rows, in chunks of `BLOCK` logits."""
    (rows, vocab), device = logits.shape, logits.device
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    out = torch.empty(rows, vocab, dtype=torch.float32, device=device)
    if rows:
        with torch.cuda.device_of(logits):
            _score[(rows, -(-vocab // BLOCK))](
                logits, words, temperature, ids, out, vocab, logits.stride(0), words.stride(0), words.stride(1),
                temperature.stride(0), BLOCK=BLOCK, INVERSE=device.type == "cuda", NAMED=ids is not None, num_warps=4,
                **early(device),
            )  # fmt: skip
    return out


@jit
def _score(
    logits, words, temperatures, ids, out, vocab, x0, w0, w1, t0,
    BLOCK: constexpr, INVERSE: constexpr, NAMED: constexpr, EARLY: constexpr,
):  # fmt: skip
    """Score one chunk of one row."""
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = place < vocab
    begin(EARLY)
    x = tl.load(logits + row * x0 + place, mask=live, other=0.0).to(tl.float32)
    temperature = tl.load(temperatures + row * t0)
    if temperature != 0:
        token = place
        if NAMED:
            token = tl.load(ids + place, mask=live, other=0)
        x = divided(x, temperature.to(tl.float32), INVERSE).to(tl.float64) + gumbel(token, words + row * w0, w1)
    tl.store(out + row * vocab + place, x.to(tl.float32), mask=live)
