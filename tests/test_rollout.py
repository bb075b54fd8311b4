"""Rollouts: their log-probabilities are those of a teacher-forced pass, their distribution is the target's, weights may
move."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import outpace
from outpace import registry
from outpace.api.model import Model
from outpace.api.rollouts import Rollout, merged
from outpace.core.lm import LM
from outpace.errors import UsageError
from outpace.heads import store
from outpace.models.compiled.bf16_copies import Bf16Copies
from outpace.models.compiled.cpu import CpuRunner
from outpace.models.hf.lm import TransformersLM
from outpace.models.kernels import cpu
from outpace.sampling.settings import Sampling
from outpace.testing import ByteTokenizer, ToyLM
from outpace.verify.distribution import sampled_distribution
from outpace.verify.expected import expected_distribution
from outpace.verify.plan import Subject, VerifyPlan
from tests.tiny_models import GROUPED, build

PROMPTS = [[1, 2, 3, 1, 2], list(range(20))]
LONG = [[(3 * i) % 8 for i in range(20)], [(5 * i + 1) % 8 for i in range(24)]]  # drafted for from the first pass on
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "warm": {"temperature": 1.7},
    "filtered": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {3: 1.0}},
}
METHODS: dict[str, dict[str, Any]] = {
    "mtp": {"head": "random"},
    "mtp tree": {"method": "mtp", "head": "random", "width": 2, "nodes": 6},
    "eagle3": {"method": "eagle3", "head": "random"},
    "eagle3 match": {"method": "eagle3", "head": "random", "verifier": "match"},
    "draft": {"method": "draft"},
    "recycling": {"method": "recycling"},
    "plain": {"method": "plain", "verifier": "match"},
}


def judged(rolled: Rollout, model: Model, sampling: Sampling) -> list[float]:
    """What a pass over the finished text says of its tokens, by Transformers' own processors."""
    start, text = len(rolled.prompt_tokens), rolled.prompt_tokens + rolled.tokens
    logits = model.lm.reference().native(text[:-1], len(rolled.tokens))
    distributions = [expected_distribution(row, text[: start + i], start, sampling) for i, row in enumerate(logits)]
    return [float(distribution[token].log()) for distribution, token in zip(distributions, rolled.tokens, strict=True)]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", METHODS)
def test_log_probabilities_are_those_of_a_teacher_forced_pass(
    method: str, setting: str, toy: Model, toy_draft: LM
) -> None:
    given = {**METHODS[method], **SETTINGS[setting], "max_tokens": 12}
    if method == "draft":
        given["draft"] = toy_draft
    rolled = outpace.rollout(toy, PROMPTS, 2, **given)
    assert [r.prompt for r in rolled] == [0, 0, 1, 1]
    sampling = Sampling(**{"temperature": 1.0, **SETTINGS[setting]})
    for r in rolled:
        assert r.prompt_tokens == PROMPTS[r.prompt] and len(r.tokens) == 12 and r.finish_reason == "length"
        assert r.logprobs == pytest.approx(judged(r, toy, sampling), abs=1e-9)
    assert (merged(rolled).drafted > 0) == (method != "plain")


def test_on_a_transformers_model() -> None:
    model = build("llama", **GROUPED)
    lm = outpace.wrap(model)
    for r in outpace.rollout(lm, PROMPTS, 3, head="random", temperature=1.3, max_tokens=10, seed=5):
        text = torch.tensor([r.prompt_tokens + r.tokens])
        with torch.no_grad():
            distributions = (model(input_ids=text).logits[0, -len(r.tokens) - 1 : -1] / 1.3).log_softmax(-1)
        assert torch.allclose(
            distributions[range(len(r.tokens)), r.tokens], torch.tensor(r.logprobs, dtype=torch.float64), atol=1e-9
        )
        entropies = torch.special.entr(distributions.exp()).sum(-1)
        assert torch.allclose(entropies, torch.tensor(r.entropies, dtype=torch.float64), atol=1e-9)


def test_samples_are_independent_and_repeatable(toy: Model) -> None:
    given = {"head": "random", "max_tokens": 8}
    texts = [tuple(r.tokens) for r in outpace.rollout(toy, [PROMPTS[0]] * 3, 3, **given)]
    assert len(set(texts)) == 9
    assert texts == [tuple(r.tokens) for r in outpace.rollout(toy, [PROMPTS[0]] * 3, 3, **given)]
    others = {tuple(r.tokens) for r in outpace.rollout(toy, [PROMPTS[0]] * 3, 3, seed=1, **given)}
    assert not others & set(texts)


def test_ends_texts_and_wrong_settings(toy: Model) -> None:
    lm = Model(ToyLM(vocab=257), ByteTokenizer(), stop_token_ids=[256])
    done = outpace.rollout(lm, ["ab", "cd"], 2, method="suffix", max_tokens=6, stop_token_ids=list(range(200)))
    assert {r.finish_reason for r in done} <= {"stop", "length"} and any(r.finish_reason == "stop" for r in done)
    assert all(len(r.tokens) == len(r.logprobs) == len(r.entropies) for r in done)
    certain = outpace.rollout(toy, PROMPTS, temperature=0.0, head="random", max_tokens=5)
    assert all(r.logprobs == [0.0] * 5 and r.entropies == [0.0] * 5 for r in certain)
    for prompts in ([], "text", 3):
        with pytest.raises(UsageError, match="list of prompts"):
            outpace.rollout(toy, prompts)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="not a setting of rollouts"):
        outpace.rollout(toy, PROMPTS, logprobs=3)
    with pytest.raises(UsageError, match="unknown option 'temprature'"):
        outpace.rollout(toy, PROMPTS, temprature=3)


# The distribution: guesses are drawn from the head's own, and what is kept of them is drawn from the target's.


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
@pytest.mark.parametrize(
    "options", [{}, {"width": 3, "nodes": 9}, {"ids": True}], ids=["chain", "tree", "own vocabulary"]
)
def test_residual_keeps_the_distribution_over_a_head(kind: str, options: dict[str, Any]) -> None:
    model = Model(ToyLM(layers=2, vocab=8))
    given = {"width": 1, **options}
    known = torch.tensor([0, 2, 3, 5, 6]) if given.pop("ids", False) else None
    head = store.fresh(kind, model.lm, known, own_output=True)
    subject = Subject(kind, {"method": kind, "head": head, "depth": 2, "verifier": "residual", **given})
    plan = VerifyPlan(model, LONG, samples=400, contexts=1, sampling=Sampling(temperature=1.5, top_p=0.95, seed=2))
    found = sampled_distribution(plan, subject)
    assert found.verdict == "pass", found.summary
    assert found.figures["tests"] >= 3
    drawn = outpace.rollout(model, LONG, 20, **subject.settings, temperature=1.5, max_tokens=6)
    accepted = merged(drawn).acceptance_by_depth
    assert len(accepted) == 2 and all(0.1 < share < 0.99 for share in accepted)


# Weights that move.


def test_rollouts_are_of_the_weights_as_they_are_now() -> None:
    model = build("llama", torch.float32, **GROUPED)
    lm, given = outpace.wrap(model, compile=False), {"head": "random", "max_tokens": 8}
    before = outpace.rollout(lm, PROMPTS, 2, **given)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.7)
    after = outpace.rollout(lm, PROMPTS, 2, **given)
    assert [r.tokens for r in before] != [r.tokens for r in after]
    fresh = outpace.rollout(outpace.wrap(model, compile=False), PROMPTS, 2, **given)
    assert [r.tokens for r in after] == [r.tokens for r in fresh]
    for r in after:
        with torch.no_grad():
            distributions = model(input_ids=torch.tensor([r.prompt_tokens + r.tokens])).logits[0].log_softmax(-1)
        expected = distributions[range(len(r.prompt_tokens) - 1, len(distributions) - 1), r.tokens]
        assert torch.allclose(expected, torch.tensor(r.logprobs), atol=1e-4)


def test_heads_forget_states_of_old_weights() -> None:
    """The head's own rows hold keys that it made of the target's states."""
    model = build("llama", torch.float32, **GROUPED)
    lm, drafter = outpace.wrap(model, compile=False), registry.method("mtp", head="random")
    outpace.rollout(lm, [PROMPTS[1]], method=drafter, max_tokens=4)
    assert (
        drafter._lm is not None and drafter._lm.weights.version == 0 < lm.lm.weights.version
    )  # made after the first refresh
    assert any(slot.tokens for slot in drafter._lm.slots)  # type: ignore[attr-defined]
    lm.weights_changed()
    seq = lm.sequence(outpace.Request(PROMPTS[0], method=drafter))
    seq.target = lm.lm
    drafter.open(seq)
    assert not any(slot.tokens for slot in drafter._lm.slots)  # type: ignore[attr-defined]
    assert not any(row.tokens for row in lm.lm.slots)  # type: ignore[attr-defined]


def test_copies_in_half_the_bytes_are_known_to_be_stale() -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(weight.to(torch.bfloat16))
    short, halves = nn.Sequential(*layer), Bf16Copies()
    halves.replace_linears(short)
    assert halves.bytes and not halves.stale(layer)
    with torch.no_grad():
        layer[1].weight.mul_(1.01)
    assert halves.stale(layer) and not halves.stale(layer[:1])
    layer[0].weight.data = layer[0].weight.data.clone()
    assert halves.stale(layer[:1])
    assert not Bf16Copies().stale(layer)


@pytest.mark.skipif(not cpu.available(), reason="no C++ compiler")
def test_compiled_passes_do_not_read_old_weights() -> None:
    model = build("llama", torch.float32, **GROUPED)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.to(torch.bfloat16))
    packed = TransformersLM.fitting(model)
    assert packed is not None
    runner = CpuRunner(packed)  # nothing is compiled before its first pass
    packed.runner, packed.cache = runner, runner.cache
    packed.weights.changed()
    assert runner.copies.bytes and runner.most_tokens
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.7)
    given = {"method": "recycling", "verifier": "match", "max_tokens": 8}
    moved = outpace.rollout(Model(packed), PROMPTS, **given)
    assert not runner.most_tokens
    eager = outpace.rollout(outpace.wrap(model, compile=False), PROMPTS, **given)
    assert [r.tokens for r in moved] == [r.tokens for r in eager]


# The example.


@pytest.fixture(scope="module")
def grpo() -> ModuleType:
    path = Path(__file__).parent.parent / "examples" / "grpo.py"
    spec = importlib.util.spec_from_file_location("grpo", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["grpo"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_grpo_runs(grpo: ModuleType, tmp_path: Path) -> None:
    rows = grpo.main(f"--tiny --steps 6 --prompts 2 --max-tokens 10 --plot {tmp_path}/grpo.png".split())
    assert [row["step"] for row in rows] == list(range(6))
    # The rollouts are of the weights that are trained, which move.
    assert all(row["drift"] < 1e-4 for row in rows)
    assert rows[-1]["reward"] > rows[0]["reward"]
    assert all(row["acceptance"] and row["entropy"] > 0 for row in rows)
    assert (tmp_path / "grpo.png").stat().st_size > 1000


def test_the_objective_of_grpo(grpo: ModuleType) -> None:
    gains = grpo.advantages([1.0, 0.0, 0.0, 3.0, 3.0, 3.0], 3)
    assert gains.tolist() == pytest.approx([1.1545, -0.5773, -0.5773, 0.0, 0.0, 0.0], abs=1e-3)
    answer = torch.tensor([[False, True, True]])
    old = torch.tensor([[0.0, -1.0, -2.0]])

    def loss(moved: list[float], gain: float) -> float:
        batch = grpo.Batch(torch.zeros(1, 4), answer, old, torch.tensor([gain]))
        return float(grpo.loss_of(old + torch.tensor([[9.0, *moved]]), batch, 0.2))

    assert loss([0.0, 0.0], 2.0) == pytest.approx(-4.0)
    assert loss([1.0, 0.1], 2.0) == pytest.approx(-2 * (1.2 + 1.1052), abs=1e-3)  # no more is gained beyond the clip
    assert loss([1.0, 0.1], -1.0) == pytest.approx(2.7183 + 1.1052, abs=1e-3)  # but all of it is lost


def test_counting_is_scored_up_to_the_first_wrong_number(grpo: ModuleType) -> None:
    import random

    question = grpo.counts(random.Random(0), 1)[0]
    first, last = (int(word.strip(".")) for word in question.prompt[-1]["content"].split()[2:5:2])
    whole = [*range(first, last + 1)]
    for numbers, expected in ((whole, 1.0), (whole[:2], 2 / len(whole)), ([*whole, 7], len(whole) / (len(whole) + 1))):
        said = Rollout(0, [], [1], [0.0], [0.0], ", ".join(map(str, numbers)), "stop", outpace.Stats())
        assert question.reward(said) == pytest.approx(expected)
    assert question.reward(Rollout(0, [], [1], [0.0], [0.0], "No idea", "stop", outpace.Stats())) == 0.0
