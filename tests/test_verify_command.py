"""`outpace verify` finds what is wrong: bugs are planted, each must be caught, and every lossless method must pass."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace import registry
from outpace.api.load import wrap
from outpace.api.model import Model
from outpace.api.stream import Mailbox
from outpace.core import verifier as verify
from outpace.core.drafter import Drafter
from outpace.core.lm import LM, Scores
from outpace.core.sequence import Sequence, Step
from outpace.core.tree import ROOT, Budget, Tree
from outpace.drafting.model_drafter import TreeGrowth
from outpace.errors import UsageError
from outpace.methods.draft import Draft
from outpace.models import segment
from outpace.models.hf import attention, cache
from outpace.sampling import noise, noise_rule, sampler as sample
from outpace.sampling.sampler import Sampler
from outpace.sampling.settings import Sampling
from outpace.testing import ToyLM
from outpace.verifiers import residual
from outpace.verify import distribution as distribution, judge
from outpace.verify.expected import expected_distribution
from outpace.verify.lossy import is_right, kl_divergence
from outpace.verify.plan import Subject, VerifyPlan
from outpace.verify.records import Check
from outpace.verify.suite import PlannedCheck, planned_checks, run_checks, subjects_of
from tests import tiny_models
from tests.conftest import LOSSLESS, settings_of

PROMPTS = [[1, 2, 3, 1, 2], [5, 9, 8, 7, 6] * 4, [40, 41, 42]]
WARM = Sampling(temperature=0.9, top_p=0.8, seed=3)
MANY: dict[str, Any] = {"samples": 400, "contexts": 3, "sampling": Sampling(temperature=1.5, seed=3)}


@pytest.fixture(scope="module")
def llama() -> Model:
    return wrap(tiny_models.build("llama", torch.float32, num_key_value_heads=2))


def asked(model: Model, subjects: list[Subject], **plan: Any) -> list[PlannedCheck]:
    given = {"max_tokens": 20, "sampling": WARM, "samples": 150, "contexts": 1, **plan}
    return planned_checks(VerifyPlan(model, PROMPTS, **given), subjects, transformers=True)


def check(model: Model, subject: Subject, **plan: Any) -> dict[str, Check]:
    """Every check of plain decoding and of one method, by name."""
    return named(asked(model, [subject], **plan))


def named(questions: list[PlannedCheck]) -> dict[str, Check]:
    return {f"{c.subject}: {c.name}": c for c in run_checks(questions)}


def failures(found: dict[str, Check]) -> set[str]:
    return {name for name, check in found.items() if check.failed}


# What is right passes.


@pytest.fixture(scope="module")
def every(llama: Model) -> list[PlannedCheck]:
    """About all methods, as `outpace verify` asks: what plain decoding says is computed once."""
    draft = llama.lm.layers.slice([0, 1])  # type: ignore[attr-defined]
    return asked(llama, [Subject(name, settings_of(name, draft)) for name in LOSSLESS])


@pytest.mark.parametrize("name", LOSSLESS)
def test_every_lossless_method_passes_on_a_transformers_model(name: str, every: list[PlannedCheck]) -> None:
    found = named([question for question in every if question.subject == name])
    assert not failures(found), failures(found)
    assert len(found) == (5 if name == "plain" else 6) and all(done.verdict == "pass" for done in found.values())
    assert f"{name}: greedy = {'Transformers' if name == 'plain' else 'plain'}" in found
    assert found[f"{name}: every token"].figures["tokens"] == 2 * 3 * 20


@pytest.mark.parametrize("verifier", ["residual", "contrastive"])
def test_every_lossless_verifier_passes(verifier: str, toy: Model, toy_draft: LM) -> None:
    subject = Subject("draft", {"method": "draft", "draft": toy_draft, "width": 2, "verifier": verifier})
    found = check(toy, subject, samples=400)
    assert not failures(found), failures(found)
    assert ("draft: same seed = plain" in found) == (verifier == "contrastive")


# What is wrong fails.


@dataclass(frozen=True)
class Lenient(verify.Match):
    """Accepts a guess that is among the three likeliest tokens."""

    def verify(self, seq: Sequence, tree: Tree, scores: Scores) -> Step:
        def choose(node: int) -> int:
            near = set(scores.logits[node].topk(3).indices.tolist())
            guessed = [tree.tokens[child] for child in tree.children(node) if tree.tokens[child] in near]
            return guessed[0] if guessed else seq.sampler.choose(scores.logits[node], seq.tokens)

        return verify.descend(seq, tree, scores.logits, choose)


@dataclass(frozen=True)
class Biased(residual.Residual):
    """Rejection without the residual: after a rejection it draws from the whole distribution again."""

    def verify(self, seq: Sequence, tree: Tree, scores: Scores) -> Step:
        chance, path, start = residual.KeyedRandom(seq, [0]), [ROOT], len(seq.tokens)
        while True:
            node = path[-1]
            distribution = seq.sampler.distribution(scores.logits[node], seq.tokens)
            guessed = [child for child in tree.children(node) if chance.flip(float(distribution[tree.tokens[child]]))]
            token = tree.tokens[guessed[0]] if guessed else chance.draw(distribution)
            path += guessed[:1]
            if seq.push(token, scores, node) or not guessed:
                return Step(tree, path, seq.tokens[start:], path)


@dataclass(eq=False)
class Leaky(Drafter):
    """Writes its guess into the sequence of the request."""

    limit = Budget(2, 2)

    def propose(self, seq: Sequence, budget: Budget) -> Tree:
        if len(seq.generated) == 7:
            seq.tokens[-1] = (seq.tokens[-1] + 1) % seq.vocab
        return Tree.chain([seq.tokens[-1]] * (1 + budget.depth))


@dataclass(eq=False)
class Neighbour(Drafter):
    """Its memory is not kept by request: it swaps rows of a batch that stand next to each other."""

    limit = Budget(2, 2)

    def propose_batch(self, seqs: Any, budgets: Any) -> list[Tree]:
        if len(seqs) > 1 and len(seqs[0].generated) == 5:
            seqs[0].tokens[-1], seqs[1].tokens[-1] = seqs[1].tokens[-1], seqs[0].tokens[-1]
        return [Tree([seq.tokens[-1]]) for seq in seqs]


@dataclass(eq=False)
class Claiming(Draft):
    """Guesses its likeliest token and claims to have drawn it: what several engines do under rejection sampling."""

    def _children(self, growth: Any, node: int, logits: Tensor) -> Any:
        super()._children(growth, node, logits)  # leaves the distribution in the tree
        greedy = TreeGrowth(replace_sampler(growth.seq), growth.budget, growth.scored, growth.reach)
        return super()._children(greedy, node, logits)


def replace_sampler(seq: Sequence) -> Sequence:
    greedy = copy.copy(seq)
    greedy.sampler = Sampler(Sampling())
    return greedy


def caught(model: Model, settings: dict[str, Any], by: str, **plan: Any) -> None:
    """The method's check of this name fails; no other is made."""
    found = named(
        [q for q in asked(model, [Subject("method", settings)], **plan) if (q.subject, q.name) == ("method", by)]
    )
    assert failures(found) == {f"method: {by}"}, {n: c.summary for n, c in found.items()}


def test_a_wrong_acceptance_rule(toy: Model, toy_draft: LM) -> None:
    lenient = {"method": "draft", "draft": toy_draft, "verifier": Lenient()}
    caught(toy, lenient, "greedy = plain")
    caught(toy, lenient, "every token")
    caught(toy, {"method": "recycling", "verifier": Biased()}, "sampled distribution", **MANY)


def test_a_wrong_mask(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention._mask

    def siblings_see_each_other(job: segment.Segment, window: int | None) -> Tensor:
        mask = right(job, window)
        return mask if job.layout is None else mask | (torch.arange(job.end) >= job.start + len(job.pending))

    monkeypatch.setattr(attention, "_mask", siblings_see_each_other)
    caught(llama, {"method": "recycling", "nodes": 12}, "greedy = plain")


def test_a_position_that_is_off_by_one(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    right = segment.Segment.positions.fget  # type: ignore[attr-defined]

    def shifted(job: segment.Segment) -> list[int]:
        return [p + (i > len(job.pending)) for i, p in enumerate(right(job))]

    monkeypatch.setattr(segment.Segment, "positions", property(shifted))
    caught(llama, {"method": "recycling", "nodes": 12}, "greedy = plain")


def test_a_position_that_is_wrong_in_plain_decoding_too(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    right = segment.Segment.positions.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(segment.Segment, "positions", property(lambda job: [p + (p > 9) for p in right(job)]))
    found = check(llama, Subject("ngram", {"method": "ngram"}))
    assert {"plain: every token", "plain: greedy = Transformers"} <= failures(found)


def test_a_cache_that_keeps_the_wrong_nodes(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache.SlotCache, "move", lambda self, row, start, path: None)
    caught(llama, {"method": "recycling", "nodes": 24}, "greedy = plain")


def test_a_drafter_that_leaks(toy: Model, toy_draft: LM) -> None:
    caught(toy, {"method": Leaky()}, "greedy = plain")
    caught(toy, {"method": Neighbour()}, "batch = alone")


def test_streams_that_lose_what_came_while_another_was_read(toy: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def newest(self: Mailbox) -> Any:
        found = self._mail.get()
        while not self._mail.empty() and found.completion is None:  # type: ignore[union-attr]
            found = self._mail.get()
        return found

    monkeypatch.setattr(Mailbox, "get", newest)
    caught(toy, {"method": "suffix"}, "callers = alone")


def test_a_draft_that_claims_a_distribution_it_did_not_draw_from(toy: Model, toy_draft: LM) -> None:
    caught(toy, {"method": Claiming(toy_draft), "verifier": "residual"}, "sampled distribution", **MANY)


@pytest.mark.parametrize("method", ["plain", "recycling"])
def test_a_sampler_that_ignores_top_p(method: str, toy: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "_top_p", lambda logits, mass: logits)
    caught(toy, {"method": method}, "sampled distribution")


def test_a_sampler_that_ignores_the_temperature(toy: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Sampler._started

    def cold(self: Sampler, logits: Tensor, prefix: list[int]) -> Tensor:
        return right(self, logits * 1.5 if not self.greedy else logits, prefix)

    monkeypatch.setattr(Sampler, "_started", cold)
    caught(toy, {"method": "suffix"}, "sampled distribution", **MANY)


def test_noise_that_depends_on_the_pass(toy: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [0]

    def fresh(tokens: Tensor, seed: int, position: int, salt: int = 0) -> Tensor:
        calls[0] += 1
        return noise.gumbel(tokens, seed, calls[0], salt)

    monkeypatch.setattr(noise_rule, "gumbel", fresh)
    found = check(toy, Subject("recycling", {"method": "recycling"}))
    assert "recycling: same seed = plain" in failures(found)
    assert "recycling: sampled distribution" not in failures(found)  # each token is still a draw from the distribution


# How ties are told from bugs, and what the numbers mean.


def test_a_near_tie_is_a_tie_and_a_clear_lead_is_a_bug() -> None:
    sampler = Sampler(Sampling())
    logits = torch.tensor([1.0, 1.0 + 1e-7, 0.5], dtype=torch.float64)
    near, far = (judge.compare(logits, token, 1e-6, sampler, [0]) for token in (0, 2))
    assert judge.compare(logits, 1, 1e-6, sampler, [0]) is None
    assert near is not None and near.tie and near.choice == 1
    assert far is not None and not far.tie and far.gap == pytest.approx(0.5)


def test_an_answer_that_ends_early_is_never_a_tie(toy: Model) -> None:
    plan = VerifyPlan(toy, PROMPTS, max_tokens=8)
    whole = toy.generate(PROMPTS[0], method="plain", max_tokens=8)
    found = plan.judge.between(plan.answer(whole, 0, Sampling()), whole.tokens[:5])
    assert found is not None and not found.explained and (found.position, found.got) == (5, -1)


def counts(drawn: dict[int, int], expected: list[float], native: list[float] | None = None) -> distribution.Counts:
    probs = torch.tensor(expected, dtype=torch.float64)
    other = torch.tensor(native, dtype=torch.float64) if native else probs
    return distribution.Counts(0, [], distribution.Counter(drawn), probs, other, 0)


def test_chi_squared_agrees_with_scipy() -> None:
    from scipy.stats import chisquare

    found = distribution.chi_squared(counts({0: 55, 1: 25, 2: 20}, [0.5, 0.3, 0.2]), 0.01)
    theirs = chisquare([55, 25, 20], [50, 30, 20])
    assert (found.chi2, found.p) == (pytest.approx(theirs.statistic), pytest.approx(theirs.pvalue))


def test_the_model_s_own_rounding_is_granted() -> None:
    drawn = {0: 5400, 1: 4600}
    assert distribution.chi_squared(counts(drawn, [0.5, 0.5]), 0.001).p < 1e-10
    assert distribution.chi_squared(counts(drawn, [0.5, 0.5], native=[0.53, 0.47]), 0.001).p > 0.5


def test_the_stated_power_holds() -> None:
    generator = torch.Generator().manual_seed(0)
    size, alpha = 400, 0.01
    effect = distribution.chi_squared(counts({0: 200, 1: 200}, [0.5, 0.5]), alpha).effect  # of 400 draws
    shifted = 0.5 + effect / 2  # two even bins that are off by d have w = 2 d
    rejected = 0
    for _ in range(400):
        heads = int((torch.rand(size, generator=generator) < shifted).sum())
        rejected += distribution.chi_squared(counts({0: heads, 1: size - heads}, [0.5, 0.5]), alpha).p < alpha
    assert 0.84 < rejected / 400 < 0.95


def test_false_alarms_are_as_rare_as_stated() -> None:
    generator = torch.Generator().manual_seed(1)
    probs = torch.tensor([0.4, 0.3, 0.2, 0.05, 0.03, 0.02])
    p = []
    for _ in range(500):
        drawn = torch.multinomial(probs, 300, replacement=True, generator=generator)
        p.append(distribution.chi_squared(counts(dict(distribution.Counter(drawn.tolist())), probs.tolist()), 0.05).p)
    assert 0.02 < sum(value < 0.05 for value in p) / 500 < 0.09


def test_holm() -> None:
    assert distribution.holm([0.5, 0.001, 0.03], 0.05) == 1  # 0.03 > 0.05 / 2
    assert distribution.holm([0.01, 0.001, 0.02], 0.05) == 3
    assert distribution.holm([], 0.05) == 0


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.7, top_k=9, top_p=0.85, min_p=0.02),
        Sampling(temperature=1.3, typical_p=0.7),
        Sampling(temperature=1.0, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3),
        Sampling(temperature=1.0, logit_bias={3: 2.0, 5: -4.0}),
    ],
)
def test_the_expected_distribution_is_that_of_the_sampler(sampling: Sampling, toy: Model) -> None:
    text = [1, 2, 3, 4, 3]
    request = {"method": "plain", **vars(sampling)}
    sampler = toy.sequence(outpace_request(text[:2], request)).sampler
    logits = toy.lm.reference().precise(text, 1)[0]
    assert torch.allclose(
        expected_distribution(logits, text, 2, sampling), sampler.distribution(logits, text), atol=1e-12
    )


def outpace_request(prompt: list[int], settings: dict[str, Any]) -> Any:
    from outpace.api.request import Request

    return Request.from_keywords(prompt, settings)


def test_a_lossy_method_has_a_price(toy: Model, toy_draft: LM) -> None:
    subject = Subject("typical", {"method": "draft", "draft": toy_draft, "verifier": "typical:delta=0.9,epsilon=0.3"})
    found = check(toy, subject, samples=300)
    paid = found["typical: price"]
    assert paid.verdict == "price" and not paid.failed
    assert paid.figures["kl"] > 0 and paid.figures["kl_low"] <= paid.figures["kl"] <= paid.figures["kl_high"] * 1.2
    assert paid.figures["logprob"] < paid.figures["logprob_plain"]  # plain takes the likeliest tokens


def test_kl_divergence_of_right_draws_is_near_zero() -> None:
    probs = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    assert kl_divergence({0: 500, 1: 300, 2: 200}, probs) == pytest.approx(-2 / 2000)
    assert kl_divergence({0: 1000}, probs) == pytest.approx(0.6931, abs=1e-3)


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("So 3 + 4 = 7, and then 12.", "12", True),
        ("The total is 1,250.", "1250", True),
        ("It is 12, or 13.", "12", False),
        ("The capital is PARIS.", "Paris", True),
        ("no idea", "12", False),
    ],
)
def test_task_score(text: str, answer: str, right: bool) -> None:
    assert is_right(text, answer) == right


def test_methods_are_found_by_name(toy: Model, toy_draft: LM) -> None:
    model = Model(ToyLM(layers=1))
    heads = {name for name in registry.methods() if "head" in registry.options(registry.find(name))}
    every = set(registry.methods()) - heads  # there are none for the toy
    assert {s.name for s in subjects_of([], toy, None, {})} == every - {"draft"}
    assert {s.name for s in subjects_of([], toy, model, {})} == every
    (one,) = subjects_of(["ngram:max_n=2,matches=3"], toy, None, {"policy": "heuristic"})
    assert one.settings == {"method": "ngram", "max_n": 2, "matches": 3, "policy": "heuristic"}


@pytest.mark.parametrize(
    "plan",
    [{"sampling": Sampling()}, {"samples": 3}, {"alpha": 1.5}, {"batches": (1,)}],
)
def test_a_plan_that_proves_nothing_is_refused(plan: dict[str, Any], toy: Model) -> None:
    with pytest.raises(UsageError):
        VerifyPlan(toy, PROMPTS, **plan)
    with pytest.raises(UsageError):
        VerifyPlan(toy, [])
