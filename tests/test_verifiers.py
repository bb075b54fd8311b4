"""Verifiers: the distribution of what they emit, by enumeration of every outcome, and equality with plain decoding.

The residual rule takes its randomness from a `RandomSource`. Here that is one which takes every way in turn, with its
exact probability, and drafts are drawn from it too: so the distribution of the output is a finite sum, right to
rounding.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy import stats
from torch import Tensor

from outpace.core.lm import Logits, Scores
from outpace.core.sequence import Limits, Sequence
from outpace.core.tree import ROOT, Tree
from outpace.core.verifier import Match, Verifier
from outpace.errors import RequestFailed
from outpace.registry import catalogue
from outpace.sampling.processors import Banned, CountPenalty
from outpace.sampling.sampler import Processor, Sampler
from outpace.sampling.settings import Sampling
from outpace.verifiers.lossy import Typical
from outpace.verifiers.residual import KeyedRandom, RandomSource, Residual, traverse

T = TypeVar("T")
ALPHA = 1e-3  # seeds are fixed, so a test that passes once passes always
EXACT = 1e-12
NODES = 6  # of a drawn tree at most, for every one of them is enumerated
steady = settings(derandomize=True, deadline=None)
seeds = st.integers(0, 2**32)


# Every outcome of a random program


@dataclass
class Every:
    """A chance that follows `script`, then takes the first way and notes the others."""

    script: list[int]
    weight: float = 1.0
    asked: int = 0
    others: list[list[int]] = field(default_factory=list)
    flips: list[float] = field(default_factory=list)

    def flip(self, prob: float) -> bool:
        self.flips.append(prob)
        return bool(self._take([max(0.0, 1 - prob), min(1.0, prob)]))

    def draw(self, weights: Tensor) -> int:
        assert (weights >= 0).all() and weights.sum() > 0
        return self._take((weights / weights.sum()).tolist())

    def _take(self, probs: list[float]) -> int:
        if self.asked == len(self.script):
            ways = [way for way, prob in enumerate(probs) if prob > 0]
            self.others += [[*self.script, way] for way in ways[1:]]
            self.script = [*self.script, ways[0]]
        way = self.script[self.asked]
        self.asked += 1
        self.weight *= probs[way]
        return way


def outcomes(program: Callable[[Every], T]) -> Iterator[tuple[float, T]]:
    """Each result of a random program, with its probability."""
    scripts: list[list[int]] = [[]]
    while scripts:
        chance = Every(scripts.pop())
        result = program(chance)
        yield chance.weight, result
        scripts += chance.others


def test_outcomes_are_all_there() -> None:
    def program(chance: RandomSource) -> tuple[int, ...]:
        first = chance.draw(torch.tensor([1.0, 0.0, 3.0]))
        return (first, chance.flip(0.25)) if first else (first,)

    found = {result: weight for weight, result in outcomes(program)}
    assert found == {(0,): 0.25, (2, False): 0.75 * 0.75, (2, True): 0.75 * 0.25}


# Distributions that are a fixed random function of the prefix


@dataclass(frozen=True)
class Law:
    """Probabilities of the next token; `sparse` ones exclude some tokens, as filters do."""

    seed: int
    vocab: int
    sharp: float = 1.0
    sparse: bool = False

    def __call__(self, prefix: tuple[int, ...]) -> Tensor:
        return _distribution(self, prefix)

    def product(self, prefix: tuple[int, ...], length: int) -> Tensor:
        """Law of the next `length` tokens together."""  # [vocab] * length
        if length == 0:
            return torch.ones((), dtype=torch.float64)
        rows = [self.product((*prefix, token), length - 1) for token in range(self.vocab)]
        return torch.stack([prob * row for prob, row in zip(self(prefix), rows, strict=True)])


@cache
def _distribution(distribution: Law, prefix: tuple[int, ...]) -> Tensor:
    random = np.random.default_rng([distribution.seed, *prefix])
    weights = random.gamma(1 / distribution.sharp, size=distribution.vocab) + 1e-3
    if distribution.sparse:
        weights[random.permutation(distribution.vocab)[: random.integers(distribution.vocab)]] = 0
    return torch.from_numpy(weights / weights.sum())  # [vocab], float64


@dataclass(frozen=True)
class Shape:
    """A random tree's own distribution: how many children a node gets and whether they are drawn or guessed for
    certain.

    Both depend on the tokens on the way to the node only, which is what keeps a drawn tree exact.
    """

    seed: int
    depth: int
    width: int
    drawn: float  # share of the nodes whose children are drawn
    steady: bool = False  # every node gets `width` children

    def __call__(self, prefix: tuple[int, ...]) -> tuple[int, bool]:
        random = np.random.default_rng([self.seed, 1, *prefix])
        count = self.width if self.steady else int(random.integers(self.width + 1))
        return count * (len(prefix) < self.depth), bool(random.random() < self.drawn)


def draft(shape: Shape, q: Law, chance: RandomSource) -> Tree:
    """A tree, with children drawn from `q` in order and without replacement, or fixed."""
    tree = Tree([0])
    nodes: list[tuple[int, tuple[int, ...]]] = [(ROOT, ())]
    for node, prefix in nodes:  # grows as it goes
        count, drawn = shape(prefix)
        weights = q(prefix).clone()
        if drawn:
            tree.proposals[node] = q(prefix)
        for token in [*range(q.vocab)][::-1][:count]:
            if len(tree) > NODES:
                break
            if drawn:
                if weights.sum() == 0:
                    break
                token = chance.draw(weights)
                weights[token] = 0
            nodes.append((tree.add(node, token), (*prefix, token)))
    return tree


def emitted_distribution(shape: Shape, p: Law, q: Law, length: int) -> tuple[Tensor, float]:
    """Law of the first `length` tokens emitted, in as many passes as it takes, and the expected accepted length."""

    def program(chance: RandomSource) -> tuple[tuple[int, ...], int]:
        tree = draft(shape, q, chance)
        accepted, token = traverse(tree, lambda node: p(spell(tree, node)), chance)
        return (*spell(tree, accepted[-1]), token), len(accepted) - 1

    distribution, mean = torch.zeros([p.vocab] * length, dtype=torch.float64), 0.0
    for weight, (tokens, accepted) in outcomes(program):
        first = tokens[:length]
        distribution[first] += weight * p.product(first, length - len(first))
        mean += weight * accepted
    return distribution, mean


def spell(tree: Tree, node: int) -> tuple[int, ...]:
    return tuple(tree.tokens[n] for n in tree.path(node)[1:])


def assert_exact(shape: Shape, p: Law, q: Law) -> None:
    length = shape.depth + 1
    distribution, _ = emitted_distribution(shape, p, q, length)
    torch.testing.assert_close(distribution, p.product((), length), rtol=0, atol=EXACT)


# The residual rule


@given(seeds, st.integers(2, 3), st.integers(0, 3), st.booleans(), st.booleans())
@settings(steady, max_examples=15)
def test_block_verification_keeps_the_distribution(
    seed: int, vocab: int, depth: int, p_sparse: bool, q_sparse: bool
) -> None:
    p, q = Law(seed, vocab, 2, p_sparse), Law(seed + 1, vocab, 2, q_sparse)
    assert_exact(Shape(seed, depth, 1, drawn=1, steady=True), p, q)


@given(seeds, st.booleans(), st.booleans())
@settings(steady, max_examples=40)
def test_drawn_trees_keep_the_distribution(seed: int, p_sparse: bool, q_sparse: bool) -> None:
    p, q = Law(seed, 3, 2, p_sparse), Law(seed + 1, 3, 2, q_sparse)
    assert_exact(Shape(seed, depth=2, width=2, drawn=1), p, q)


def test_wide_drawn_trees_keep_the_distribution() -> None:
    """All children of the root, where nothing is left of the draft's distribution in the end."""
    for seed in range(3):
        p, q = Law(seed, 4, 2), Law(seed + 100, 4, 2)
        assert_exact(Shape(seed, depth=1, width=4, drawn=1, steady=True), p, q)
    assert_exact(Shape(0, depth=2, width=2, drawn=1, steady=True), Law(0, 3, 2), Law(1, 3, 2))


@given(seeds, st.booleans())
@settings(steady, max_examples=40)
def test_certain_guesses_keep_the_distribution(seed: int, sparse: bool) -> None:
    p = Law(seed, 4, 2, sparse)
    assert_exact(Shape(seed, depth=3, width=3, drawn=0), p, p)


@given(seeds, st.booleans(), st.booleans())
@settings(steady, max_examples=50)
def test_mixed_trees_keep_the_distribution(seed: int, p_sparse: bool, q_sparse: bool) -> None:
    p, q = Law(seed, 3, 2, p_sparse), Law(seed + 1, 3, 2, q_sparse)
    assert_exact(Shape(seed, depth=3, width=2, drawn=0.4), p, q)


@dataclass(frozen=True)
class Near(Law):
    """A distribution that is another one up to `shift`."""

    shift: float = 0.0

    def __call__(self, prefix: tuple[int, ...]) -> Tensor:
        weights = Law(self.seed, self.vocab)(prefix) + self.shift * torch.arange(self.vocab)
        return weights / weights.sum()


@pytest.mark.parametrize("shift", [0.0, 1e-15, 1e-9])
def test_nearly_equal_distributions_keep_the_distribution(shift: float) -> None:
    """What is left after a rejection is then rounding, and must not matter."""
    for seed in range(3):
        p, q = Law(seed, 3), Near(seed, 3, shift=shift)
        assert_exact(Shape(0, depth=2, width=1, drawn=1, steady=True), p, q)
        assert_exact(Shape(0, depth=1, width=3, drawn=1, steady=True), p, q)


def test_flips_are_probabilities() -> None:
    for shift in (1e-15, 1e-9):
        p, q, shape = Law(0, 3), Near(0, 3, shift=shift), Shape(0, depth=2, width=1, drawn=1, steady=True)

        def program(chance: Every, p: Law = p, q: Law = q, shape: Shape = shape) -> list[float]:
            tree = draft(shape, q, chance)
            traverse(tree, lambda node: p(spell(tree, node)), chance)
            return chance.flips

        flips = [prob for _, flips in outcomes(program) for prob in flips]
        assert min(flips) >= 0 and max(flips) <= 1


def test_growth_may_depend_on_other_branches() -> None:
    """Only the likelier of two drawn children is drafted on: exact, for it is the draws that must not be chosen."""
    for seed in range(3):
        p, q = Law(seed, 3, 2), Law(seed + 50, 3, 2)

        def program(chance: RandomSource, p: Law = p, q: Law = q) -> tuple[int, ...]:
            tree = draft(Shape(0, 1, 2, drawn=1, steady=True), q, chance)
            best = max((1, 2), key=lambda node: float(q(())[tree.tokens[node]]))
            tree.proposals[best] = q(spell(tree, best))
            tree.add(best, chance.draw(tree.proposals[best]))
            accepted, token = traverse(tree, lambda node: p(spell(tree, node)), chance)
            return (*spell(tree, accepted[-1]), token)

        distribution = torch.zeros(3, 3, 3, dtype=torch.float64)
        for weight, tokens in outcomes(program):
            distribution[tokens] += weight * p.product(tokens, 3 - len(tokens))
        torch.testing.assert_close(distribution, p.product((), 3), rtol=0, atol=EXACT)


def test_a_draft_that_is_the_target_is_accepted() -> None:
    p = Law(0, 3)
    _, mean = emitted_distribution(Shape(0, 3, 1, drawn=1, steady=True), p, p, 4)
    assert mean == pytest.approx(3, abs=EXACT)


def block_mean(p: Law, q: Law, depth: int) -> float:
    """Expected accepted length of block verification, as its authors write it."""
    mean = 0.0
    for guess in itertools.product(range(p.vocab), repeat=depth):
        weight, reach, accept = 1.0, 1.0, []
        for i, token in enumerate(guess):
            mine, theirs = p(guess[:i]), q(guess[:i])
            if i:
                left = float((reach * mine - theirs).clamp(min=0).sum())
                accept.append(left / (left + 1 - reach) if left + 1 - reach > 0 else 1.0)
            weight *= float(theirs[token])
            reach = min(1.0, reach * float(mine[token]) / float(theirs[token])) if theirs[token] > 0 else 0.0
        accept.append(reach)
        mean += weight * sum(1 - math.prod(1 - h for h in accept[i:]) for i in range(depth))
    return mean


def token_mean(p: Law, q: Law, depth: int) -> float:
    """Expected accepted length of rejection sampling, token by token."""

    def after(prefix: tuple[int, ...]) -> float:
        if len(prefix) == depth:
            return 0.0
        kept = torch.minimum(p(prefix), q(prefix)).tolist()
        return sum(prob * (1 + after((*prefix, token))) for token, prob in enumerate(kept))

    return after(())


@pytest.mark.parametrize("seed", range(5))
def test_accepted_length_of_a_chain(seed: int) -> None:
    p, q, depth = Law(seed, 3, 2), Law(seed + 50, 3, 2), 3
    _, mean = emitted_distribution(Shape(0, depth, 1, drawn=1, steady=True), p, q, 1)
    assert mean == pytest.approx(block_mean(p, q, depth), abs=EXACT)
    assert mean > token_mean(p, q, depth) + 1e-6
    _, single = emitted_distribution(Shape(0, 1, 1, drawn=1, steady=True), p, q, 1)
    assert single == pytest.approx(token_mean(p, q, 1), abs=EXACT)  # there is no better rule for one token


def test_more_children_accept_more() -> None:
    for seed in range(3):
        p, q = Law(seed, 4, 2), Law(seed + 50, 4, 2)
        means = [emitted_distribution(Shape(0, 1, width, drawn=1, steady=True), p, q, 1)[1] for width in (1, 2, 3, 4)]
        assert means == sorted(means) and means[-1] == pytest.approx(1, abs=EXACT)


# Whole verifiers, on sequences


def logits_of(seed: int, prefix: list[int], vocab: int) -> Tensor:
    """A fixed random function of the prefix, for a target."""  # [vocab], float64
    return _logits(seed, tuple(prefix), vocab)


@cache
def _logits(seed: int, prefix: tuple[int, ...], vocab: int) -> Tensor:
    return torch.from_numpy(2 * np.random.default_rng([seed, *prefix]).standard_normal(vocab))


def scored(tree: Tree, tokens: list[int], seed: int, vocab: int) -> Scores:
    """What such a target says of a tree after `tokens`, whose last one is the root."""
    assert tree.tokens[ROOT] == tokens[-1]
    rows = [logits_of(seed, [*tokens, *spell(tree, node)], vocab) for node in range(len(tree))]
    return Scores(Logits(torch.stack(rows)))


def sequence(sampler: Sampler, tokens: list[int], verifier: Verifier, limits: Limits | None = None) -> Sequence:
    nobody = cast(Any, None)  # verifiers ask neither the drafter nor the policy
    return Sequence(list(tokens), limits or Limits(max_tokens=100), sampler, nobody, verifier, nobody)


def plain(sampler: Sampler, tokens: list[int], count: int, seed: int, vocab: int) -> list[int]:
    """Choices one by one, as decoding without a draft makes them."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(sampler.choose(logits_of(seed, tokens, vocab), tokens))
    return tokens


def random_tree(random: np.random.Generator, ahead: list[int], vocab: int) -> Tree:
    """A tree of random tokens at random places, and often a part of what really comes, so that much is accepted."""
    tree = Tree([ahead[0]])
    for _ in range(int(random.integers(12))):
        tree.add(int(random.integers(len(tree))), int(random.integers(vocab)))
    node = ROOT
    for token in ahead[1 : 1 + int(random.integers(len(ahead)))]:
        node = tree.add(node, token)
    return tree


SAMPLINGS = [
    Sampling(),
    Sampling(1.0),
    Sampling(0.7, top_k=4),
    Sampling(1.3, top_p=0.8),
    Sampling(1.0, min_p=0.1, typical_p=0.9),
]
PROCESSORS: list[tuple[Processor, ...]] = [(), (CountPenalty(0.6, 0.4, 2), Banned(((1,), (2, 3))))]


@given(st.integers(0, 2**63), st.sampled_from(SAMPLINGS), st.sampled_from(PROCESSORS), st.integers(2, 8))
@settings(steady, max_examples=60)
def test_match_emits_what_plain_decoding_chooses(
    seed: int, sampling: Sampling, processors: tuple[Processor, ...], vocab: int
) -> None:
    vocab, prompt, random = vocab + 3, [4, 0, 2], np.random.default_rng(seed)
    settings = Sampling(**{**sampling.__dict__, "seed": seed})
    wanted = plain(Sampler(settings, processors), prompt, 20, seed, vocab)
    seq = sequence(Sampler(settings, processors), prompt, Match(), Limits(max_tokens=14))
    while not seq.finished:
        before = len(seq.tokens)
        tree = random_tree(random, wanted[before - 1 : before + 4], vocab)
        step = seq.verifier.verify(seq, tree, scored(tree, seq.tokens, seed, vocab))
        assert seq.tokens == wanted[: len(seq.tokens)]
        assert step.tokens == seq.tokens[before:] and step.kept == step.path
        assert [tree.tokens[n] for n in step.path[1:]] == step.tokens[: len(step.path) - 1]
        if not seq.finished:  # it went as far as the tree does
            assert step.path == tree.walk([seq.tokens[before - 1], *step.tokens])
            assert len(step.tokens) == len(step.path)
    assert len(seq.generated) == 14 and seq.finish_reason == "length"


def chi_squared(counts: Counter[tuple[int, ...]], distribution: Tensor) -> float:
    """p-value of counts of tuples under their distribution; what it excludes must not occur."""
    keys = [key for key in itertools.product(*(range(n) for n in distribution.shape)) if distribution[key] > 0]
    assert set(counts) <= set(keys)
    expected = [counts.total() * float(distribution[key]) for key in keys]
    return float(stats.chisquare([counts[key] for key in keys], expected).pvalue)


def joint(sampler: Sampler, tokens: list[int], seed: int, vocab: int) -> Tensor:
    """Law of the next two tokens."""  # [vocab, vocab]
    first = sampler.distribution(logits_of(seed, tokens, vocab), tokens)
    rows = [sampler.distribution(logits_of(seed, [*tokens, t], vocab), [*tokens, t]) for t in range(vocab)]
    return first[:, None] * torch.stack(rows)


def drafted(sampler: Sampler, tokens: list[int], vocab: int, width: int) -> Tree:
    """Two levels drawn from another model by keyed noise of its own, each with `width` children."""
    tree = Tree([tokens[-1]])
    for depth in (0, 1):
        for node in [n for n, d in enumerate(tree.depths) if d == depth]:
            prefix = [*tokens, *spell(tree, node)]
            processed = sampler.process(logits_of(99, prefix, vocab), prefix)
            order = sampler.noised(processed, len(prefix), salt=1 + node).argsort(descending=True)
            tree.proposals[node] = processed.softmax(-1)
            for token in order[:width].tolist():
                if processed[token] > -torch.inf:
                    tree.add(node, token)
    return tree


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("verifier", [Match(), Residual()])
def test_distribution_over_seeds(verifier: Verifier, width: int) -> None:
    vocab, prompt, sampling = 4, [1, 3], Sampling(0.9, top_k=3)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(1000):
        sampler = Sampler(Sampling(**{**sampling.__dict__, "seed": seed}))
        seq = sequence(sampler, prompt, verifier, Limits(max_tokens=2))
        tree = drafted(sampler, prompt, vocab, width)
        step = verifier.verify(seq, tree, scored(tree, prompt, 5, vocab))
        if not seq.finished:
            seq.stats.add(step)
            again = Tree([seq.tokens[-1]])
            verifier.verify(seq, again, scored(again, seq.tokens, 5, vocab))
        counts[seq.tokens[2], seq.tokens[3]] += 1
    assert chi_squared(counts, joint(Sampler(sampling), prompt, 5, vocab)) > ALPHA


def test_keyed_chance() -> None:
    """Flips and draws follow their distribution, and one pass does not repeat another."""
    weights = torch.tensor([0.0, 0.5, 0.0, 1.5, 2.0, 0.0], dtype=torch.float64)
    flips, draws = 0, Counter[tuple[int, ...]]()
    seq = sequence(Sampler(Sampling(1.0, seed=3)), [1], Residual())
    for _ in range(300):
        chance = KeyedRandom(seq, [0])
        for _ in range(10):
            flips += chance.flip(0.3)
            draws[(chance.draw(weights),)] += 1
        seq.stats.passes += 1
    assert stats.binomtest(flips, 3000, 0.3).pvalue > ALPHA
    assert chi_squared(draws, weights / weights.sum()) > ALPHA
    assert not KeyedRandom(seq, [0]).flip(0.0) and KeyedRandom(seq, [0]).flip(1.0)


@given(st.integers(0, 2**32))
@settings(steady, max_examples=20)
def test_greedy_residual_is_greedy(seed: int) -> None:
    """Certain guesses under a distribution with one token: the same as matching."""
    vocab, prompt, random = 6, [1, 2], np.random.default_rng(seed)
    wanted = plain(Sampler(Sampling()), prompt, 20, seed, vocab)
    tree = random_tree(random, wanted[1:9], vocab)
    steps = []
    for verifier in (Match(), Residual()):
        seq = sequence(Sampler(Sampling()), prompt, verifier)
        steps.append(verifier.verify(seq, tree, scored(tree, prompt, seed, vocab)))
        assert seq.tokens == wanted[: len(seq.tokens)]
    assert steps[0] == steps[1]


@pytest.mark.parametrize("verifier", [Match(), Residual(), Typical()])
def test_stop_inside_the_tree(verifier: Verifier) -> None:
    """Nothing is committed after a stop token or beyond the room that is left."""
    vocab, prompt = 5, [1, 2]
    wanted = plain(Sampler(Sampling()), prompt, 5, 1, vocab)
    for limits, length in [
        (Limits(max_tokens=2), 2),
        (Limits(max_tokens=9, stop_token_ids=frozenset([wanted[3]])), 1 + wanted[2:].index(wanted[3])),
    ]:
        seq = sequence(Sampler(Sampling()), prompt, verifier, limits)
        tree = Tree.chain(wanted[1:6])
        step = verifier.verify(seq, tree, scored(tree, prompt, 1, vocab))
        assert seq.finished and seq.generated == step.tokens == wanted[2 : 2 + length]
        assert len(step.path) == 1 + length == 1 + step.accepted


def test_typical_is_lossy_and_says_so() -> None:
    lossy = [name for name, entry in catalogue.entries("verifier").items() if not entry.lossless]
    assert lossy == ["typical", "tiered"]
    assert Match.lossless and Residual.lossless
    assert Match.shares_noise and not Residual.shares_noise


@pytest.mark.parametrize(("prob", "accepted"), [(0.085, False), (0.095, True)])
def test_typical_threshold(prob: float, accepted: bool) -> None:
    """A sharp distribution: the floor is epsilon, 0.09."""
    distribution = torch.tensor([1 - prob, prob, 1e-9], dtype=torch.float64)
    tree = Tree([0])
    tree.add(ROOT, 1)
    tree.add(ROOT, 2)
    seq = sequence(Sampler(Sampling()), [0], Typical())
    Typical().verify(seq, tree, Scores(Logits(distribution.log().expand(len(tree), 3))))
    assert seq.tokens[1] == (1 if accepted else 0)


def test_typical_floor_falls_with_entropy() -> None:
    distribution = torch.full((64,), 1 / 64, dtype=torch.float64)  # exp(-H) is 1/64: the floor is 0.3 / 64
    tree = Tree.chain([0, 9])
    for delta, token in [(0.3, 9), (1.5, 0)]:
        seq = sequence(Sampler(Sampling()), [0], Typical(delta=delta))
        seq.verifier.verify(seq, tree, Scores(Logits(distribution.log().expand(2, 64))))
        assert seq.tokens[1] == token


# Failures


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("verifier", [Match(), Residual(), Typical()])
def test_non_finite_logits_name_the_position(verifier: Verifier, temperature: float, bad: float) -> None:
    prompt, logits = [1, 2, 3], torch.zeros(3, 4)
    logits[0, 2] = logits[1, 1] = 50.0  # what is sure to be chosen is in the tree
    tree = Tree.chain([3, 2, 1])
    for node in range(3):
        wrong = logits.clone()
        wrong[node, 3] = bad
        seq = sequence(Sampler(Sampling(temperature)), prompt, verifier)
        with pytest.raises(RequestFailed, match=rf"non-finite logits.*\b{len(prompt) + node}\b"):
            verifier.verify(seq, tree, Scores(Logits(wrong)))


def test_match_does_not_look_off_the_path() -> None:
    logits = torch.zeros(3, 4)
    logits[0, 2] = 5.0
    logits[2] = math.nan
    tree = Tree([3, 2, 1], [-1, 0, 0])
    for temperature in (0.0, 0.1):
        seq = sequence(Sampler(Sampling(temperature)), [0, 3], Match())
        step = Match().verify(seq, tree, Scores(Logits(logits)))
        assert step.path == [0, 1] and len(step.tokens) == 2


def test_a_deep_chain_is_no_problem() -> None:
    distribution = torch.tensor([0.0, 1.0], dtype=torch.float64)
    path, _ = traverse(Tree.chain([1] * 3000), lambda node: distribution, Always())
    assert len(path) == 3000


class Always:
    """A chance under which everything that can happen does."""

    def flip(self, prob: float) -> bool:
        return prob > 0

    def draw(self, weights: Tensor) -> int:
        return int(weights.argmax())
