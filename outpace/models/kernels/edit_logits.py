"""Triton kernels that apply the edits of processors to rows of logits, each in place and with one rounding."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from outpace.models.kernels.triton_runtime import begin, constexpr, early, jit, tl
from outpace.models.transfer import sent
from outpace.sampling.edits import Edit, EditKind

BLOCK = 1024  # entries, or tokens, of a program
RowEdit = tuple[int, Edit]


def apply(logits: Tensor, turns: Seq[Seq[RowEdit]]) -> None:  # float32 [rows, vocab]
    """Apply edits to rows of logits, one turn after the other; a turn has at most one edit for each row."""
    for edits in turns:
        _change(logits, [(row, edit) for row, edit in edits if edit.kind is not EditKind.KEEP and len(edit.tokens)])
        _restrict(logits, [(row, edit) for row, edit in edits if edit.kind is EditKind.KEEP])


def _change(logits: Tensor, edits: list[RowEdit]) -> None:
    """Change the logits of some tokens of each row."""
    if not edits:
        return
    sizes = [len(edit.tokens) for _, edit in edits]
    packed = np.empty((4, sum(sizes)), dtype=np.int32)  # row, token, bits of the value, whether it is a penalty
    packed[0] = np.repeat([row for row, _ in edits], sizes)
    packed[3] = np.repeat([edit.kind is EditKind.PENALIZE for _, edit in edits], sizes)
    at = 0
    for (_, edit), size in zip(edits, sizes, strict=True):
        packed[1, at : at + size] = edit.tokens
        packed[2, at : at + size].view(np.float32)[:] = -np.inf if edit.kind is EditKind.FORBID else edit.values
        at += size
    entries = sent(packed, logits.device)
    with torch.cuda.device_of(logits):
        _change_entries[(-(-at // BLOCK),)](
            logits, entries, at, logits.stride(0), BLOCK=BLOCK, num_warps=4, **early(logits.device)
        )


def _restrict(logits: Tensor, edits: list[RowEdit]) -> None:
    """Forbid the tokens whose bits are 0."""
    if not edits:
        return
    vocab = logits.shape[1]
    bits = np.zeros((len(edits), -(-vocab // 8)), dtype=np.uint8)
    for line, (_, edit) in zip(bits, edits, strict=True):
        known = edit.tokens[: len(line)]
        line[: len(known)] = known
    rows = sent(np.array([row for row, _ in edits], dtype=np.int32), logits.device)
    with torch.cuda.device_of(logits):
        _restrict_rows[(len(edits), -(-vocab // BLOCK))](
            logits, rows, sent(bits, logits.device), vocab, logits.stride(0), bits.shape[1], BLOCK=BLOCK, num_warps=4,
            **early(logits.device),
        )  # fmt: skip


@jit
def _change_entries(logits, entries, count, stride, BLOCK: constexpr, EARLY: constexpr):
    """Change one logit for each entry."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < count
    begin(EARLY)
    row, token = tl.load(entries + i, mask=live, other=0), tl.load(entries + count + i, mask=live, other=0)
    value = tl.load(entries + 2 * count + i, mask=live, other=0).to(tl.float32, bitcast=True)
    scales = tl.load(entries + 3 * count + i, mask=live, other=0)
    place = logits + row.to(tl.int64) * stride + token
    x = tl.load(place, mask=live, other=0.0)
    factor, added = tl.where(scales > 0, value, 1.0), tl.where(scales > 0, 0.0, value)
    scaled = tl.where(x < 0, x * factor, tl.div_rn(x, factor))
    tl.store(place, tl.where(scales > 0, scaled, x + added), mask=live)


@jit
def _restrict_rows(logits, rows, bits, vocab, stride, width, BLOCK: constexpr, EARLY: constexpr):
    """Set the logits of a block of tokens to -inf where the bit of the token is 0."""
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = token < vocab
    begin(EARLY)
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    byte = tl.load(bits + tl.program_id(0).to(tl.int64) * width + token // 8, mask=live, other=0).to(tl.int32)
    forbidden = live & ((byte >> (token % 8)) & 1 == 0)
    tl.store(logits + row * stride + token, tl.full([BLOCK], float("-inf"), tl.float32), mask=forbidden)
