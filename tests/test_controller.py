"""The controller: what passes cost, what guesses are worth, and what is made of the two. No test looks at the clock."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence as Seq
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outpace.api.model import Model
from outpace.core import stats
from outpace.core.drafter import Drafter
from outpace.core.lm import LM, DraftShape, DraftToken, Logits, Picks, Reference, Scores
from outpace.core.policy import PassReport, Policy
from outpace.core.sequence import Limits, Sequence, Step
from outpace.core.tree import Budget, Signal, Tree
from outpace.core.verifier import Match
from outpace.errors import CacheFull, UsageError
from outpace.methods.auto import Auto, merge
from outpace.methods.suffix import Suffix
from outpace.models.cacheless import CachelessLM
from outpace.models.segment import Segment, SegmentOutput
from outpace.policies.controller.acceptance import (
    LEVELS,
    AcceptanceModel,
    Proposal,
    RequestBias,
    RequestHistory,
    kind,
    level,
)
from outpace.policies.controller.controller import PROBING, Controller, RequestState
from outpace.policies.controller.costs import FORMAT, SHORT, SIZES, Costs, identity, load_or_measure, measure
from outpace.policies.controller.selection import PassOffer, RankedNode
from outpace.policies.controller.timing import PassTimer, RecentMedian, Timing, TimingCorrection
from outpace.sampling.sampler import Sampler
from outpace.sampling.settings import Sampling
from outpace.testing import ToyLM
from outpace.tracing.trace import read
from outpace.tracing.viewer.page import describe

FLAT = Costs(((1, 1.0), (64, 1.0)))
STEEP = Costs(((1, 1.0), (64, 64.0)))
CPU = Costs(((1, 1.0), (2, 1.03), (4, 1.1), (8, 1.3), (16, 1.8), (32, 3.0)))
WIDE = Budget(16, 64, 8)


class Time:
    """A clock that models turn."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(stats, "time", time)
    return time


class Script(CachelessLM):
    """Says one text, whatever it is asked in between; a pass takes what it costs."""

    def __init__(self, text: list[int], costs: Costs, clock: Time, vocab: int = 1000, trees: bool = True):
        super().__init__()
        self.text, self.costs, self.clock = text, costs, clock
        self.vocab, self.max_length, self.trees = vocab, 4096, trees
        self.passes = 0

    def score(
        self, trees: Seq[Tree], rows: Seq[int], since: Seq[int] | None = None, picks: Picks = None
    ) -> list[Scores]:
        self.passes += 1
        new = sum(len(tree) - start for tree, start in zip(trees, since or [0] * len(trees), strict=True))
        held = sum(len(self.slots[row].tokens) + len(self.slots[row].pending) for row in rows)
        self.clock.now += self.costs.seconds(new, len(trees), held / len(rows))
        return super().score(trees, rows, since, picks)

    def forward(self, jobs: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        return [SegmentOutput(self._says(job) if job.layout is not None else None, {}) for job in jobs]

    def _says(self, job: Segment) -> torch.Tensor:
        tree, held = job.tree, self.slots[job.slot].tokens + job.pending
        assert tree is not None
        logits = torch.zeros(len(tree) - job.since, self.vocab)
        for node in range(job.since, len(tree)):
            path = held + [tree.tokens[n] for n in tree.path(node)]
            logits[node - job.since, self.next(path)] = 30.0
        return logits

    def next(self, path: list[int]) -> int:
        right = path == self.text[: len(path)] and len(path) < len(self.text)
        return self.text[len(path)] if right else (7 * path[-1] + 1) % self.vocab

    def reference(self) -> Reference:
        raise NotImplementedError


class Wrong(Script):
    """A draft that is never right."""

    def next(self, path: list[int]) -> int:
        return (super().next(path) + 1) % self.vocab


def new(count: int, start: int = 100) -> list[int]:
    """Text in which nothing comes twice."""
    return list(range(start, start + count))


def sequence(drafter: Drafter | None = None, policy: Policy | None = None) -> Sequence:
    seq = Sequence([1, 2], Limits(500), Sampler(Sampling()), drafter or Suffix(), Match(), policy or Policy(), vocab=64)
    seq.stats.passes = 1
    return seq


def chain(*chances: float) -> Tree:
    tree = Tree([2])
    for i, chance in enumerate(chances):
        tree.add(i, 10 + i, prob=chance)
    return tree


def kept(costs: Costs, trees: list[Tree], budget: Budget = WIDE, rows: int | None = None) -> list[Tree]:
    policy = Controller(costs=costs)
    seqs = [sequence(policy=policy) for _ in trees]
    return policy.select(seqs, trees, [budget] * len(trees), rows or len(trees))


# Costs


def test_costs_are_interpolated_and_never_fall() -> None:
    costs = Costs(((1, 1.0), (4, 1.6), (8, 1.2), (16, 2.0)), batch=((4, 0.5),), context=0.001)
    curve = [costs.seconds(tokens) for tokens in range(1, 700)]
    assert curve == sorted(curve)
    assert curve[0] == 1.0 and curve[3] == 1.2  # four tokens cannot cost more than eight: that one was disturbed
    assert costs.seconds(12) == pytest.approx(1.6) and costs.seconds(24) == pytest.approx(2.8)
    assert costs.seconds(4, 4) == pytest.approx(1.2 + 0.5) and costs.seconds(8, 2) == pytest.approx(1.2 + 0.5 / 3)
    assert costs.seconds(1, 1, SHORT + 100) == pytest.approx(1.1) and costs.seconds(1, 1, 3) == 1.0
    by_token = replace(costs, each=0.002)
    assert by_token.seconds(5, 2, SHORT + 100) == pytest.approx(costs.seconds(5, 2) + 0.2 + 0.6)
    assert Timing(by_token).pass_cost(2, SHORT + 100)(3) == pytest.approx(by_token.seconds(5, 2, SHORT + 100))
    assert Costs(((1, 2.0),)).seconds(50) == 2.0


def test_costs_are_kept_and_what_cannot_be_read_is_not_used(tmp_path: Path) -> None:
    costs, path, key = Costs(((1, 1.0), (8, 2.0)), ((4, 0.1),), 0.5), tmp_path / "new" / "costs.json", {"model": "m"}
    costs.save(path, key)
    assert Costs.load(path, key) == costs and [file.name for file in path.parent.iterdir()] == ["costs.json"]
    assert Costs.load(path, {"model": "other"}) is None and Costs.load(tmp_path / "none.json", key) is None
    saved = json.loads(path.read_text())
    wrong: list[Any] = [
        saved | {"format": FORMAT + 1}, saved | {"chain": []}, saved | {"chain": [[1, 0.0]]}, saved | {"chain": [1]},
        saved | {"context": "far"}, saved | {"each": None}, {"format": FORMAT}, [], "text",
    ]  # fmt: skip
    for content in [*map(json.dumps, wrong), "", "{", "\x00"]:
        path.write_text(content)
        assert Costs.load(path, key) is None


def test_passes_are_timed_through_the_protocol_and_leave_nothing_behind() -> None:
    time = Time()
    true = Costs(((1, 0.01), (8, 0.02), (64, 0.1)))
    lm = Script([], true, time)
    found = measure(lm, 3.0, time.perf_counter)
    for tokens in (1, 2, 4, 8, 16, 32, 64):
        assert found.seconds(tokens) == pytest.approx(true.seconds(tokens))
    assert {n for n, _ in found.batch} == {4, 16} and (found.context, found.each) == (0.0, 0.0)
    assert not any(row.busy or row.tokens for row in lm.slots)


def test_what_context_costs_a_pass_and_each_token_in_it() -> None:
    time = Time()
    true = Costs(((1, 0.01), (8, 0.02), (64, 0.1)), context=1e-6, each=2e-6)
    found = measure(Script([], true, time), 3.0, time.perf_counter)
    assert found.context == pytest.approx(true.context, rel=0.01) and found.each == pytest.approx(true.each, rel=0.01)


def test_large_passes_are_measured_with_several_requests() -> None:
    time, true = Time(), Costs(((1, 0.01), (64, 0.02), (128, 0.1), (256, 0.3)), batch=((4, 0.001), (16, 0.005)))
    found = measure(Script([], true, time), 30.0, time.perf_counter)
    for tokens, requests in ((64, 1), (128, 16), (200, 16), (256, 4)):
        assert found.seconds(tokens, requests) == pytest.approx(true.seconds(tokens, requests))


def test_a_slow_model_is_measured_no_longer_than_needed() -> None:
    time = Time()
    lm = Script([], Costs(((1, 2.0), (16, 3.0))), time)
    found = measure(lm, 3.0, time.perf_counter)
    assert [n for n, _ in found.chain] == sorted(SIZES[:3]) and not found.batch and not found.context
    assert lm.passes <= 5


def test_time_to_capture_a_size_is_not_counted() -> None:
    class Captures(Script):
        seen: set[int]

        def score(
            self, trees: Seq[Tree], rows: Seq[int], since: Seq[int] | None = None, picks: Picks = None
        ) -> list[Scores]:
            size = sum(map(len, trees))
            self.clock.now += 0.4 * (size not in self.seen)
            self.seen.add(size)
            return super().score(trees, rows, since, picks)

    time, true = Time(), Costs(((1, 0.003), (64, 0.004)))
    lm = Captures([], true, time)
    lm.seen = set()
    found = measure(lm, 3.0, time.perf_counter)
    assert [n for n, _ in found.chain][-3:] == [64, 128, 256] and len(found.chain) == 14 and time.now < 9
    assert [s for _, s in found.chain] == pytest.approx([true.seconds(n) for n, _ in found.chain])


def test_a_model_without_room_is_measured_as_far_as_it_goes() -> None:
    class Small(Script):
        def score(
            self, trees: Seq[Tree], rows: Seq[int], since: Seq[int] | None = None, picks: Picks = None
        ) -> list[Scores]:
            if sum(map(len, trees)) > 4:
                raise CacheFull("no room", rows[0])
            return super().score(trees, rows, since, picks)

    time = Time()
    found = measure(Small([], CPU, time), 30.0, time.perf_counter)
    assert [n for n, _ in found.chain] == [1, 4]


def test_costs_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path))
    monkeypatch.setattr("outpace.policies.controller.costs.measure", lambda lm: calls.append(lm) or CPU)
    monkeypatch.setattr("outpace.policies.controller.costs.load_or_measure", load_or_measure)
    model = Model(ToyLM(), name="toy")
    for _ in range(2):
        model.generate([1, 2, 3], max_tokens=5)
        model.generate([1, 2, 3], method="ngram", policy="auto:margin=0.02", max_tokens=5)
    assert len(calls) == 1
    Model(ToyLM(), name="toy").generate([1], max_tokens=2)
    assert len(calls) == 1  # from the file
    Model(ToyLM(), name="other").generate([1], max_tokens=2)
    assert len(calls) == 2
    Model(ToyLM()).generate([1], method="ngram", max_tokens=2)  # a fixed policy needs no costs
    assert len(calls) == 2
    for file in tmp_path.glob("costs/*.json"):
        file.write_text("{")
    Model(ToyLM(), name="toy").generate([1], max_tokens=2)
    assert len(calls) == 3


def test_what_costs_depend_on() -> None:
    class Says(ToyLM):
        def __init__(self) -> None:
            super().__init__()
            self.identity = "a model of mine"

    assert "toy of 2 layers" in identity(ToyLM(), "toy")["model"] and identity(Says())["model"] == ", a model of mine"
    assert identity(ToyLM(), "a") != identity(ToyLM(), "b")


# What is learned


def test_a_kind_that_was_seldom_seen_takes_after_its_like() -> None:
    calibrator = AcceptanceModel()
    sure, unsure = kind("suffix", 0.9, 1), kind("suffix", 0.1, 1)
    assert calibrator.prob(sure) > 0.7 > 0.2 > calibrator.prob(unsure)
    assert calibrator.prob(kind("own", None, 1)) < 0.3  # of one that says nothing little is hoped
    deeper, other = kind("suffix", 0.9, 3), kind("ngram", 0.9, 1)
    before = calibrator.prob(deeper), calibrator.prob(other)
    for _ in range(50):
        calibrator.learn(sure, False)
    assert calibrator.prob(sure) < 0.02
    assert calibrator.prob(sure) < calibrator.prob(deeper) < before[0] / 2  # the same source, as sure
    assert calibrator.prob(other) == before[1]
    for _ in range(400):  # the world changes
        calibrator.learn(sure, True)
    assert calibrator.prob(sure) > 0.85


def test_a_request_is_as_others_are_until_it_shows_otherwise() -> None:
    local = RequestBias()
    assert local.prob(0.3) == pytest.approx(0.3)
    local.learn(1, 1, 0.3)
    first = local.prob(0.3)
    assert 0.3 < first < 0.6
    for _ in range(20):
        local.learn(1, 1, 0.3)
    assert local.prob(0.3) > 0.8
    for _ in range(40):
        local.learn(1, 0, 0.3)
    assert local.prob(0.3) < 0.2
    assert local.prob(0.0) == 0.0 and local.prob(1.0) == 1.0


def test_what_was_not_verified_is_judged_by_the_text() -> None:
    calibrator, memory, tree = AcceptanceModel(), RequestHistory(), Tree([0])
    right = tree.add(0, 1, source="a")
    wrong = tree.add(0, 2, source="b")
    below = tree.add(right, 3, source="a")
    tree.add(wrong, 4, source="b")
    kinds = [kind(tree.sources.get(node, ""), 0.5, 1) for node in range(len(tree))]
    memory.add(Proposal(tree, kinds, [0.5] * len(tree)), 4)
    prior = calibrator.prob(kinds[right])
    memory.judge(1, calibrator, None)
    assert calibrator.prob(kinds[right]) > prior > calibrator.prob(kinds[wrong])
    assert memory.bias("a").judged == memory.bias("b").judged == 1
    memory.judge(
        9, calibrator, None
    )  # the next pass: what stood under `right` was wrong, under `wrong` nothing is known
    assert memory.bias("a").accepted == pytest.approx(0.97, abs=0.01) and memory.bias("a").judged > 1.9
    assert memory.bias("b").judged == 1 and not memory.proposals
    assert kinds[below] == kinds[right]


def test_the_levels_of_a_draft_model_are_judged_by_depth() -> None:
    calibrator, memory, tree = AcceptanceModel(), RequestHistory(), Tree([0])
    for depth in range(3):
        tree.add(depth, 10 + depth, Signal(0.9, 0.1), source="draft")
    memory.add(Proposal(tree, [kind("draft", 0.9, 1)] * 4, [0.9] * 4), 4)
    before = [memory.level(calibrator, "draft", depth) for depth in (1, 2)]
    for token in (10, 77):
        memory.judge(token, calibrator, "draft")
    assert memory.level(calibrator, "draft", 1) > memory.level(calibrator, "draft", 2)
    assert calibrator.prob(level("draft", 1)) > before[0] * 0.95 and memory.level(calibrator, "draft", 2) < before[1]


def test_drift_follows_the_clock_by_size() -> None:
    drift = TimingCorrection()
    assert drift.ratios() == pytest.approx([1.0] * len(drift.ratios()))
    for _ in range(20):
        drift.add(1, 2.0)
    assert drift.ratios() == pytest.approx([2.0] * len(drift.ratios()))  # a busy machine: all passes take longer
    for _ in range(9):
        drift.add(8, 4.0)
    assert drift.ratios()[3] > 3.4 > 2.6 > drift.ratios()[0]
    recent = RecentMedian(3)
    assert recent.get(5.0) == 5.0
    for value in (1.0, 9.0, 1.0):
        recent.add(value)
    assert recent.get(5.0) == 1.0  # one hiccup is not the rule


# What is chosen


def test_all_when_free_and_none_when_too_dear() -> None:
    tree = chain(0.9, 0.8, 0.5, 0.3)
    assert kept(FLAT, [tree])[0] is tree
    none = kept(STEEP, [chain(0.9, 0.8, 0.5, 0.3)])[0]
    assert len(none) == 1 and none.decision is not None and none.decision.reason.startswith("off")
    some = kept(CPU, [chain(0.97, 0.97, 0.05, 0.05, 0.05)])[0]
    assert some.tokens == [2, 10, 11] and some.decision is not None
    assert (some.decision.drafted, some.decision.kept) == (5, 2)
    assert 2.0 < some.decision.expected < 3.0 and 1.5 < some.decision.speedup < 2.5


def test_the_likeliest_of_a_tree_are_taken_with_their_parents() -> None:
    tree = Tree([2])
    poor = tree.add(0, 5, prob=0.1)
    tree.add(poor, 6, prob=0.99)  # sure only if its parent is right
    good = tree.add(0, 7, prob=0.9)
    tree.add(good, 8, prob=0.9)
    found = kept(Costs(((1, 1.0), (3, 1.05), (4, 5.0), (64, 99.0))), [tree])[0]
    assert found.tokens == [2, 7, 8] and found.parents == [-1, 0, 1]
    narrow = kept(FLAT, [tree], Budget(4, 4, 1))[0]  # a target that scores only chains: the likeliest one
    assert narrow.tokens == [2, 7, 8] and narrow.is_chain
    assert len(kept(FLAT, [tree], Budget(1, 9, 8))[0]) == 3 and len(kept(FLAT, [tree], Budget(4, 1, 8))[0]) == 2


def test_guesses_of_a_batch_are_pooled() -> None:
    """Eight tokens cost as much as one, more cost in proportion: alone everything is taken, in a batch the best."""
    costs = Costs(((1, 1.0), (8, 1.0), (64, 8.0)))
    assert len(kept(costs, [chain(0.9, 0.9)])[0]) == 3
    pooled = kept(costs, [chain(0.9, 0.9), chain(0.3, 0.3), *[Tree([2])] * 4])
    assert [len(tree) for tree in pooled[:2]] == [3, 1]  # the room of two goes to whom it serves best
    assert all(len(tree) == 1 for tree in kept(costs, [chain(0.9, 0.9)] * 8))
    assert len(kept(costs, [chain(0.9, 0.9)], rows=8)[0]) == 1  # others' rows count, whatever their policy


def test_what_was_drawn_from_a_distribution_is_not_dropped() -> None:
    tree = Tree([2], proposals={0: torch.ones(64) / 64, 1: torch.ones(64) / 64})
    tree.add(0, 5, Signal(0.01, 4.0))
    tree.add(1, 6, Signal(0.01, 4.0))
    found = kept(STEEP, [tree])[0]
    assert found.tokens == [2, 5, 6] and set(found.proposals) == {0, 1}


def test_without_costs_it_is_the_drafters_own_budget() -> None:
    policy = Controller()
    seq = sequence(policy=policy)
    assert policy.budget(seq) == Suffix().limit
    tree = chain(0.1, 0.1, 0.1)
    assert policy.select([seq], [tree], [Budget(2, 9)], 1)[0].tokens == [2, 10, 11]
    with pytest.raises(UsageError, match="margin"):
        Controller(margin=1.5)


def test_room_for_guesses_is_shared_in_a_batch() -> None:
    policy = Controller(costs=CPU)
    seq = sequence(Auto(), policy)
    assert policy.budgets([seq], 1)[0].nodes == Auto().limit.nodes
    assert policy.budgets([seq], 16)[0].nodes == 8


# In the loop


def run(lm: Script, prompt: int, **settings: Any) -> tuple[list[Step], Model]:
    """Steps of the rest of the script after so many tokens of it."""
    model = Model(lm)
    model._costs = lm.costs
    given = {"max_tokens": len(lm.text) - prompt, "ignore_eos": True, **settings}
    stream = model.stream(lm.text[:prompt], **given)
    steps = [piece.step for piece in stream if piece.step is not None]
    assert stream.completions[0].tokens == lm.text[prompt:]
    return steps, model


def kept_at(steps: list[Step], start: int, end: int) -> float:
    """Guesses verified per pass, between these places of the answer."""
    at, found = 0, []
    for step in steps:
        if start <= at < end:
            found.append(step.drafted)
        at += len(step.tokens)
    return sum(found) / max(1, len(found))


def passes_at(steps: list[Step], start: int, end: int) -> int:
    at, count = 0, 0
    for step in steps:
        count += start <= at < end
        at += len(step.tokens)
    return count


def misleading(count: int) -> list[int]:
    """Text whose last token was often seen before, and never continued like this."""
    return [t for i in range(count // 2) for t in (5, 200 + i)]


@pytest.mark.parametrize("trees", [True, False])
def test_it_turns_on_when_the_text_repeats_itself_and_off_when_it_stops(clock: Time, trees: bool) -> None:
    phrase = new(10, 20)
    text = misleading(80) + phrase * 10 + misleading(160)[80:]
    steps, _ = run(Script(text, CPU, clock, trees=trees), 4, method="suffix", policy="auto")
    assert kept_at(steps, 20, 76) < 0.2  # off
    assert passes_at(steps, 96, 176) < 15  # on, and all of it right
    assert kept_at(steps, 190, 250) < 0.3  # off again
    plain = len(text) - 4
    assert clock.now < 0.75 * plain
    reasons = {step.tree.decision.reason.split(":")[0] for step in steps if step.tree.decision is not None}
    assert reasons >= {"on", "off"}


def test_nothing_is_lost_on_a_text_that_cannot_be_guessed(clock: Time) -> None:
    for text in (misleading(256), new(256)):
        start = clock.now
        run(Script(text, CPU, clock), 6)
        assert clock.now - start < 1.02 * 250


def test_unverified_guesses_teach(clock: Time) -> None:
    """At this price nothing is verified at first; that the guesses were right is learned all the same."""

    class Copies(Drafter):
        limit = Budget(8, 8)

        def propose(self, seq: Sequence, budget: Budget) -> Tree:
            return Tree.chain([seq.tokens[-1], *seq.tokens[-12:-4]])

    dear = Costs(((1, 1.0), (2, 2.5), (9, 2.6), (64, 9.0)))
    steps, model = run(Script(new(12) * 12, dear, clock), 30, method=Copies(), policy="auto")
    assert kept_at(steps, 0, 2) == 0 and kept_at(steps, 50, 100) > 5
    policy = next(p for p in model._methods if isinstance(p, Controller))
    assert policy._acceptance.prob(kind("", None, 1)) > 0.7


def test_a_draft_that_is_never_right_is_asked_rarely(clock: Time) -> None:
    text, level_price = new(400), 0.25
    draft = Wrong(text, Costs(((1, level_price), (64, level_price))), clock)
    lm = Script(text, CPU, clock)
    run(lm, 8, method="draft", draft=draft, policy="auto")
    assert clock.now < 1.02 * 392
    assert draft.passes <= 15 + PROBING * 392 / level_price  # until it is known; and a hundredth of the time


def test_a_draft_is_asked_again_when_it_has_become_right(clock: Time) -> None:
    text = new(600)

    class Late(Wrong):
        def next(self, path: list[int]) -> int:
            return Script.next(self, path) if len(path) > 200 else super().next(path)

    draft = Late(text, Costs(((1, 0.05), (64, 0.05))), clock)
    steps, _ = run(Script(text, CPU, clock), 8, method="draft", draft=draft, policy="auto")
    assert kept_at(steps, 50, 190) < 0.3 and kept_at(steps, 420, 590) > 3
    probes = [s for s in steps if s.tree.decision is not None and s.tree.decision.reason.startswith("probing")]
    assert probes and all(step.tree.decision.drafted <= 2 for step in probes if step.tree.decision is not None)


def test_a_good_draft_is_asked_deep_and_stops_where_it_is_unsure(clock: Time) -> None:
    text = new(300)
    draft = Script(text, Costs(((1, 0.05), (64, 0.05))), clock)
    steps, _ = run(Script(text, FLAT, clock), 8, method="draft", draft=draft, policy="auto")
    assert max(step.accepted for step in steps) == LEVELS
    start = clock.now
    run(Script(text, FLAT, clock), 8, method="draft", draft=draft, policy="auto:depth=3")
    assert clock.now > start


def test_a_draft_that_runs_on_by_itself_is_told_how_deep(clock: Time) -> None:
    """A chain that is made in one go cannot be stopped at a token: its depth is what pays on average."""
    text, asked = new(300), list[int]()

    class Chained(Script):
        def draft(
            self, rows: Seq[int], tokens: Seq[int], shapes: Seq[DraftShape], picks: Seq[Any]
        ) -> list[list[DraftToken]]:
            steps = shapes[0].depth
            asked.append(steps)
            self.clock.now += 0.05 * steps
            at = text.index(tokens[0]) + 1
            right = text[at : at + min(steps, 3)]  # the first three are right
            return [[DraftToken(token, 0.9, i - 1) for i, token in enumerate(right + [7] * (steps - len(right)))]]

    draft = Chained(text, FLAT, clock)
    draft.drafts = draft
    steps, _ = run(Script(text, FLAT, clock), 8, method="draft", draft=draft, policy="auto")
    assert draft.passes == 0 and asked[0] == LEVELS
    assert set(asked[-20:]) <= {3, 4} and sum(step.accepted for step in steps) > 200


def test_auto_with_a_draft_asks_it_only_while_retrieval_does_not_do(clock: Time) -> None:
    text = new(150, 300) + new(10, 20) * 20
    draft = Script(text, Costs(((1, 0.3), (64, 0.3))), clock)
    lm = Script(text, FLAT, clock)
    steps, _ = run(lm, 8, draft=draft)
    sources = [source for step in steps for node, source in step.tree.sources.items() if node in step.path]
    assert {source.split(":")[0] for source in sources} >= {"draft", "suffix"}
    at, drafted = 0, []
    for step in steps:
        drafted += [at] * any(node in step.tree.signals for node in range(len(step.tree)))
        at += len(step.tokens)
    assert sum(place < 142 for place in drafted) > 10
    assert sum(place > 220 for place in drafted) <= 3


# The method


def test_merged_trees_share_what_they_agree_on() -> None:
    one, two = Tree([0]), Tree([0])
    one.add(0, 1, source="one: part", prob=0.5)
    two.add(two.add(0, 1, Signal(0.6, 0.1), prob=0.6), 2, Signal(0.7, 0.1))
    two.add(0, 3, prob=0.2)
    found = merge(one, two, "two")
    assert (found.tokens, found.parents) == ([0, 1, 2, 3], [-1, 0, 1, 0])
    assert found.sources == {1: "one: part", 2: "two", 3: "two"}
    assert found.probs == pytest.approx({1: 0.8, 2: 0.7, 3: 0.2})
    assert found.signals == {1: Signal(0.6, 0.1), 2: Signal(0.7, 0.1)}


def test_candidates_of_auto() -> None:
    assert [part.name for part in Auto(candidates="ngram + lookahead")._parts] == ["ngram", "lookahead"]
    for wrong, message in {"auto": "cannot be a candidate", "suffix+draft": "cannot be", "sufix": "suffix"}.items():
        with pytest.raises(UsageError, match=message):
            Auto(candidates=wrong)


def test_the_policy_that_goes_with_a_method(toy: Model, toy_draft: LM) -> None:
    from outpace.api.request import Request

    def policy(**given: Any) -> type[Policy]:
        return type(toy.sequence(Request.from_keywords([1, 2], given)).policy)

    assert policy() is policy(draft=toy_draft) is policy(method="suffix", policy="auto") is Controller
    assert policy(method="suffix") is policy(policy="fixed") is Policy
    assert toy.generate([1, 2], max_tokens=4).method == "auto"
    own = Controller()
    toy.generate([1, 2], method="ngram", policy=own, max_tokens=2)
    assert own.costs is toy.costs


class Counting(Drafter):
    """Guesses nothing, and counts what it was told."""

    def __init__(self) -> None:
        self.asked = self.learned = self.closed = 0

    limit = Budget(4, 4)

    def propose(self, seq: Sequence, budget: Budget) -> Tree:
        self.asked += 1
        return Tree([seq.tokens[-1]])

    def observe(self, seq: Sequence, step: Step, scores: Scores) -> None:
        self.learned += 1

    def close(self, seq: Sequence) -> None:
        self.closed += 1


def test_who_was_not_asked_does_not_learn() -> None:
    auto, part = Auto(), Counting()
    auto._parts, auto._limits = [part], [part.limit]
    seq, step = sequence(auto), Step(Tree([2]), [0], [5], [0])
    scores = Scores(Logits(torch.zeros(1, 64)))
    auto.propose(seq, WIDE)
    for _ in range(3):
        auto.observe(seq, step, scores)
    auto.close(seq)
    assert (part.asked, part.learned, part.closed) == (1, 1, 1)


@pytest.fixture
def traced(tmp_path: Path, toy: Model) -> Iterator[Path]:
    path = tmp_path / "trace.jsonl"
    toy.generate([[1, 2, 3, 1, 2], [5]], max_tokens=20, trace=path)
    toy.generate([1, 2], method="ngram", max_tokens=4, trace=tmp_path / "fixed.jsonl")
    yield path


def test_decisions_are_in_the_trace(traced: Path, toy: Model) -> None:
    passes = [record for request in read(traced).requests for record in request.passes]
    assert all(record.decision is not None for record in passes)
    for record in passes:
        assert record.decision is not None and record.step.tree.decision == record.decision
        assert record.decision.kept == len(record.tokens) - 1 <= record.decision.drafted
    shown = describe(read(traced))["requests"][0]["passes"][0]
    assert "tokens expected" in shown["decision"]
    old = read(traced.with_name("fixed.jsonl")).requests[0].passes
    assert all(record.decision is None for record in old)
    assert describe(read(traced.with_name("fixed.jsonl")))["requests"][0]["passes"][0]["decision"] == ""


# Passes that begin ahead


def test_what_a_pass_that_begins_ahead_saves() -> None:
    meter = Timing(Costs(((1, 2.0), (8, 4.0))))
    assert meter.exposed(2.0, 1) == pytest.approx(0.1)  # a guess, before any was seen
    for ahead, spent in ((False, 3.0), (True, 2.4)) * 9:
        meter.start(PassTimer(0, 0, 1, ahead), 1, 0)
        meter.read(PassReport({"score": spent}, 1, 1))
    assert meter.pass_cost(1, 0)(0) == pytest.approx(3.0) and meter.exposed(3.0, 1) == pytest.approx(0.6)


def test_guesses_that_are_worth_less_than_what_waiting_for_them_costs_are_left_out() -> None:
    order = [RankedNode(0.5, 0, 1), RankedNode(0.2, 0, 2)]

    def taken(exposed: float, forced: tuple[float, ...] = ()) -> int:
        return PassOffer(1, lambda guesses: 1 + 0.1 * guesses, 0.01, exposed).choose(order, 0.0, forced).taken

    assert taken(0.0) == 2 and taken(0.3) == 2 and taken(0.6) == 0
    assert taken(0.6, forced=(0.5,)) == 2  # the pass is waited for in any case


@pytest.mark.parametrize("overlaps", [True, False])
def test_requests_rest_together_and_longer_where_asking_keeps_passes_from_beginning_ahead(overlaps: bool) -> None:
    policy = Controller(costs=Costs(((1, 1.0), (64, 30.0))))
    policy._timing.call_time.add(0.01)
    seqs = [sequence(policy=policy) for _ in range(4)]
    asked: list[list[int]] = [[] for _ in seqs]
    for now in range(200):
        there = seqs[: 1 + now // 5]  # they join one after the other
        for seq in there:
            seq.target = SimpleNamespace(asynchronous=overlaps)  # type: ignore[assignment]
        budgets = policy.budgets(there, len(there))
        for seq, budget, passes in zip(there, budgets, asked, strict=False):
            passes += [now] * (budget.depth > 0)
            assert policy.idle(seq) == (seq.state(policy, RequestState).pause.left > 0)
        policy.select(there, [chain(0.001) if b.depth else Tree([2]) for b in budgets], budgets, len(there))
    late = [[now for now in passes if now >= 100] for passes in asked]
    assert all(found == late[0] for found in late)
    assert {after - before for before, after in pairwise(late[0])} == {8 if overlaps else 4}
