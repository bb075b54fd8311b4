"""`outpace advise`: a replay is the run it stands for, and a prediction is its costs added up."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from outpace.advise import advice, overhead as costing
from outpace.advise.overhead import MeasuredPasses
from outpace.advise.rank import (
    MethodChoice,
    PassShape,
    Prediction,
    ReplayResult,
    ReplayWork,
    best,
    candidates,
    predict,
    replay,
)
from outpace.advise.recording import Recording, record
from outpace.advise.replay import ReplayLM
from outpace.api.model import Model
from outpace.bench.summary import Interval
from outpace.core.stats import Stats
from outpace.errors import UsageError
from outpace.registry import method
from outpace.sampling.settings import Sampling
from outpace.testing import ToyLM

PROMPTS = [[1, 2, 3, 1, 2], [5], [9, 8, 7, 6] * 5, list(range(20)), [4, 4, 4], [30, 31]]
WARM = Sampling(temperature=0.8, top_p=0.9, seed=4)


@pytest.fixture(scope="module")
def draft() -> Model:
    return Model(ToyLM(layers=1))


def nothing() -> None:
    pass


def counted(stats: Stats) -> tuple[Any, ...]:
    return stats.passes, stats.tokens, stats.drafted, stats.accepted, stats.offered, stats.matched


@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["plain", "ngram", "suffix", "draft"])
def test_a_replay_is_the_run_itself(name: str, sampling: Sampling, toy: Model, draft: Model) -> None:
    """For drafters that learn from tokens alone, pass by pass."""
    recordings = record(toy, PROMPTS, 24, sampling, nothing)
    wanted = candidates([name], ["small"])
    for candidate in wanted:
        found = replay(toy, recordings, candidate, {"small": draft}, sampling)
        options = {"draft": draft.lm} if name == "draft" else {}
        drafter, live = method(name, **options), Stats()
        for prompt in PROMPTS:
            done = toy.generate(prompt, method=drafter, policy=candidate.policy, max_tokens=24, **vars(sampling))
            live = live.merge(done.stats)
        assert counted(found.stats) == counted(live)


@pytest.mark.parametrize("name", ["recycling", "lookahead"])
def test_a_drafter_that_learns_from_rejected_nodes_is_replayed_nearly(name: str, toy: Model) -> None:
    recordings = record(toy, PROMPTS, 24, Sampling(), nothing)
    found = replay(toy, recordings, MethodChoice(name), {}, Sampling())
    drafter, passes = method(name), 0
    for prompt in PROMPTS:
        passes += toy.generate(prompt, method=drafter, max_tokens=24).stats.passes
    assert found.stats.tokens == 24 * len(PROMPTS)
    assert found.stats.passes == pytest.approx(passes, rel=0.25)


def test_a_recording_holds_what_was_likely(toy: Model) -> None:
    (found,) = record(toy, PROMPTS[:1], 6, Sampling(), nothing)
    assert found.answer == toy.generate(PROMPTS[0], method="plain", max_tokens=6).tokens
    assert [found.likely[i,][0] for i in range(6)] == found.answer  # greedy takes the likeliest
    beside = {place: likely for place, likely in found.likely.items() if len(place) > 1}
    for (position, *tail), likely in beside.items():
        logits = toy.lm.reference().precise(found.prompt + found.answer[:position] + tail, 1)[0]
        assert logits.topk(16).indices.tolist() == likely
    assert beside


def test_a_method_that_reads_hidden_states_says_so(toy: Model) -> None:
    class Reads(type(method("ngram"))):  # type: ignore[misc]
        taps = (-1,)

    recordings = record(toy, PROMPTS[:1], 6, Sampling(), nothing)
    lm = ReplayLM(toy.lm, recordings)
    lm.recording = recordings[0]
    target = Model(lm)
    with pytest.raises(UsageError, match="hidden states cannot be replayed"):
        target.generate(PROMPTS[0], method=Reads(), max_tokens=4)


def even(*pairs: tuple[int, float], prompt: float = 0.0) -> MeasuredPasses:
    return MeasuredPasses(
        {rows: [spent] for rows, spent in pairs}, {rows: [2 * spent] for rows, spent in pairs}, [prompt]
    )


def test_a_prediction_is_its_costs_added_up() -> None:
    recordings = [Recording([1] * 10, [2] * 8)] * 3
    work = [ReplayWork(Counter({PassShape(1, True): 1, PassShape(3, True): 2, PassShape(3, False): 1}), draft=0.5)] * 3
    found = predict(ReplayResult(MethodChoice("x"), work, Stats()), recordings, even((1, 1.0), (5, 3.0), prompt=0.1))
    plain = 10 * 0.1 + 8 * 1.0
    mine = 10 * 0.1 + 0.5 + 1.0 + 2 * 2.0 + 2 * 2.0  # three rows lie half way between one and five
    assert found.speedup.value == pytest.approx(plain / mine)
    assert found.speedup.low == found.speedup.high == pytest.approx(plain / mine)  # nothing varies
    assert found.draft_share == pytest.approx(3 * 0.5 / (3 * mine))
    assert found.nodes_per_pass == pytest.approx(10 / 4)


def test_an_interval_holds_what_varies() -> None:
    recordings = [Recording([1], [2] * n) for n in (4, 8, 12, 16)]
    work = [ReplayWork(Counter({PassShape(2, True): n}), 0.0) for n in (4, 2, 6, 4)]
    costs = MeasuredPasses({1: [1.0, 1.1, 0.9], 2: [1.2, 1.3, 1.1]}, {1: [1.0], 2: [1.2]}, [0.0])
    found = predict(ReplayResult(MethodChoice("x"), work, Stats()), recordings, costs).speedup
    assert found.low is not None and found.high is not None and found.low < found.value < found.high


def test_every_method_is_tried_with_smaller_budgets() -> None:
    found = candidates(["ngram", "recycling:nodes=10", "draft"], ["a", "b"])
    names = [candidate.name for candidate in found]
    assert {
        "ngram",
        "ngram, depth=1",
        "ngram, depth=8",
        "recycling:nodes=10, nodes=4",
        "draft, a",
        "draft, b, depth=2",
    } <= set(names)
    assert "ngram, depth=16" not in names and "recycling:nodes=10, nodes=16" not in names
    assert len(set(names)) == len(names)
    assert candidates(["draft"], []) == []


def test_the_best_of_each_method_are_measured() -> None:
    def one(name: str, policy: str, value: float, rows: float = 2.0) -> Prediction:
        return Prediction(MethodChoice(name, policy), Interval(value), 1.0, 0.0, rows)

    found = [
        one("a", "fixed", 1.4),
        one("a", "fixed:depth=2", 1.5),
        one("b", "fixed", 1.1),
        one("c", "fixed", 1.0, 1.0),
    ]
    chosen = [(p.candidate.method, p.candidate.policy) for p in best(found, 3)]
    assert chosen == [("a", "fixed:depth=2"), ("b", "fixed")]  # c never guessed


def test_costs_are_measured_for_every_size(toy: Model) -> None:
    calls = []
    found = costing.measure(toy, 8, 6, lambda: calls.append(1))
    assert len(calls) == costing.steps(6, trees=True)
    assert set(found.chain) == set(found.tree) == {1, 2, 3, 4, 6}
    assert all(len(samples) == costing.ROUNDS * costing.PASSES for samples in found.chain.values())
    assert all(spent > 0 for samples in found.chain.values() for spent in samples)


def test_advice_from_end_to_end(toy: Model, draft: Model) -> None:
    question = advice.AdviceQuestion(toy, {"small": draft}, PROMPTS, 12)
    begun: dict[str, int] = {}

    def step(name: str, parts: int) -> Any:
        begun[name] = parts

        def done() -> None:
            begun[name] -= 1

        return done

    found = advice.advise(question, candidates(["ngram", "draft"], ["small"]), 2, 1, step)
    assert {o.prediction.candidate.method for o in found.outcomes} == {"ngram", "draft"}
    assert len(begun) == 4 and not any(begun.values())  # every bar reached its end
    assert found.to_dict()["recorded"] == found.to_dict()["held_out"] == 3
    assert question.recorded == PROMPTS[::2] and question.held_out == PROMPTS[1::2]


def test_too_few_prompts(toy: Model) -> None:
    with pytest.raises(UsageError, match="at least 4 prompts"):
        advice.AdviceQuestion(toy, {}, PROMPTS[:3])
