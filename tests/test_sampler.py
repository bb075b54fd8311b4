"""Sampling: filters and penalties against Transformers' own, noise against its distribution, choices against
softmax."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy import stats
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from outpace.errors import RequestFailed, UsageError
from outpace.sampling.noise import WORD, gumbel, keys, mix, uniform, words, words_of
from outpace.sampling.processors import (
    Banned,
    Constraints,
    CountPenalty,
    CustomProcessor,
    LogitBias,
    MinTokens,
    RepetitionPenalty,
    TokenTable,
    build,
)
from outpace.sampling.sampler import Processor, Sampler
from outpace.sampling.settings import Sampling

ALPHA = 1e-3  # seeds are fixed, so a test that passes once passes always
VOCAB = 11
steady = settings(derandomize=True, deadline=None, max_examples=60)
prefixes = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)
seeds = st.integers(0, 2**32)


def random_logits(seed: int, vocab: int = VOCAB, ties: bool = False) -> Tensor:
    """Random logits in float64, so that no threshold is hit by rounding; with ties if asked."""
    logits = 3 * torch.randn(vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return logits.round() if ties else logits


def fits(counts: Counter[Any], distribution: dict[tuple[int, ...], float] | list[float]) -> bool:
    """Chi-squared test of counts against a distribution; what the distribution excludes must not occur."""
    pairs: list[tuple[Any, float]] = list(
        distribution.items() if isinstance(distribution, dict) else enumerate(distribution)
    )
    total = counts.total()
    assert all(not counts[key] for key, prob in pairs if prob == 0)
    assert {key for key, _ in pairs} >= set(counts)
    alive = [(counts[key], prob * total) for key, prob in pairs if prob > 0]
    return bool(stats.chisquare(*zip(*alive, strict=True)).pvalue > ALPHA)


# Noise


@given(st.lists(st.integers(0, WORD), min_size=1, max_size=20))
@steady
def test_mix_is_the_same_for_ints_and_tensors(words: list[int]) -> None:
    mixed = mix(torch.tensor(words)).tolist()
    assert mixed == [mix(word) for word in words]
    assert all(0 <= word <= WORD for word in mixed)


def test_mix_is_murmur3_and_one_to_one() -> None:
    assert [mix(x) for x in (0, 1, 0xFFFFFFFF)] == [0, 0x514E28B7, 0x81F16F39]
    words = torch.arange(0, 2**32, 4099)
    assert mix(words).unique().numel() == words.numel()


def test_uniform_is_uniform() -> None:
    by_position = [uniform(7, i) for i in range(20_000)]
    by_seed = [uniform(i, 7, 1) for i in range(20_000)]
    for sample in (by_position, by_seed):
        assert min(sample) > 0 and max(sample) < 1
        assert stats.kstest(sample, "uniform").pvalue > ALPHA
    pairs = Counter((int(8 * x), int(8 * y)) for x, y in itertools.pairwise(by_position[::2]))
    assert fits(pairs, dict.fromkeys(itertools.product(range(8), range(8)), 1 / 64))


@pytest.mark.parametrize(("seed", "position", "salt"), [(0, 0, 0), (1, 0, 0), (0, 1, 0), (2**63 + 5, 10_000, 3)])
def test_gumbel_is_gumbel(seed: int, position: int, salt: int) -> None:
    noise = gumbel(torch.arange(30_000), seed, position, salt)
    assert noise.dtype == torch.float64 and noise.isfinite().all()
    assert stats.kstest(noise.numpy(), "gumbel_r").pvalue > ALPHA


def test_noise_is_independent_between_tokens_positions_seeds_and_salts() -> None:
    tokens = torch.arange(30_000)
    base = gumbel(tokens, 3, 5)
    others = [gumbel(tokens + 1, 3, 5), gumbel(tokens + 2**15, 3, 5), gumbel(tokens, 3, 5, salt=1)]
    others += [gumbel(tokens, 3, 5 + step) for step in (1, 2, 256)]
    others += [gumbel(tokens, 3 ^ 1 << bit, 5) for bit in (0, 1, 31, 32, 63)]
    for other in others:
        assert abs(torch.corrcoef(torch.stack([base, other]))[0, 1]) < 4 / math.sqrt(tokens.numel())
        # Extremes decide which token wins, and correlation says little about them.
        both = ((base > 4) & (other > 4)).sum().item()
        expected = tokens.numel() * (1 - math.exp(-math.exp(-4))) ** 2
        assert abs(both - expected) < 5 * math.sqrt(expected)


def test_keys_depend_on_every_bit() -> None:
    one = keys(0, 0, 0)
    flips = [keys(1 << bit, 0, 0) for bit in range(64)]
    flips += [keys(0, 1 << bit, 0) for bit in range(32)] + [keys(0, 0, 1 << bit) for bit in range(32)]
    assert len({one, *flips}) == len(flips) + 1
    for other in flips:
        changed = sum((a ^ b).bit_count() for a, b in zip(one, other, strict=True))
        assert 12 <= changed <= 52  # of 64 bits, of which half should change
    assert keys(1, 2) != keys(2, 1) and keys(1, 0) != keys(1) and keys(0, 1, 2) != keys(0, 2, 1)


def test_words_of_many_positions_are_the_keys_of_each() -> None:
    seeds, positions = [0, 5, 2**63 + 17, -3, 5], np.array([0, 7, 1 << 20, 9, 8])
    due = [keys(seed, int(position), 0) for seed, position in zip(seeds, positions, strict=True)]
    assert [tuple(pair) for pair in words_of(seeds, positions).tolist()] == due
    assert [tuple(words(s, torch.tensor([p]))[0].tolist()) for s, p in zip(seeds, positions, strict=True)] == due


def test_noise_of_a_token_does_not_depend_on_the_others() -> None:
    everything = gumbel(torch.arange(1000), 9, 4)
    some = torch.tensor([999, 0, 17, 400])
    assert torch.equal(gumbel(some, 9, 4), everything[some])


# Filters


samplings = st.builds(
    Sampling,
    temperature=st.floats(0.2, 3),
    top_k=st.integers(0, VOCAB + 2),
    top_p=st.one_of(st.just(1.0), st.floats(0.05, 0.99)),
    min_p=st.one_of(st.just(0.0), st.floats(0.01, 0.9)),
    typical_p=st.one_of(st.just(1.0), st.floats(0.05, 0.99)),
)


@given(seeds, st.booleans(), samplings)
@settings(steady, max_examples=300)
def test_filters_are_those_of_transformers(seed: int, ties: bool, sampling: Sampling) -> None:
    logits = random_logits(seed, ties=ties and sampling.top_p == 1)  # there it breaks ties by the order of its sort
    processed = Sampler(sampling).process(logits, [0])
    wanted = _warpers(sampling)(torch.tensor([[0]]), logits[None])[0]
    assert torch.equal(processed > -torch.inf, wanted > -torch.inf)
    torch.testing.assert_close(processed, wanted, rtol=0, atol=0)


@given(seeds, st.floats(0.05, 0.99), st.integers(1, 4))
@steady
def test_top_p_keeps_equal_tokens_together(seed: int, mass: float, step: int) -> None:
    logits = (random_logits(seed, 40) / step).round() * step
    kept = Sampler(Sampling(1.0, top_p=mass)).process(logits, [0]) > -torch.inf
    probs = logits.softmax(-1)
    likelier = torch.stack([probs[logits > x].sum() for x in logits])
    assert torch.equal(kept, likelier < mass)
    everything = Sampler(Sampling(1.0, top_p=mass)).process(torch.zeros(9), [0])
    assert (everything > -torch.inf).all()


def _warpers(s: Sampling) -> LogitsProcessorList:
    """In the order of `GenerationMixin._get_logits_processor`."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(s.temperature)])
    warpers.extend([TopKLogitsWarper(s.top_k)] if s.top_k else [])
    warpers.extend([TopPLogitsWarper(s.top_p)] if s.top_p < 1 else [])
    warpers.extend([MinPLogitsWarper(s.min_p)] if s.min_p > 0 else [])
    warpers.extend([TypicalLogitsWarper(s.typical_p)] if s.typical_p < 1 else [])
    return warpers


def test_order_of_filters_is_that_of_generate() -> None:
    """The list above against the one that Transformers builds from the same settings."""
    from transformers import GenerationConfig, GenerationMixin

    class Empty(GenerationMixin):
        def __init__(self) -> None: ...

    config = GenerationConfig(do_sample=True, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, typical_p=0.8)
    config._eos_token_tensor = None
    built = Empty()._get_logits_processor(config, input_ids_seq_length=1, device="cpu")
    settings = Sampling(0.7, top_k=5, top_p=0.9, min_p=0.1, typical_p=0.8)
    assert [type(x) for x in built] == [type(x) for x in _warpers(settings)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_filters_in_low_precision_work_in_float32(dtype: torch.dtype) -> None:
    settings = Sampling(0.8, top_k=200, top_p=0.9)
    for seed in range(20):
        logits = random_logits(seed, 1000).to(dtype)
        processed = Sampler(settings).process(logits, [0])
        assert processed.dtype == torch.float32
        theirs = _warpers(settings)(torch.tensor([[0]]), logits.float()[None])[0]
        edge = theirs[theirs > -torch.inf].min()  # which of the tokens with this logit they drop is up to a sort
        assert torch.equal(processed, torch.where(logits.float() / 0.8 == edge, edge, theirs))


@given(seed=seeds, which=st.sampled_from(["top_k", "top_p", "min_p", "typical_p"]))
@steady
def test_strictest_filters_leave_a_token(seed: int, which: str) -> None:
    tight = {"top_k": 1, "top_p": 1e-9, "min_p": 1.0, "typical_p": 1e-9}[which]
    sampler = Sampler(replace(Sampling(1.0), **{which: tight}))
    logits = random_logits(seed)
    assert (sampler.process(logits, [0]) > -torch.inf).sum() == 1
    if which != "typical_p":
        assert sampler.choose(logits, [0]) == logits.argmax()


# Processors


@given(seeds, prefixes, st.floats(0.2, 3))
@steady
def test_repetition_penalty(seed: int, prefix: list[int], penalty: float) -> None:
    logits = random_logits(seed)
    wanted = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prefix]), logits[None])[0]
    assert torch.equal(RepetitionPenalty(penalty)(prefix, logits), wanted)


@given(seeds, prefixes, st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4), min_size=1, max_size=5))
@steady
def test_banned_sequences(seed: int, prefix: list[int], bad_words: list[list[int]]) -> None:
    bad_words = [*bad_words, [*prefix[-2:], 3], [*prefix, 4]]  # two that surely apply
    logits = random_logits(seed)
    wanted = NoBadWordsLogitsProcessor(bad_words)(torch.tensor([prefix]), logits[None])[0].to(logits)
    ours = Banned(tuple(tuple(s) for s in bad_words))(prefix, logits)
    assert torch.equal(ours == -torch.inf, wanted == -torch.inf)
    assert ours[3] == ours[4] == -torch.inf
    torch.testing.assert_close(ours, wanted)


@given(seeds, prefixes, st.integers(0, 12), st.data())
@steady
def test_min_tokens(seed: int, prefix: list[int], count: int, data: st.DataObject) -> None:
    start, stops, logits = data.draw(st.integers(0, len(prefix))), [2, 5], random_logits(seed)
    processor = MinNewTokensLengthLogitsProcessor(start, count, stops)
    wanted = processor(torch.tensor([prefix]), logits[None])[0]
    assert torch.equal(MinTokens(count, start, (2, 5))(prefix, logits), wanted)


@given(seeds, prefixes, st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), min_size=1))
@steady
def test_logit_bias(seed: int, prefix: list[int], bias: dict[int, float]) -> None:
    logits = random_logits(seed)
    processor = SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})
    wanted = processor(torch.tensor([prefix]), logits[None])[0]
    torch.testing.assert_close(LogitBias(bias)(prefix, logits), wanted.to(logits), rtol=0, atol=1e-5)


@given(seeds, prefixes, st.floats(-2, 2), st.floats(-2, 2), st.data())
@steady
def test_presence_and_frequency(
    seed: int, prefix: list[int], presence: float, frequency: float, data: st.DataObject
) -> None:
    start, logits = data.draw(st.integers(0, len(prefix))), random_logits(seed)
    wanted = logits.clone()
    for token in range(VOCAB):
        count = prefix[start:].count(token)
        wanted[token] -= count * frequency + (count > 0) * presence
    torch.testing.assert_close(CountPenalty(presence, frequency, start)(prefix, logits), wanted, rtol=0, atol=1e-12)


def test_processors_are_pure() -> None:
    """None changes its input, and the answer does not depend on what was asked before."""
    every: list[Processor] = [
        LogitBias({1: 2.0}),
        RepetitionPenalty(1.3),
        CountPenalty(0.5, 0.5, 1),
        MinTokens(9, 1, (0,)),
        Banned(((3,), (1, 2))),
        CustomProcessor(lambda ids, scores: scores.mul_(2)),
    ]
    logits, kept, prefix = random_logits(0), random_logits(0), [4, 1, 1]
    for process in every:
        first = process(prefix, logits)
        process([5, 6, 7, 8], random_logits(1))
        assert torch.equal(process(prefix, logits), first)
        assert torch.equal(logits, kept) and prefix == [4, 1, 1]
        assert not torch.equal(first, logits)


@steady
@given(st.lists(prefixes, min_size=1, max_size=6), st.integers(0, 14))
def test_counts_of_any_texts_in_a_row_are_those_of_each(texts: list[list[int]], start: int) -> None:
    known, text = TokenTable(start), list[int]()
    for tokens in texts:
        text = text + tokens if tokens[0] % 3 else tokens  # a longer text, or another one
        found, counts = known.read(text)
        assert dict(zip(found.tolist(), counts.tolist(), strict=True)) == Counter(text[start:])


def test_counts_have_room_for_many_tokens() -> None:
    known, text = TokenTable(), [7 * i % 1009 for i in range(3000)]
    for length in (1, 250, 700, 3000):
        found, counts = known.read(text[:length])
        assert dict(zip(found.tolist(), counts.tolist(), strict=True)) == Counter(text[:length])


def test_edits_leave_the_models_logits_as_they_are() -> None:
    edits = [
        LogitBias({1: 2.0}),
        CustomProcessor(lambda ids, scores: scores * 2),
        CountPenalty(0.5, 0.5, 1),
        Banned(((3,),)),
    ]
    logits, prefix = random_logits(2).float(), [4, 1, 1]
    expected = logits
    for process in edits:
        expected = process(prefix, expected)
    for order in (edits, [*edits[2:], *edits[:2]]):
        Sampler(Sampling(), order).process(logits, prefix)
        assert torch.equal(logits, random_logits(2).float())
    assert torch.equal(Sampler(Sampling(), edits).process(logits, prefix), expected)


def test_custom_is_called_as_transformers_does() -> None:
    def function(ids: Tensor, scores: Tensor) -> Tensor:
        assert ids.tolist() == [[1, 2, 3]] and scores.shape == (1, VOCAB)
        return scores + ids.sum()

    logits = random_logits(0)
    assert torch.equal(CustomProcessor(function)([1, 2, 3], logits), logits + 6)


def test_build_makes_only_what_is_asked() -> None:
    assert build(Sampling(), Constraints(), start=3, vocab=VOCAB) == []
    grammar = LogitBias({0: 1.0})
    sampling = Sampling(
        repetition_penalty=1.2, presence_penalty=0.1, frequency_penalty=0.2, logit_bias={1: 1.0}, temperature=1.0
    )
    rules = Constraints(
        min_tokens=4, stops=(2,), bad_words=((1, 2),), custom=(lambda ids, scores: scores,), grammar=grammar
    )
    built = build(sampling, rules, start=3, vocab=VOCAB)
    kinds = {RepetitionPenalty, CountPenalty, LogitBias, Banned, MinTokens, CustomProcessor}
    assert {type(x) for x in built} == kinds and len(built) == 7
    assert built[-1] is grammar and MinTokens(4, 3, (2,)) in built and CountPenalty(0.1, 0.2, 3) in built


def test_build_checks_ids() -> None:
    with pytest.raises(UsageError, match="logit_bias: token 11"):
        build(Sampling(logit_bias={VOCAB: 1.0}), Constraints(), 0, VOCAB)
    with pytest.raises(UsageError, match="bad_words: token -1"):
        build(Sampling(), Constraints(bad_words=((1, -1),)), 0, VOCAB)


# Choices


def test_greedy_is_the_first_largest() -> None:
    sampler = Sampler(Sampling(seed=5))
    assert sampler.greedy and sampler.plain
    assert sampler.choose(torch.tensor([0.0, 2.0, 1.0, 2.0]), [1]) == 1
    assert sampler.distribution(torch.tensor([0.0, 2.0, 1.0, 2.0]), [1]).tolist() == [0, 1, 0, 0]
    assert ranked(sampler, torch.tensor([0.0, 3.0, 1.0, 2.0]), 1)[:3] == [1, 3, 2]
    forbid = Sampler(Sampling(), [Banned(((1,),))])
    assert not forbid.plain and forbid.choose(torch.tensor([0.0, 2.0, 1.0]), [1]) == 2


def test_same_seed_same_choice() -> None:
    logits = random_logits(0, 500) / 3

    def choices(seed: int, stream: int = 0, position: int = 1) -> list[int]:
        sampler = Sampler(Sampling(temperature=1, seed=seed), stream=stream)
        return [sampler.choose(logits, [0] * n) for n in range(position, position + 20)]

    assert choices(1) == choices(1)
    different = [choices(1), choices(2), choices(1, stream=1), choices(1, stream=2), choices(1, position=21)]
    for a, b in itertools.combinations(different, 2):
        assert sum(x == y for x, y in zip(a, b, strict=True)) < 5
    assert choices(2**64 + 1) == choices(1)  # 64 bits count
    assert choices(-1) == choices(2**64 - 1)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(0.5),
        Sampling(1.7, top_k=4),
        Sampling(1.0, top_p=0.8),
        Sampling(1.2, min_p=0.1),
        Sampling(1.0, typical_p=0.7),
        Sampling(1.0, top_k=6, top_p=0.9, min_p=0.02, repetition_penalty=1.3, logit_bias={2: 1.5}),
    ],
)
def test_choices_follow_softmax(sampling: Sampling) -> None:
    logits, prefix = random_logits(3) / 2, [1, 4]
    processors = build(sampling, Constraints(), 1, VOCAB)
    warped = _processed(sampling, prefix, logits).softmax(-1).tolist()
    distribution = Sampler(sampling, processors).distribution(logits, prefix)
    torch.testing.assert_close(distribution, torch.tensor(warped, dtype=torch.float64), rtol=1e-9, atol=1e-12)
    counts = Counter(Sampler(replace(sampling, seed=s), processors).choose(logits, prefix) for s in range(3000))
    assert fits(counts, warped)


def _processed(s: Sampling, prefix: list[int], logits: Tensor) -> Tensor:
    """What Transformers makes of the logits."""
    processors = LogitsProcessorList()
    if s.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(s.repetition_penalty))
    if s.logit_bias:
        processors.append(SequenceBiasLogitsProcessor({(t,): v for t, v in s.logit_bias.items()}))
    processors.extend(_warpers(s))
    return processors(torch.tensor([prefix]), logits[None])[0]


def test_choices_at_successive_positions_are_independent() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(3000):
        sampler = Sampler(Sampling(1.0, seed=seed))
        counts[sampler.choose(logits, [0]), sampler.choose(logits, [0, 0])] += 1
    single = logits.exp().tolist()
    assert fits(counts, {(a, b): single[a] * single[b] for a in range(4) for b in range(4)})


def ranked(sampler: Sampler, processed: Tensor, position: int, salt: int = 0) -> list[int]:
    """All possible tokens, best first after noise."""
    noised = sampler.noised(processed, position, salt)
    assert torch.equal(noised == -torch.inf, processed == -torch.inf)
    return noised.argsort(descending=True)[: int((processed > -torch.inf).sum())].tolist()


def test_noised_order_is_a_draw_without_replacement() -> None:
    probs = [0.45, 0.3, 0.15, 0.1, 0.0]
    processed = torch.tensor(probs).log()
    distribution = {(a, b): probs[a] * probs[b] / (1 - probs[a]) for a in range(4) for b in range(4) if a != b}
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(4000):
        order = ranked(Sampler(Sampling(1.0, seed=seed)), processed, 2)
        counts[order[0], order[1]] += 1
        assert sorted(order) == [0, 1, 2, 3]
    assert fits(counts, distribution)


def test_noise_stays_with_its_token_when_others_are_filtered() -> None:
    logits, all_of_them = random_logits(0, 50), Sampler(Sampling(1.0, seed=4))
    few = Sampler(Sampling(1.0, top_k=7, seed=4))
    processed = few.process(logits, [0])
    left = torch.nonzero(processed > -torch.inf).flatten()
    assert left.numel() == 7
    assert torch.equal(few.noised(processed, 1)[left], all_of_them.noised(logits, 1)[left])


def test_order_begins_with_the_choice_and_salt_changes_it() -> None:
    logits = random_logits(0, 200) / 3
    same = 0
    for seed in range(50):
        sampler = Sampler(Sampling(0.9, top_p=0.95, seed=seed))
        processed = sampler.process(logits, [1, 2])
        order = ranked(sampler, processed, 2)
        assert order[0] == sampler.choose(logits, [1, 2])
        same += order[0] == ranked(sampler, processed, 2, salt=1)[0]
    assert same < 10


# Errors


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_name_the_position(bad: float, temperature: float) -> None:
    sampler = Sampler(Sampling(temperature))
    with pytest.raises(RequestFailed, match="non-finite logits at position 3"):
        sampler.choose(torch.tensor([0.0, bad, 1.0]), [5, 6, 7])
    with pytest.raises(RequestFailed, match="position 2"):
        sampler.distribution(torch.full((4,), -math.inf), [5, 6])
    assert sampler.choose(torch.tensor([-math.inf, 1.0, -math.inf]), [5]) == 1  # a model may exclude tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_allowed(temperature: float) -> None:
    sampler = Sampler(Sampling(temperature), [Banned(((0,), (1,))), MinTokens(3, 0, (2,))])
    with pytest.raises(RequestFailed, match="no token is allowed at position 2"):
        sampler.choose(torch.zeros(3), [0, 0])
    assert sampler.choose(torch.zeros(3), [0, 0, 0]) == 2


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-1.0, math.nan, math.inf]),
        ("top_k", [-1]),
        ("top_p", [0.0, 1.1, math.nan]),
        ("min_p", [-0.1, 1.1]),
        ("typical_p", [0.0, 1.5]),
        ("repetition_penalty", [0.0, -1.0, math.inf]),
    ],
)
def test_sampling_says_what_is_out_of_range(name: str, values: list[float]) -> None:
    for value in values:
        with pytest.raises(UsageError, match=f"{name}={value} is out of range"):
            replace(Sampling(), **{name: value})
