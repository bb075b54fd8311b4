"""Compiled choices, log-probabilities and likeliest tokens are the sampler's own, on every instruction set."""

from __future__ import annotations

import math
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from outpace.errors import RequestFailed
from outpace.sampling import native
from outpace.sampling.edits import Edit, EditKind
from outpace.sampling.logprobs import logprob_of
from outpace.sampling.processors import Banned, CustomProcessor, LogitBias, RepetitionPenalty
from outpace.sampling.sampler import LogitEdit, Sampler
from outpace.sampling.settings import Sampling
from outpace.sampling.top_k import likeliest, top_k
from tests.choices import FILTERS, KINDS, SIZES, compiled, edits, reference, row
from tests.test_cpu_bits import LEVELS

steady = settings(derandomize=True, deadline=None, max_examples=60)
seeds = st.integers(0, 2**32)
compiled_here = pytest.mark.skipif(native.library() is None, reason="no C++ compiler")


class Allowed(LogitEdit):
    """Allows a third of the tokens, by bits, as a grammar does."""

    def __init__(self, vocab: int, seed: int):
        bits = np.random.default_rng(seed).random(vocab) < 1 / 3
        bits[seed % vocab] = True
        self.bits = np.packbits(bits, bitorder="little")

    def edit(self, prefix: list[int]) -> Edit:
        return Edit(EditKind.KEEP, self.bits)


@compiled_here
@given(
    given_filters=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in FILTERS.items()}),
    seed=seeds,
    vocab=st.sampled_from(SIZES),
    kind=st.sampled_from(KINDS),
)
@settings(steady, max_examples=500)
def test_compiled_choices_are_the_samplers(given_filters: dict[str, Any], seed: int, vocab: int, kind: str) -> None:
    sampler, logits = Sampler(Sampling(seed=seed, **given_filters)), row(kind, vocab, seed)
    for position in (1, 2, 77):
        text = [0] * position
        assert compiled(sampler, logits, text) in (None, reference(sampler, logits, text))
        assert sampler.choose(logits, text) == reference(sampler, logits, text)


@compiled_here
@given(
    given_filters=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in FILTERS.items()}),
    greedy=st.booleans(),
    seed=seeds,
    vocab=st.sampled_from([16, 17, 1025, 4099]),
    kind=st.sampled_from(KINDS),
    chosen=st.sets(st.integers(0, 4)),
    text=st.lists(st.integers(0, 15), min_size=1, max_size=30),
)
@settings(steady, max_examples=300)
def test_compiled_choices_after_edits_are_the_samplers(
    given_filters: dict[str, Any], greedy: bool, seed: int, vocab: int, kind: str, chosen: set[int], text: list[int]
) -> None:
    every = [*edits(vocab), Allowed(vocab, seed)]
    settings = Sampling(seed=seed, **given_filters | ({"temperature": 0.0} if greedy else {}))
    sampler, logits = Sampler(settings, [every[i] for i in sorted(chosen)]), row(kind, vocab, seed)
    before = logits.clone()
    try:
        due = reference(sampler, logits, text)
    except RequestFailed:  # these edits left no token
        assert compiled(sampler, logits, text) is None
        return
    assert compiled(sampler, logits, text) in (None, due)
    assert sampler.choose(logits, text) == due
    assert torch.equal(logits, before)


@compiled_here
@pytest.mark.parametrize("greedy", [True, False])
def test_edits_around_a_processor_of_the_user_are_made_in_order(greedy: bool) -> None:
    def halved(ids: Tensor, scores: Tensor) -> Tensor:
        calls.append(ids.tolist()[0])
        return scores / 2

    calls, logits, text = list[list[int]](), row("usual", 300, 1), [1, 2, 3]
    before, after = [RepetitionPenalty(1.3), Banned(((5,),))], [LogitBias({4: 3.0})]
    sampler = Sampler(Sampling(temperature=0.0 if greedy else 0.8), [*before, CustomProcessor(halved), *after])
    expected = logits
    for process in sampler.processors:
        expected = process(text, expected)
    assert torch.equal(Sampler(Sampling(), sampler.processors).process(logits, text), expected)
    assert sampler.choose(logits, text) == Sampler(sampler.sampling).choose(expected, text)
    assert calls == [text] * 3, "once for each choice"


@compiled_here
@pytest.mark.parametrize(
    "given_filters",
    [
        {},
        {"top_k": 50},
        {"top_k": 1000},
        {"top_p": 0.95},
        {"min_p": 0.02},
        {"typical_p": 0.9},
        {"top_k": 40, "top_p": 0.9},
        {"top_p": 0.95, "min_p": 0.001, "typical_p": 0.9},
        {"top_k": 15000, "top_p": 0.9, "typical_p": 0.5},
    ],
)
@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_compiled_code_is_nearly_always_certain(given_filters: dict[str, Any], scale: float) -> None:
    certain = 0
    for seed in range(50):
        sampler = Sampler(Sampling(seed=seed, temperature=0.8, **given_filters))
        logits, text = scale * torch.randn(20_000, generator=torch.Generator().manual_seed(seed)), [0] * 5
        found = compiled(sampler, logits, text)
        assert found in (None, reference(sampler, logits, text))
        certain += found is not None
    assert certain >= 47


@compiled_here
@pytest.mark.parametrize("level", LEVELS)
def test_choices_are_the_same_on_every_instruction_set(level: str) -> None:
    if platform.machine() != "x86_64" or torch.backends.cpu.get_cpu_capability() not in LEVELS[level]:
        pytest.skip(f"not a processor of {level}")
    command = [sys.executable, "-m", "tests.choices", f"-march={level}", "-mprefer-vector-width=512"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.stdout.split("\n") == ["built: True", ""], done.stdout + done.stderr


@compiled_here
def test_what_compiled_code_cannot_read_is_chosen_by_the_sampler() -> None:
    sampler, logits = Sampler(Sampling(temperature=0.8)), row("usual", 11, 3)
    for other in (logits.double(), torch.stack([logits, logits], dim=1)[:, 0]):
        assert compiled(sampler, other, [0] * 4) is None
        assert sampler.choose(other, [0] * 4) == reference(sampler, logits, [0] * 4)


@compiled_here
@pytest.mark.parametrize("token", [-1, 11])
def test_an_edit_of_a_token_outside_of_the_row_is_refused(token: int) -> None:
    sampler = Sampler(Sampling(temperature=0.8), [LogitBias({token: 1.0})])
    logits = row("usual", 11, 3)
    assert compiled(sampler, logits, [0]) is None
    with pytest.raises((IndexError, RuntimeError)):
        sampler.choose(logits, [0])


def masked_row(seed: int, vocab: int, scale: float, step: float) -> Tensor:  # [vocab]
    """Logits in float32, some of them -inf; with a `step`, many are equal."""
    logits = scale * torch.randn(vocab, generator=torch.Generator().manual_seed(seed))
    logits = (logits / step).round() * step if step else logits
    return logits.masked_fill(torch.arange(vocab) % 7 == seed % 13, -torch.inf)


@given(
    seed=seeds,
    vocab=st.sampled_from([1, 7, 16, 1025, 4099]),
    scale=st.sampled_from([0.0, 1.0, 30.0, 3000.0]),
    step=st.sampled_from([0.0, 0.25]),
    masked=st.booleans(),
)
@steady
def test_log_probabilities_are_those_of_a_softmax_in_float64(
    seed: int, vocab: int, scale: float, step: float, masked: bool
) -> None:
    own = torch.Generator().manual_seed(seed)
    logits = masked_row(seed, vocab, scale, step) if masked and vocab > 7 else scale * torch.randn(vocab, generator=own)
    logs, token = logits.double().log_softmax(-1), seed % vocab
    for given_logits in (logits, logits.double()):  # compiled code reads float32
        found = logprob_of(token, given_logits, 5)
        assert logprob_of(token, given_logits, 0) == replace(found, top={})
        assert found.logprob == pytest.approx(logs[token].item(), rel=1e-12, abs=1e-12)
        assert found.entropy == pytest.approx(torch.special.entr(logs.exp()).sum().item(), rel=1e-9, abs=1e-11)
        assert list(found.top.values()) == pytest.approx(logs.topk(min(5, vocab)).values.tolist(), rel=1e-12, abs=1e-12)
        assert all(value == pytest.approx(logs[i].item(), rel=1e-12, abs=1e-12) for i, value in found.top.items())


@compiled_here
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_log_probabilities_of_what_is_not_finite_are_left_to_torch(bad: float) -> None:
    logits = torch.randn(40).index_fill_(0, torch.tensor(20), bad)
    assert native.logprobs(logits, 3, 2) is None and native.logprobs(torch.full((40,), -math.inf), 3, 2) is None


def test_without_a_compiler_choices_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, logits = Sampler(Sampling(temperature=0.8, top_p=0.9)), row("usual", 500, 1)
    expected = [sampler.choose(logits, [0] * position) for position in range(1, 30)]
    monkeypatch.setattr(native, "library", lambda: None)
    assert [sampler.choose(logits, [0] * position) for position in range(1, 30)] == expected


@compiled_here
@given(seed=seeds, vocab=st.sampled_from([8, 15, 16, 33, 5000]), k=st.integers(0, 8), step=st.sampled_from([0.0, 0.5]))
@steady
def test_compiled_top_k(seed: int, vocab: int, k: int, step: float) -> None:
    logits = torch.stack([masked_row(seed + i, vocab, 3.0, step) for i in range(3)])
    found = native.top_k(logits, k)
    assert found is not None
    assert logits.gather(1, found).equal(logits.topk(k).values)
    if not step:
        alive = logits.topk(k).values > -torch.inf
        assert found[alive].equal(logits.topk(k).indices[alive])


@given(st.integers(0, 99), st.sampled_from([2048, 2100, 5000]), st.integers(1, 8))
@steady
def test_top_k_with_and_without_a_compiler(seed: int, vocab: int, k: int) -> None:
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(top_k(logits, k), logits.topk(k).indices)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: None)
        assert torch.equal(top_k(logits, k), logits.topk(k).indices)


@given(st.integers(0, 99), st.sampled_from([1, 15, 17, 1025, 5000]), st.sampled_from(KINDS))
@steady
def test_the_likeliest_token_is_the_first_of_equal_ones(seed: int, vocab: int, kind: str) -> None:
    logits = torch.stack([row(kind, vocab, seed + i) for i in range(3)])
    found = likeliest(logits)
    assert found.tokens == logits.argmax(-1).tolist() and found.logits == logits.amax(-1).tolist()
    assert likeliest(logits[0]).tokens == found.tokens[:1]
    logits[1, vocab // 2] = math.nan
    assert not math.isfinite(likeliest(logits).logits[1])
