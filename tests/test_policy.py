"""Policies: how their budgets move, what they learn, and that none of them changes a token."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from outpace import POLICIES, Drafter, Model, Sequence, Step, registry
from outpace.core.policy import Policy
from outpace.core.sequence import Limits
from outpace.core.tree import Budget, Signal, Tree
from outpace.core.verifier import Match
from outpace.errors import UsageError
from outpace.policies.adaptive import Confidence, Entropy, Heuristic, best_threshold
from outpace.policies.judged import TOP, Example, examples, features
from outpace.policies.learned import Learned, fit
from outpace.sampling.sampler import Sampler
from outpace.sampling.settings import Sampling
from outpace.testing import ToyLM

steady = settings(derandomize=True, deadline=None, max_examples=200)
every = pytest.mark.parametrize("name", POLICIES)


class Chains(Drafter):
    limit = Budget(depth=6, nodes=6)


class Trees(Drafter):
    limit = Budget(depth=4, nodes=12, width=3)


def sequence(drafter: Drafter | None = None, policy: Policy | None = None) -> Sequence:
    return Sequence([1, 2], Limits(50), Sampler(Sampling()), drafter or Chains(), Match(), policy or Policy())


def chain(*probs: float, entropy: float = 0.5) -> Tree:
    """A drafted chain; node i was given probability `probs[i - 1]`."""
    tree = Tree([0])
    for i, prob in enumerate(probs):
        tree.add(i, 10 + i, Signal(prob, entropy, (prob,)))
    return tree


def judged(tree: Tree, accepted: int) -> Step:
    """A pass over a chain that accepted so many of its tokens."""
    path = list(range(accepted + 1))
    return Step(tree, path, [*tree.tokens[1 : accepted + 1], 63], path)


# Budgets


def test_fixed_is_the_drafters_own_limit_unless_told() -> None:
    assert type(registry.policy("fixed")) is Policy
    assert Policy().budget(sequence()) == Chains.limit
    assert Policy().budget(sequence(Trees())) == Trees.limit
    assert Policy(depth=3).budget(sequence()) == Budget(3, 6, 1)
    assert Policy(depth=9).budget(sequence()) == Budget(9, 9, 1)  # a deeper chain has more nodes
    assert Policy(depth=9).budget(sequence(Trees())) == Budget(9, 12, 3)
    assert Policy(nodes=2, width=2).budget(sequence(Trees())) == Budget(4, 2, 2)
    assert Policy(depth=0).budget(sequence()).within(10, True) == Budget(0, 0, 1)


@every
def test_what_is_given_bounds_every_policy(name: str) -> None:
    """A depth, a number of nodes and a width that the user asks for hold, whatever the policy makes of them."""
    budget = registry.policy(name, depth=3, nodes=2, width=2).budget(sequence(Trees()))
    assert budget.depth <= 3 and budget.nodes <= 2 and budget.width <= 2
    budget = registry.policy(name, depth=3).budget(sequence())
    assert budget.depth <= 3 and budget.width == 1


@every
def test_without_options_every_policy_goes_on_and_learns_from_an_empty_pass(name: str) -> None:
    policy = registry.policy(name)
    seq = sequence(policy=policy)
    before = policy.budget(seq)
    policy.observe(seq, Step(Tree([0]), [0], [5], [0]))
    assert policy.budget(seq) == before and before.depth > 0
    assert policy.keep_drafting(seq, Signal(1.0, 0.0, (1.0,)), 1)


@every
@pytest.mark.parametrize("option", ["depth", "nodes", "width"])
def test_budgets_out_of_range_are_refused(name: str, option: str) -> None:
    with pytest.raises(UsageError, match=f"{option}=-1 of"):
        registry.policy(name, **{option: -1})
    if option == "width":
        with pytest.raises(UsageError, match="width=0"):
            registry.policy(name, width=0)
    else:
        registry.policy(name, **{option: 0})


def test_wrong_names_are_named() -> None:
    with pytest.raises(UsageError, match=r"unknown policy 'heuristics'; did you mean 'heuristic'\?"):
        registry.policy("heuristics")
    with pytest.raises(
        UsageError, match=r"unknown option of policy 'confidence' 'treshold'; did you mean 'threshold'\?"
    ):
        registry.policy("confidence", treshold=0.2)
    with pytest.raises(UsageError, match="unknown option of policy 'learned' '_seen'"):
        registry.policy("learned", _seen=[])
    model = Model(ToyLM())
    for policy in ("nothing", "fixed:deep=2", "fixed:depth=-2"):
        with pytest.raises(UsageError):
            model.generate([1, 2], method="ngram", policy=policy, max_tokens=1)


# Heuristic


def test_heuristic_is_two_up_and_one_down() -> None:
    policy = Heuristic()
    seq, other = sequence(policy=policy), sequence(policy=policy)
    depths = []
    for accepted in (5, 7, 0, 3, 7, 0, 0):
        depth = policy.budget(seq).depth
        assert policy.budget(seq) == Budget(depth, depth, 1)
        policy.observe(seq, judged(chain(*[0.5] * depth), min(accepted, depth)))
        depths.append(policy.budget(seq).depth)
    assert depths == [7, 9, 8, 7, 9, 8, 7]
    assert policy.budget(other).depth == 5  # what it learned of one request it does not apply to another


def test_heuristic_stays_between_one_and_the_most() -> None:
    policy = Heuristic(start=3, most=6)
    seq = sequence(policy=policy)
    for _ in range(4):
        policy.observe(seq, judged(chain(0.5), 1))
    assert policy.budget(seq).depth == 6
    for _ in range(9):
        policy.observe(seq, judged(chain(0.5), 0))
    assert policy.budget(seq).depth == 1


def test_heuristic_on_a_tree_looks_at_the_path_that_was_chosen() -> None:
    policy = Heuristic()
    seq = sequence(Trees(), policy)
    tree = Tree([0, 1, 2, 3], [-1, 0, 0, 1])
    assert policy.budget(seq) == Budget(5, 12, 3)
    policy.observe(seq, Step(tree, [0, 2], [2, 9], [0, 2]))  # a leaf: nothing deeper was on offer
    assert policy.budget(seq) == Budget(7, 12, 3)
    policy.observe(seq, Step(tree, [0, 1], [1, 9], [0, 1]))  # node 1 had a child, and it was wrong
    assert policy.budget(seq) == Budget(6, 12, 3)
    for _ in range(5):
        policy.observe(seq, Step(tree, [0, 2], [2, 9], [0, 2]))
    assert policy.budget(seq) == Budget(16, 16, 3)


# What the target judged


def test_examples_are_the_children_of_accepted_nodes() -> None:
    tree = Tree([0])
    a, b = tree.add(0, 1, Signal(0.6, 1.0)), tree.add(0, 2, Signal(0.3, 1.0))
    c, d = tree.add(a, 3, Signal(0.5, 2.0)), tree.add(a, 4)  # d came without a signal
    e, f = tree.add(b, 5, Signal(0.9, 3.0)), tree.add(c, 6, Signal(0.8, 4.0))
    s = tree.signals
    assert list(examples(Step(tree, [0, a], [1, 9], [0, a]))) == [
        Example(s[a], 1, True),
        Example(s[b], 1, False),
        Example(s[c], 2, False),
    ]
    assert list(examples(Step(tree, [0], [9], [0]))) == [Example(s[a], 1, False), Example(s[b], 1, False)]
    assert list(examples(Step(tree, [0, b, e], [2, 5, 9], [0, b, e]))) == [
        Example(s[a], 1, False),
        Example(s[b], 1, True),
        Example(s[e], 2, True),
    ]
    assert d not in s and f in s


def test_a_request_that_ends_inside_its_tree_judged_nothing_below() -> None:
    """Token 11 ended the request: the target was never asked about 12, so nothing is known of it."""
    tree = chain(0.9, 0.8, 0.7)
    path = [0, 1, 2]
    assert [(e.depth, e.accepted) for e in examples(Step(tree, path, [10, 11], path))] == [(1, True), (2, True)]


def test_features_are_of_one_length() -> None:
    assert features(Signal(0.5, 0.25, (0.5, 0.2)), 3) == [0.5, 0.2, *[0.0] * (TOP - 2), 0.5, 0.25, math.log(4)]
    assert len(features(Signal(0.5, 0.25, tuple([0.01] * 40)), 1)) == TOP + 3


# Confidence

seen_drafts = st.lists(st.tuples(st.sampled_from([i / 8 for i in range(9)]), st.booleans()), max_size=24)


@given(seen_drafts, st.sampled_from([1.0, 2.0, 3.0, 10.0]))
@settings(steady, max_examples=500)
def test_best_threshold_is_the_cheapest(seen: list[tuple[float, bool]], miss_cost: float) -> None:
    good, bad = [p for p, yes in seen if yes], [p for p, yes in seen if not yes]
    found = best_threshold(seen, 0.375, miss_cost)
    if len(seen) <= 5 or not good or not bad:
        assert found == 0.375
        return

    def cost(threshold: float) -> float:
        wrong_drafts = sum(p >= threshold for p in bad) / len(bad)
        wrong_stops = sum(p < threshold for p in good) / len(good)
        return wrong_drafts + miss_cost * wrong_stops

    tried = [i / 16 for i in range(-1, 18)]
    assert cost(found) <= min(cost(threshold) for threshold in tried) + 1e-12
    assert found in {p for p, _ in seen}
    assert best_threshold(seen[::-1], 0.375, miss_cost) == found


def test_best_threshold_by_hand() -> None:
    separable = [(0.1, False), (0.2, False), (0.3, False), (0.7, True), (0.8, True), (0.9, True)]
    assert best_threshold(separable, 0.5, 3.0) == 0.7
    assert best_threshold(separable[1:], 0.5, 3.0) == 0.5  # too few to learn from
    assert best_threshold([(p, True) for p, _ in separable], 0.5, 3.0) == 0.5
    upside_down = [(p, not yes) for p, yes in separable]
    assert best_threshold(upside_down, 0.5, 3.0) == 0.1  # drafting on is cheaper than any stop


def test_confidence_stops_under_its_threshold_and_refits() -> None:
    policy = Confidence(threshold=0.4)
    seq = sequence(policy=policy)
    assert policy.keep_drafting(seq, Signal(0.4, 9.0), 1) and not policy.keep_drafting(seq, Signal(0.39, 0.0), 1)
    for _ in range(3):  # tokens with 0.9 are right, those with 0.6 are not
        policy.observe(seq, judged(chain(0.9, 0.6, 0.99), 1))
    assert policy.threshold == 0.9
    assert not policy.keep_drafting(seq, Signal(0.6, 0.0), 1)
    for _ in range(40):  # now tokens with 0.6 are right too
        policy.observe(seq, judged(chain(0.6, 0.3), 1))
    assert policy.threshold == 0.6


def test_confidence_without_refit_keeps_its_threshold() -> None:
    policy = Confidence(threshold=0.4, refit=False)
    seq = sequence(policy=policy)
    for _ in range(20):
        policy.observe(seq, judged(chain(0.9, 0.6), 1))
    assert policy.threshold == 0.4


def test_confidence_forgets() -> None:
    policy = Confidence(history=12)
    seq = sequence(policy=policy)
    for _ in range(30):
        policy.observe(seq, judged(chain(0.9, 0.6), 1))
    assert policy.threshold == 0.9
    for _ in range(6):  # twelve judged drafts of another kind push out all that was known
        policy.observe(seq, judged(chain(0.3, 0.2), 1))
    assert policy.threshold == 0.3


# Entropy


@given(st.floats(0, 20), st.floats(0.01, 2), st.floats(0, 1))
@steady
def test_entropy_stops_by_its_bound(entropy: float, gamma: float, floor: float) -> None:
    policy = Entropy(gamma=gamma, floor=floor)
    seq = sequence(policy=policy)
    bound = 1 - math.sqrt(gamma * entropy)
    assert policy.keep_drafting(seq, Signal(0.0, entropy), 1) == (bound >= floor)
    assert policy.keep_drafting(seq, Signal(1.0, entropy), 7) == (bound >= floor)


@given(st.lists(st.integers(0, 4), max_size=40), st.floats(0, 1))
@settings(steady, max_examples=60)
def test_entropys_floor_follows_acceptance(accepted: list[int], target: float) -> None:
    policy = Entropy(target=target, floor=0.3, rate=0.05)
    seq, untouched = sequence(policy=policy), sequence(policy=policy)
    floor, mean = 0.3, target
    for count in accepted:
        policy.observe(seq, judged(chain(*[0.5] * 4), count))
        mean = (mean + count / 4) / 2
        floor = min(1.0, max(0.0, floor + (0.1 if mean < target else -0.1) * 0.05))
    state = next(iter(seq._memory.values()), [0.3, target])
    assert state == pytest.approx([floor, mean], abs=1e-12)
    assert policy.keep_drafting(untouched, Signal(0.5, 0.69 * 0.69 / 0.2), 1)  # 1 - 0.69 is just above the floor of 0.3
    assert not policy.keep_drafting(untouched, Signal(0.5, 0.71 * 0.71 / 0.2), 1)


def test_entropy_drafts_less_when_little_is_accepted() -> None:
    signal = Signal(0.5, 0.68 * 0.68 / 0.2)  # the bound is 0.32, a little above the floor at the start
    for accepted, goes_on in ((0, False), (4, True)):
        policy = Entropy()
        seq = sequence(policy=policy)
        assert policy.keep_drafting(seq, signal, 1)
        for _ in range(60):
            policy.observe(seq, judged(chain(*[0.5] * 4), accepted))
        assert policy.keep_drafting(seq, signal, 1) == goes_on


# Learned


def separable(count: int = 200) -> list[Example]:
    """Drafts that are right exactly when their probability is above a half."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for i in range(count):
        prob = torch.rand((), generator=generator).item()
        prob = prob if abs(prob - 0.5) > 0.1 else 0.2  # a margin
        rows.append(Example(Signal(prob, 2 * (1 - prob), (max(prob, 0.3),)), 1 + i % 5, prob > 0.5))
    return rows


def right(policy: Learned, rows: list[Example]) -> float:
    seq = sequence(policy=policy)
    return sum(policy.keep_drafting(seq, e.signal, e.depth) == e.accepted for e in rows) / len(rows)


def test_fit_separates_what_can_be_separated_and_leaves_the_random_state() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    one, two = fit(separable()), fit(separable())
    assert torch.equal(torch.random.get_rng_state(), before)
    x = torch.tensor([e.features() for e in separable()])
    assert torch.equal(one(x), two(x)) and not one(x).requires_grad
    assert ((one(x).squeeze(-1) > 0).tolist()) == [e.accepted for e in separable()]
    with torch.no_grad():  # callers run without gradients; training must not mind
        assert torch.equal(fit(separable())(x), one(x))


def test_fit_needs_examples() -> None:
    with pytest.raises(UsageError, match="no examples"):
        fit([])


def test_learned_saves_and_loads(tmp_path: Path) -> None:
    policy = Learned()
    with pytest.raises(UsageError, match="not been trained"):
        policy.save(tmp_path / "none.safetensors")
    policy._model = fit(separable())
    policy.save(tmp_path / "policy.safetensors")
    loaded = registry.policy("learned", weights=str(tmp_path / "policy.safetensors"))
    assert right(policy, separable()) == right(loaded, separable()) == 1.0
    seq = sequence(policy=loaded)
    state = {name: tensor.clone() for name, tensor in loaded._model.state_dict().items()}
    for _ in range(100):  # one that came with weights keeps them
        loaded.observe(seq, judged(chain(0.9, 0.8, 0.7, 0.1), 0))
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded._model.state_dict().items())
    loaded.threshold = 0.0
    assert loaded.keep_drafting(seq, Signal(0.01, 5.0, (0.3,)), 1)
    loaded.threshold = 1.0
    assert not loaded.keep_drafting(seq, Signal(0.6, 0.8, (0.6,)), 1)


def test_learned_is_trained_ahead_on_the_steps_of_a_run() -> None:
    model, draft = Model(ToyLM()), ToyLM(layers=1)
    run = model.stream([[1, 2], [3]], method="draft", draft=draft, temperature=1.0, max_tokens=60)
    seen = [example for piece in run if piece.step is not None for example in examples(piece.step)]
    assert {example.accepted for example in seen} == {True, False}
    policy = Learned.trained(seen)
    plain = model.generate([5, 6], method="plain", max_tokens=40)
    found = model.generate([5, 6], method="draft", draft=draft, depth=8, policy=policy, max_tokens=40)
    fixed = model.generate([5, 6], method="draft", draft=draft, depth=8, max_tokens=40)
    assert found.tokens == plain.tokens
    assert found.stats.drafted < fixed.stats.drafted


def test_learned_drafts_on_until_it_has_seen_enough_and_then_learns() -> None:
    policy = Learned(refit_every=40)
    seq = sequence(policy=policy)
    sure, unsure = Signal(0.95, 0.5, (0.95,)), Signal(0.05, 0.5, (0.05,))
    for _ in range(19):
        policy.observe(seq, judged(chain(0.95, 0.05), 1))
    assert policy.keep_drafting(seq, sure, 1) and policy.keep_drafting(seq, unsure, 2)
    policy.observe(seq, judged(chain(0.95, 0.05), 1))  # the fortieth judged draft
    assert policy.keep_drafting(seq, sure, 1) and not policy.keep_drafting(seq, unsure, 2)
    for _ in range(100):  # the world changes
        policy.observe(seq, judged(chain(0.05, 0.95), 1))
    assert policy.keep_drafting(seq, unsure, 1) and not policy.keep_drafting(seq, sure, 2)


# In the loop


@dataclass
class Spy(Policy):
    """Another policy, and all it said."""

    inner: Policy = field(default_factory=Policy)
    said: dict[int, list[tuple[int, bool]]] = field(default_factory=dict)
    passes: list[tuple[list[tuple[int, bool]], Budget, Step]] = field(default_factory=list)

    def budget(self, seq: Sequence) -> Budget:
        return self.inner.budget(seq)

    def keep_drafting(self, seq: Sequence, signal: Signal, depth: int) -> bool:
        verdict = self.inner.keep_drafting(seq, signal, depth)
        self.said.setdefault(seq.id, []).append((depth, verdict))
        return verdict

    def observe(self, seq: Sequence, step: Step) -> None:
        self.passes.append((self.said.pop(seq.id, []), self.inner.budget(seq), step))
        self.inner.observe(seq, step)


OPTIONS: dict[str, dict[str, Any]] = {
    "fixed": {"depth": 3},
    "heuristic": {"start": 3},
    "confidence": {"threshold": 0.7},
    "entropy": {"floor": 0.6},
    "learned": {"refit_every": 24},
    "auto": {"margin": 0.0},
}
PROMPTS = [[1, 2, 3], [7, 5, 7, 5, 9], [40]]
SAMPLED: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 0.8, "seed": 11}}


@cache
def toys() -> tuple[Model, ToyLM]:
    return Model(ToyLM()), ToyLM(layers=1)


@cache
def plainly(kind: str) -> list[list[int]]:
    return [c.tokens for c in toys()[0].generate(PROMPTS, method="plain", max_tokens=40, **SAMPLED[kind])]


@every
@pytest.mark.parametrize("kind", SAMPLED)
@pytest.mark.parametrize("shape", [{}, {"width": 3, "nodes": 8}], ids=["chain", "tree"])
def test_no_policy_changes_a_token(name: str, kind: str, shape: dict[str, int]) -> None:
    model, draft = toys()
    spy = Spy(inner=registry.policy(name, **OPTIONS[name]))
    options = {"method": "draft", "draft": draft, "policy": spy, "max_tokens": 40, **shape, **SAMPLED[kind]}
    completions = model.generate(PROMPTS, **options)
    assert [c.tokens for c in completions] == plainly(kind)
    assert sum(c.stats.accepted for c in completions) > 0
    stops = 0
    for said, budget, step in spy.passes:
        assert step.drafted <= budget.nodes and max(step.tree.depths) <= budget.depth
        assert [depth for depth, _ in said] == list(range(1, len(said) + 1))  # asked once after every level
        assert all(verdict for _, verdict in said[:-1])
        if said:
            depth, verdict = said[-1]
            assert step.drafted >= depth
            if not verdict:  # the token it was unsure of is in the tree: it may stop, not drop
                stops += 1
                assert shape or step.drafted == depth
            elif not shape:
                assert step.drafted == depth + 1
    assert bool(stops) == (name in ("confidence", "entropy", "learned"))


@every
def test_policies_by_name_serve_every_method(name: str) -> None:
    options = ",".join(f"{key}={value}" for key, value in OPTIONS[name].items())
    for method in ("plain", "ngram", "suffix", "recycling", "lookahead"):
        found = toys()[0].generate(PROMPTS, method=method, policy=f"{name}:{options}", max_tokens=40)
        assert [c.tokens for c in found] == plainly("greedy")


@dataclass
class StopAt(Policy):
    """Unsure after so many tokens."""

    at: int = 1

    def keep_drafting(self, seq: Sequence, signal: Signal, depth: int) -> bool:
        return depth < self.at


@pytest.mark.parametrize("kind", SAMPLED)
@pytest.mark.parametrize("at", [1, 2, 4, 9])
def test_the_token_it_stopped_after_is_what_the_draft_says(kind: str, at: int) -> None:
    """With an exact copy as the draft everything is accepted, so every pass commits what was drafted and one more."""
    model, _ = toys()
    twin = ToyLM()
    stream = model.stream(
        PROMPTS[0], method="draft", draft=twin, depth=6, policy=StopAt(at=at), max_tokens=40, **SAMPLED[kind]
    )
    found = list(stream)
    assert [t for piece in found for t in piece.tokens] == plainly(kind)[0]
    for piece in found[:-1]:
        assert piece.step is not None and piece.step.drafted == piece.step.accepted == min(at, 6)


# Methods without a draft model


class Guesses(Drafter):
    """A chain and a side branch, as sure as they are given."""

    limit = Budget(depth=4, nodes=8, width=2)
    probs: tuple[float, ...] = (0.9, 0.6, 0.2, 0.8)

    def propose(self, seq: Sequence, budget: Budget) -> Tree:
        tree = Tree([seq.tokens[-1]])
        for depth, chance in enumerate(self.probs):
            tree.add(depth, 10 + depth, prob=chance)
        tree.add(0, 20, prob=0.1)
        tree.add(len(tree) - 1, 21, prob=0.9)
        return tree


def test_a_policy_that_looks_cuts_what_was_drafted_at_once() -> None:
    """What follows a token that it would have stopped after is not verified; the token itself is."""
    drafter = Guesses()
    budget, tree = drafter.limit, drafter.propose(sequence(drafter), drafter.limit)

    def kept(policy: Policy, given: Tree = tree, drafter: Drafter = drafter) -> list[int]:
        return policy.select([sequence(drafter, policy)], [given], [budget], 1)[0].tokens[1:]

    assert kept(Policy()) == tree.tokens[1:]
    assert kept(Confidence(threshold=0.5)) == [10, 11, 12, 20]
    assert kept(Confidence(threshold=0.95)) == [10, 20]
    assert kept(Confidence(threshold=0.0)) == tree.tokens[1:]
    asked = Guesses()
    asked.model_source = ""  # a draft model asks as it goes
    assert kept(Confidence(threshold=0.5), drafter=asked) == tree.tokens[1:]
    silent = Tree.chain([1, 10, 11])
    assert kept(Confidence(threshold=0.99), silent) == [10, 11]
    drawn = drafter.propose(sequence(drafter), budget)
    drawn.proposals[0] = torch.full((64,), 1 / 64)
    assert kept(Confidence(threshold=0.95), drawn) == drawn.tokens[1:]  # what was drawn may not be dropped


def test_chances_teach_where_there_are_no_signals() -> None:
    tree = Guesses().propose(sequence(), Budget(4, 8, 2))
    step = Step(tree, [0, 1, 2], [10, 11, 9], [0, 1, 2])
    assert [(e.signal.prob, e.accepted) for e in examples(step)] == [
        (0.9, True),
        (0.1, False),
        (0.6, True),
        (0.2, False),
    ]
    tree.signals[1] = Signal(0.7, 0.5)
    assert [(e.signal.prob, e.accepted) for e in examples(step)] == [(0.7, True)]  # a draft's word counts alone


@pytest.mark.parametrize("method", ["ngram", "recycling", "graft", "via_sd:exact=true,inner=ngram"])
@pytest.mark.parametrize("policy", ["confidence:threshold=0.9,refit=false", "heuristic:start=1,most=2"])
def test_a_strict_policy_verifies_less(method: str, policy: str, toy: Model) -> None:
    prompts = [[1, 2, 3, 1, 2], [9, 8, 7, 6] * 3]
    plain = [done.tokens for done in toy.generate(prompts, method="plain", max_tokens=30)]
    rows = []
    for asked in ("fixed", policy):
        name, options = registry.parse(method)
        fresh = registry.method(name, **options)
        found = toy.generate(prompts, method=fresh, policy=asked, max_tokens=30)
        assert [done.tokens for done in found] == plain
        rows.append(sum(done.stats.drafted for done in found) / sum(done.stats.passes for done in found))
    assert rows[1] < rows[0]
