"""Edits by a kernel of a GPU, interpreted on a CPU: the same bits as where the sampler applies them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from outpace.models.kernels import edit_logits, logprobs
from outpace.sampling.edits import Edit, EditKind
from outpace.sampling.logprobs import logprob_of

VOCAB = 1300  # more than a block
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel is interpreted where there is no GPU")


@st.composite
def edits(draw: st.DrawFn) -> Edit:
    kind = draw(st.sampled_from(EditKind))
    if kind is EditKind.KEEP:
        held = draw(st.integers(1, VOCAB // 8 + 20))  # fewer or more tokens than there are
        return Edit(kind, np.random.default_rng(held).integers(0, 256, held, dtype=np.uint8))
    tokens = np.array(draw(st.lists(st.integers(0, VOCAB - 1), max_size=40, unique=True)), dtype=np.int64)
    if kind is EditKind.PENALIZE:
        return Edit(kind, tokens, np.array([draw(st.sampled_from([0.3, 1.1, 1.7]))]))
    values = st.one_of(st.floats(-5, 5), st.just(-np.inf))
    return Edit(kind, tokens, np.array([draw(values) for _ in tokens], dtype=np.float64))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.one_of(st.none(), edits()), min_size=3, max_size=3), max_size=3), st.integers(0, 9))
def test_a_kernel_edits_rows_as_the_sampler_does(turns: list[list[Edit | None]], seed: int) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    expected = logits.clone()
    for turn in turns:
        for row, edit in zip(expected, turn, strict=True):
            if edit is not None:
                edit.apply(row)
    edit_logits.apply(logits, [[(i, edit) for i, edit in enumerate(turn) if edit is not None] for turn in turns])
    assert torch.equal(logits, expected)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 9), st.integers(0, 7), st.booleans())
def test_log_probabilities_are_those_of_the_library(seed: int, count: int, banned: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(4, VOCAB, generator=generator) * 5).bfloat16()
    if banned:
        logits[:, 100:1100] = -torch.inf  # whole chunks
    chosen = torch.tensor([3.0, 50.0, 1200.0, 1299.0], dtype=torch.float64)
    rows = torch.tensor([2, 0, 3], dtype=torch.int32)
    found = logprobs.launch(logits, rows, chosen, count, block=256)
    for row, (own, entropy, *rest) in zip(rows.tolist(), found.tolist(), strict=True):
        wanted = logprob_of(int(chosen[row]), logits[row], count)
        assert [own, entropy] == pytest.approx([wanted.logprob, wanted.entropy], abs=1e-5)
        assert rest[count:] == pytest.approx(list(wanted.top.values()), abs=1e-5)
        logs = logits[row].double().log_softmax(-1)
        assert logs[[int(token) for token in rest[:count]]].tolist() == pytest.approx(rest[count:], abs=1e-5)
        assert len({*rest[:count]}) == count
