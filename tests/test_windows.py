"""Layers with a sliding window keep about the window, and nothing that is computed or reused changes by that."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import outpace
from outpace.core.tree import Tree
from outpace.models.cache import cuts, group
from outpace.models.cache.group import CacheGroup, SlotGroup
from outpace.models.cache.pool import CacheShape
from outpace.models.compiled.cpu import CpuRunner
from outpace.models.hf import lm
from outpace.models.hf.cache import PooledCache, SlotCache
from outpace.models.hf.lm import TransformersLM
from outpace.models.kernels import cpu
from outpace.models.memory import UNLIMITED, CacheKind, bytes_of, tokens_within
from outpace.models.slots import CHUNK
from tests import test_cache, test_models
from tests.test_cache import randoms, steady
from tests.test_models import text, tokens, transformers_greedy
from tests.tiny_models import FULL, GROUPED, SLIDING, build

WINDOW = 40  # more than most trees, so that they run compiled
KINDS = [SLIDING, SLIDING, FULL, SLIDING]
LONG = [text(400, 1), text(5, 2), text(700, 3)]
compiled = pytest.mark.skipif(not cpu.available(), reason="no C++ compiler")


def lm_of(model: outpace.Model) -> TransformersLM:
    assert isinstance(model.lm, TransformersLM)
    return model.lm


def windowed(model: outpace.Model) -> CacheGroup:
    (found,) = (group for group in lm_of(model).cache.groups if group.window is not None)
    return found


def gemma(dtype: torch.dtype = torch.float64, kinds: list[str] = KINDS) -> Any:
    shape = dict(num_hidden_layers=len(kinds), layer_types=kinds, sliding_window=WINDOW, query_pre_attn_scalar=8)
    return build("gemma3_text", dtype, **GROUPED, **shape)


# Spans that move on with nearly every pass


@pytest.fixture(scope="class")  # of each test, as none is in a class: what follows has the usual spans again
def tight() -> Iterator[None]:
    """Spans without room, and cuts of any length."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"GRAIN": 1, "BEHIND": 0, "LEAST_ROOM": 2, "ROOM": 10**6, "FIRST_CAPACITY": 4}.items():
            patch.setattr(group, name, value)
        patch.setattr(cuts, "WORTH", 1)
        patch.setattr(lm, "WORTH", 1)
        test_models.wrapped.cache_clear()
        test_models.drafting.cache_clear()
        yield
    test_models.wrapped.cache_clear()
    test_models.drafting.cache_clear()


RANDOM: list[Any] = [
    test_cache.test_score_keep_score_is_a_fresh_prefill,
    test_cache.test_ragged_rows_share_a_pass,
    test_cache.test_drafters_grow_trees_and_sync_to_what_was_accepted,
    test_cache.test_rows_of_a_draft_grow_together,
    test_cache.test_sync_crops_feeds_and_drops_what_was_provisional,
    test_cache.test_rows_come_and_go_and_share_prefixes,
    test_cache.test_hidden_states_follow_the_tokens,
    test_cache.test_everything_in_any_order,
]
FIXED: list[Any] = [
    test_models.test_plain_decoding_equals_transformers,
    test_models.test_known_prefixes_are_reused_and_change_nothing,
    test_models.test_prefill_in_chunks,
    test_models.test_every_node_of_a_tree_sees_its_ancestors_and_no_more,
    test_models.test_taps_are_the_hidden_states_of_transformers,
    test_models.test_a_slice_is_a_model_of_these_layers,
]


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("name", ["sliding", "mixed"])
@pytest.mark.parametrize("test", RANDOM, ids=lambda test: test.__name__)
@given(random=randoms)
@settings(steady, max_examples=4)
def test_spans_that_move_on_change_nothing_in_any_order(test: Any, name: str, random: Random) -> None:
    test.hypothesis.inner_test(name, random)


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
@pytest.mark.parametrize("test", FIXED, ids=lambda test: test.__name__)
def test_spans_that_move_on_change_nothing(test: Any, name: str) -> None:
    test(name)


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize(("name", "temperature"), [("mistral", 0.0), ("gemma3", 0.8), ("gpt_oss", 0.0)])
def test_every_lossless_method_with_spans_that_move_on(name: str, temperature: float) -> None:
    test_models.test_every_lossless_method_equals_plain_decoding(name, temperature)
    spans = windowed(test_models.wrapped(name)).spans
    assert max(span.first for span in spans.values()) > 80 and max(span.size for span in spans.values()) < 80


# Texts many windows long


METHODS = ["plain", "recycling", "layerskip:exit=2,depth=3", "layerskip:exit=1,width=3"]


MORE = 120  # tokens: the spans move on while they are written


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_long_texts_are_those_of_the_model(dtype: torch.dtype) -> None:
    model = gemma(dtype)
    ours = outpace.wrap(model, compile=False)
    expected = [transformers_greedy(model, prompt, MORE) for prompt in LONG]
    for method in METHODS[:3]:
        assert tokens(ours.generate(LONG, method=method, max_tokens=MORE)) == expected, method
    assert all(span.size <= windowed(ours).most for span in windowed(ours).spans.values())  # type: ignore[operator]
    assert max(span.first for span in windowed(ours).spans.values()) > 500


@compiled
def test_long_texts_of_compiled_passes() -> None:
    model = gemma(torch.float32)
    ours, slow = outpace.wrap(model, compile=True), outpace.wrap(model, compile=False)
    assert isinstance(lm_of(ours).runner, CpuRunner)
    half = lm_of(ours).layers.slice([0, 2])
    draft = outpace.Model(half)
    sampled = dict(max_tokens=MORE, temperature=0.9, seed=3)
    plain = tokens(slow.generate(LONG, method="plain", **sampled))
    for method in METHODS:
        assert tokens(ours.generate(LONG, method=method, **sampled)) == plain, method
    assert tokens(ours.generate(LONG, method="draft", draft=draft, depth=3, width=2, **sampled)) == plain
    assert lm_of(ours).runner.most_tokens  # type: ignore[attr-defined]  # nothing made it give up
    for each in (ours, draft):
        assert max(span.first for span in windowed(each).spans.values()) > 500


# What is kept of a text


class Fed:
    """Counts the tokens of prompts that a model runs."""

    def __init__(self, model: outpace.Model, monkeypatch: pytest.MonkeyPatch):
        ours, self.count = lm_of(model), 0
        run = ours.forward

        def forward(segments: Any, taps: Any) -> Any:
            self.count += sum(len(segment.pending) for segment in segments)
            return run(segments, taps)

        monkeypatch.setattr(ours, "forward", forward)

    def taken(self) -> int:
        found, self.count = self.count, 0
        return found


@pytest.fixture(params=[False, pytest.param(True, marks=compiled)], ids=["eager", "compiled"])
def model(request: pytest.FixtureRequest) -> outpace.Model:
    return outpace.wrap(gemma(torch.float32, [SLIDING, FULL]), compile=request.param)


DOCUMENT, ANSWER = LONG[2], 360  # tokens of an answer: the windows move on past the prompt


def test_a_prompt_is_known_after_a_long_answer(model: outpace.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    fed, prompt = Fed(model, monkeypatch), DOCUMENT
    first = model.generate(prompt, method="plain", max_tokens=ANSWER)
    assert fed.taken() == len(prompt) - 1
    assert model.generate(prompt, method="recycling", max_tokens=ANSWER).tokens == first.tokens
    assert fed.taken() <= 16
    turn = prompt + first.tokens + text(30, 5)  # the chat goes on
    second = model.generate(turn, method="plain", max_tokens=ANSWER)
    assert fed.taken() <= 31
    rewritten = turn + text(20, 6)  # the answer is another one
    model.generate(rewritten, method="plain", max_tokens=4)
    assert fed.taken() <= 21
    model.clear_cache()
    assert model.generate(turn, method="plain", max_tokens=ANSWER).tokens == second.tokens


def test_questions_about_one_document(model: outpace.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second question finds that the windows have moved on; from the third on they are kept where texts part."""
    fed, counts, answers = Fed(model, monkeypatch), list[int](), []
    questions = [DOCUMENT + text(120, seed) for seed in range(10, 14)]
    for question in questions:
        answers.append(model.generate(question, method="plain", max_tokens=ANSWER).tokens)
        counts.append(fed.taken())
    assert min(counts[:2]) > 700 and max(counts[2:]) <= 120
    model.clear_cache()
    assert tokens(model.generate(questions, method="suffix", max_tokens=ANSWER)) == answers
    assert fed.taken() < 2 * 820 + 2 * 140  # at once, too


def test_samples_of_a_prompt_copy_it(model: outpace.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    fed = Fed(model, monkeypatch)
    first = model.generate(DOCUMENT, method="plain", max_tokens=ANSWER)
    fed.taken()
    samples = model.generate(DOCUMENT, n=3, temperature=0.9, seed=1, method="plain", max_tokens=4)
    assert len(samples) == 3 and fed.taken() <= 3 * 16
    assert model.generate(DOCUMENT, method="plain", max_tokens=ANSWER).tokens == first.tokens


def test_a_cut_says_how_much_it_could_keep(model: outpace.Model) -> None:
    ours = lm_of(model)
    slot = ours.acquire(DOCUMENT)
    ours.feed([DOCUMENT], [slot])
    for _ in range(10):
        ours.score([Tree.chain([1] * 100)], [slot])
        ours.keep([list(range(100))], [slot])
    held = list(ours.slots[slot].tokens)
    assert len(held) == 1700 and [ours.reach(slot, length) for length in (1700, 1640)] == [1700, 1640]
    assert ours.reach(slot, 1100) == ours.reach(slot, 700) == 700  # the end of the prompt
    assert ours.reach(slot, 660) == 660 and ours.reach(slot, 500) == 0
    other = ours.acquire(held[:1100])
    assert other != slot and ours.slots[other].tokens == held[:700]
    assert ours.crop(slot, 500) == 0 and ours.reach(slot, 5) == 0


def test_what_is_set_aside_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is short, a prompt is fed again, and the request runs."""
    ours = outpace.wrap(gemma(torch.float32, [SLIDING, FULL]), compile=False)
    cache, prompts = lm_of(ours).cache, [text(300, seed) for seed in (1, 2)]
    first = ours.generate(prompts[0], method="plain", max_tokens=500)
    place = cache.cuts.place(0)
    assert cache.cuts.held(place, 299)
    cache.limit = cache.nbytes  # the next request takes what is left
    for prompt in reversed(prompts):
        found = ours.generate(prompt, method="plain", max_tokens=500)
    assert found.tokens == first.tokens
    assert cache.nbytes <= cache.limit


# Memory


def test_the_cache_of_a_long_text_is_that_of_its_windows(model: outpace.Model) -> None:
    """Bytes of real tensors, against a model without windows."""
    prompt = text(2000, 7)
    whole = outpace.wrap(gemma(torch.float32, [FULL, FULL]), compile=isinstance(lm_of(model).runner, CpuRunner))
    sizes = []
    for each in (model, whole):
        each.generate(prompt, method="plain", max_tokens=40)
        sizes.append(_bytes(lm_of(each).cache))
        assert sizes[-1] == lm_of(each).cache.nbytes
    assert sizes[0] < 0.8 * sizes[1]  # one of two layers keeps everything


def _bytes(cache: SlotCache) -> int:
    if isinstance(cache, PooledCache):
        return sum(group.pool.untyped_storage().nbytes() for group in cache.groups)
    sides = [side for group in cache.groups if isinstance(group, SlotGroup) for side in group.keys + group.values]
    return sum(tensor.untyped_storage().nbytes() for side in sides for tensor in side.values())


@pytest.mark.parametrize(("window", "share"), [(512, 0.21), (1024, 0.24)])
@pytest.mark.parametrize("pooled", [False, True])
def test_a_text_of_32k_tokens_takes_about_a_sixth(window: int, share: float, pooled: bool) -> None:
    """As Gemma 3 has them: windows in five of six layers."""
    used = []
    for windows in ([window] * 5 + [None], [None] * 6):
        shape = CacheShape(6, 1, 2, torch.float32)
        cache = PooledCache(windows, shape, torch.device("cpu")) if pooled else SlotCache(windows)
        cache.set_layer_bytes([16] * 6)
        peak = 0
        for start in range(0, 32768, CHUNK):
            cache.cuts.expect(0, cuts.Cut(start + CHUNK))
            cache.reserve(0, start, 32768, start + CHUNK)
            peak = max(peak, sum(group.used * group.entry_bytes for group in cache.groups))
        for start in range(32768, 34000):
            cache.reserve(0, start, start + 8)
        used.append(sum(group.used * group.entry_bytes for group in cache.groups))
        assert peak <= used[-1]
    assert used[0] < share * used[1]


@given(
    kinds=st.lists(st.builds(CacheKind, st.integers(1, 9), st.none() | st.integers(1, 50)), min_size=1, max_size=4),
    room=st.integers(0, 3000),
)
def test_what_fits_is_the_most_that_fits(kinds: list[CacheKind], room: int) -> None:
    most = tokens_within(kinds, room)
    assert bytes_of(kinds, most) <= room
    assert most == UNLIMITED or bytes_of(kinds, most + 1) > room


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=compiled)])
@pytest.mark.parametrize("kinds", [[SLIDING, FULL], [SLIDING, SLIDING]])
def test_memory_tells_what_fits(kinds: list[str], compile: bool) -> None:
    ours = outpace.wrap(gemma(torch.float32, kinds), compile=compile)
    cache = lm_of(ours).cache
    cache.limit = 1500 * cache.token_bytes
    need = ours.memory(1500)
    assert need is not None and need.fits
    assert (need.most_tokens == UNLIMITED) == (FULL not in kinds)
    prompt = text(min(need.most_tokens, 3000) - 20, 8)
    assert ours.generate(prompt, method="plain", max_tokens=20).finish_reason == "length"
    assert cache.nbytes <= cache.limit
    ours.clear_cache()
    many = ours.generate([text(600, seed) for seed in range(5)], method="plain", max_tokens=100)
    assert [each.finish_reason for each in many] == ["length"] * 5
    assert cache.nbytes <= cache.limit
    if FULL in kinds:
        too_long = text(need.most_tokens + CHUNK + 100, 8)
        with pytest.raises(outpace.RequestFailed, match="the KV cache has room for"):
            ours.generate(too_long, method="plain", max_tokens=20)
    assert "2 requests of 1500 tokens" in str(ours.memory(1500, requests=2))
