"""Training: settings, recipes, the loop, checkpoints, several processes, and that the engine sees what was learnt."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from outpace.api.load import wrap
from outpace.api.model import Model
from outpace.cli.common import app
from outpace.errors import OutpaceError, UsageError
from outpace.heads import store
from outpace.heads.base import ChainStepOutput
from outpace.train import checkpoint, log, plot, settings, validate
from outpace.train.data.batches import Batch
from outpace.train.data.records import TextRecord
from outpace.train.distributed import Distributed
from outpace.train.loop import Loop, rate
from outpace.train.recipes import exits, heads
from outpace.train.recipes.whole import DraftRecipe, LayerSkipRecipe
from outpace.train.run import prepare
from outpace.train.target import Target, module_of
from tests import toy_training
from tests.tiny_models import GROUPED, build
from tests.toy_training import PROMPT, VOCAB, run_settings

ROOT = Path(__file__).parent.parent
CASES: dict[str, dict[str, Any]] = {
    "eagle3": {"ahead": 3, "option": {"nodes": 8, "width": 2, "depth": 4}},
    "mtp": {"ahead": 3, "draft_vocab": 50, "loss": "mixed"},
    "layerskip": {"lr": 3e-3, "option": {"exit": 1}, "exit_scale": 2.0, "rotation": 1},
    "draft": {"draft": "small", "lr": 1e-2},
}


@pytest.fixture(scope="module")
def toy() -> Model:
    return wrap(toy_training.speaker(), name="toy")


@pytest.fixture(scope="module")
def said(toy: Model) -> list[list[int]]:
    """Texts that the target wrote."""
    asked = toy_training.prompts(40)
    answers = toy.generate(asked, method="plain", max_tokens=20, temperature=1.0)
    return [prompt + answer.tokens for prompt, answer in zip(asked, answers, strict=True)]


@pytest.fixture
def folder(said: list[list[int]], tmp_path: Path) -> Path:
    toy_training.write(tmp_path / "texts.jsonl", said)
    return tmp_path / "run"


@pytest.fixture(scope="module")
def tiny() -> Model:
    return wrap(build("llama", torch.float32, **GROUPED, vocab_size=VOCAB), name="tiny")


def batch_of(texts: list[list[int]]) -> Batch:
    longest = max(map(len, texts))
    tokens = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    lengths = torch.tensor([len(text) for text in texts])
    places = torch.arange(longest)
    return Batch(tokens, (places >= PROMPT) & (places < lengths[:, None]), lengths)


def small(*_: object, **__: object) -> Model:
    """An untrained draft with a larger vocabulary than the target's, as they come padded."""
    return wrap(build("llama", torch.float32, **GROUPED, vocab_size=68, num_hidden_layers=1, initializer_range=0.1))


def recorded(text: list[int], prompt: int = PROMPT) -> TextRecord:
    return TextRecord(torch.tensor(text, dtype=torch.int32), prompt)


def run(loop: Loop) -> list[log.LogPoint]:
    return list(loop.run())


# Settings


def test_a_wrong_name_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'temperature'"):
        settings.make("mtp", {"temperatur": 1})
    with pytest.raises(UsageError, match="did you mean 'eagle3'"):
        settings.make("eagle", {})
    with pytest.raises(UsageError, match="unknown setting of mtp 'rotation'"):
        settings.make("mtp", {"rotation": 4})
    with pytest.raises(UsageError, match="of layerskip, not of mtp"):
        settings.TrainingSettings(kind="mtp", rotation=4)


@pytest.mark.parametrize(
    "given", [{"steps": 0}, {"lr": "fast"}, {"steps": True}, {"clip": -1}, {"schedule": "linear"}, {"head": [1]}]
)
def test_wrong_values_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        settings.make("mtp", given)


def test_settings_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: toy\ndata: texts.jsonl\noutput: out\nlr: 3e-4\nhead: {feedforward: 16}\nbf16: false\n")
    found = settings.make("mtp", settings.read(path))
    assert (found.lr, found.data, found.head, found.bf16) == (3e-4, ("texts.jsonl",), {"feedforward": 16}, False)
    again = found.to_dict()
    assert settings.make(again.pop("kind"), again) == found
    assert "rotation" not in found.to_dict()
    path.write_text("- model")
    with pytest.raises(UsageError, match="holds no settings"):
        settings.read(path)


def test_the_documentation_runs(toy: Model, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "training" / "drafters.md").read_text()
    (listed,), (source,) = (re.findall(rf"```{kind}\n(.*?)```", text, flags=re.DOTALL) for kind in ("yaml", "python"))
    folder.with_name("run.yaml").write_text(listed)
    assert settings.make("eagle3", settings.read(folder.with_name("run.yaml"))).draft_vocab == 16000
    folder.with_name("texts.jsonl").rename(folder.with_name("data.jsonl"))
    monkeypatch.chdir(folder.parent)
    exec(source, {"lm": toy})
    assert Path("head", store.WEIGHTS).exists()


def test_every_head_can_be_trained() -> None:
    assert set(store.KINDS) <= set(settings.HEADS) <= set(settings.KINDS)


def test_the_learning_rate_warms_up_and_falls() -> None:
    given = settings.make("mtp", {"steps": 100, "warmup": 10, "lr": 1.0})
    assert [rate(given, step) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert rate(given, 55) == pytest.approx(0.55) and rate(given, 100) == pytest.approx(0.1)
    constant = dataclasses.replace(given, schedule="constant")
    assert rate(constant, 5) < rate(constant, 10) == rate(constant, 99) == 1


# What is trained


def test_the_draft_vocabulary_is_that_of_the_answers() -> None:
    records = [recorded([9, 9, 9, 5, 7, 7], 3), recorded([9, 2, 7, 5], 1)]
    assert heads.frequent(records, 2, 10).tolist() == [5, 7]
    assert heads.frequent(records, 5, 10).tolist() == [0, 1, 2, 5, 7]  # 9 is only asked, never answered
    with pytest.raises(UsageError, match="larger than the target's"):
        heads.frequent(records, 11, 10)


@pytest.mark.parametrize("draft_vocab", [0, 20])
def test_a_head_that_knows_the_target_loses_nothing(
    draft_vocab: int, toy: Model, said: list[list[int]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guesses meet the distribution of the right place: texts of several lengths, every step, all and some of the
    tokens."""
    texts = [said[0], said[1][:15], said[2][:9]]
    records = [recorded(text) for text in said]
    recipe = heads.HeadRecipe(run_settings("mtp", folder, ahead=3, draft_vocab=draft_vocab), toy, records)
    batch = batch_of(texts)
    logits = recipe.target.forward(batch.tokens).logits
    ids = torch.arange(VOCAB) if recipe.head.ids is None else recipe.head.ids
    anchors = torch.tensor([[2, 5, 7, 13, 20, 22]]).expand(3, -1)  # columns, as a head of blocks has them

    def knowing(tokens: Tensor, hidden: Tensor, steps: int, starts: Tensor) -> list[ChainStepOutput]:
        assert hidden.shape == (3, len(texts[0]), 32)
        ats = [anchors + 1 + step for step in range(steps)]
        rows = torch.arange(3)[:, None]
        return [
            ChainStepOutput(
                logits[rows, at.clamp(max=logits.shape[1] - 1)][..., ids].requires_grad_(), at, nn.Identity()
            )
            for at in ats
        ]

    monkeypatch.setattr(recipe.head, "unroll", knowing)
    lost = recipe.loss(batch, 0, 1)
    assert lost.loss.item() == pytest.approx(0, abs=1e-5)
    assert lost.acceptance.tolist() == pytest.approx([1, 1, 1], abs=1e-5)
    lost.loss.backward()


def test_only_answers_count(toy: Model, said: list[list[int]], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first chain guesses the first token of the answer; none guesses beyond the end of its text."""
    recipe = heads.HeadRecipe(run_settings("mtp", folder, ahead=2), toy, [])
    seen: list[Any] = []
    monkeypatch.setattr(recipe, "measure", lambda steps: seen.extend(steps))
    recipe.loss(batch_of([said[0][:10], said[1][:7]]), 0, 1)
    first, second = (step.at[step.counts].tolist() for step in seen)  # behind which tokens of the two texts
    assert first == [*range(3, 9), *range(10 + 3, 10 + 6)]
    assert second == [*range(4, 9), *range(10 + 4, 10 + 6)]
    assert {len(step.draft) for step in seen} == {len(first)}  # no distribution of a chain that never counts


def test_mtp_starts_from_the_last_layer(tiny: Model, folder: Path) -> None:
    recipe = heads.HeadRecipe(run_settings("mtp", folder), tiny, [])
    ours, theirs = recipe.head.model.layers[0], module_of(tiny.lm).model.layers[-1]
    assert torch.equal(ours.mlp.up_proj.weight, theirs.mlp.up_proj.weight)
    assert ours.mlp.up_proj.weight is not theirs.mlp.up_proj.weight
    narrow = heads.HeadRecipe(run_settings("mtp", folder, head={"feedforward": 16}), tiny, [])
    assert narrow.head.model.layers[0].mlp.up_proj.weight.shape == (16, 32)
    fresh = heads.HeadRecipe(run_settings("mtp", folder, inherit=False), tiny, [])
    assert not torch.equal(fresh.head.model.layers[0].mlp.up_proj.weight, theirs.mlp.up_proj.weight)


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "block"])
def test_a_head_that_gets_layers_and_tokens_guesses_as_before(kind: str, tiny: Model, folder: Path) -> None:
    small = store.fresh(kind, tiny.lm, torch.arange(0, tiny.lm.vocab, 2), layers=1)
    store.save(small, folder / "small", tiny.lm)
    given = run_settings(kind, folder, start=str(folder / "small"), layers=3, draft_vocab=tiny.lm.vocab)
    recipe = heads.HeadRecipe(given, tiny, [])
    assert recipe.head.spec.layers == 3 and recipe.head.ids is None and recipe.head.spec.draft_vocab == 0
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    hidden = Target(tiny.lm).forward(tokens, small.spec.taps).hidden
    assert hidden is not None and small.ids is not None
    for old, new in zip(small.unroll(tokens, hidden, 2), recipe.head.unroll(tokens, hidden, 2), strict=True):
        torch.testing.assert_close(new.logits[..., small.ids], old.logits, atol=1e-2, rtol=1e-2)  # saved in float16
    recipe.loss(batch_of([[1, 2, 3, 4, 5, 6]]), 0, 1).loss.backward()
    ends = [p for name, p in recipe.head.named_parameters() if "layers.2" in name and "down_proj" in name]
    assert ends and all(p.grad is not None and p.grad.abs().sum() > 0 for p in ends)


@pytest.mark.parametrize(
    "kind, changes",
    [("medusa", {"linked": 16, "taps": [1, 2], "steps": 5}), ("block", {"linked": 16}), ("mtp", {"taps": [0, 2]})],
)
def test_a_head_that_gets_links_and_states_guesses_as_before(
    kind: str, changes: dict[str, Any], tiny: Model, folder: Path
) -> None:
    stack = tiny.lm.layers.count
    changes = {**changes, **({"taps": [0, stack]} if "taps" in changes else {})}
    small = store.fresh(kind, tiny.lm)
    store.save(small, folder / "small", tiny.lm)
    recipe = heads.HeadRecipe(run_settings(kind, folder, start=str(folder / "small"), head=changes), tiny, [])
    head, tokens = recipe.head, torch.tensor([[1, 2, 3, 4, 5]])
    assert head.spec.linked == changes.get("linked", 0) and list(head.spec.taps) == changes.get(
        "taps", list(small.spec.taps)
    )
    target = Target(tiny.lm)
    before, now = (h.unroll(tokens, target.forward(tokens, h.spec.taps).hidden, 2) for h in (small, head))
    for old, new in zip(before, now, strict=True):
        torch.testing.assert_close(new.logits, old.logits, atol=1e-2, rtol=1e-2)  # saved in float16
    recipe.loss(batch_of([[1, 2, 3, 4, 5, 6]]), 0, 1).loss.backward()
    ends = [
        p
        for name, p in head.named_parameters()
        if name.endswith(("leave.weight", "fuse_taps.fc.weight", "fuse.fc.weight"))
    ]
    assert ends and all(p.grad is not None and p.grad.abs().sum() > 0 for p in ends)


def test_what_a_head_that_is_there_becomes(tiny: Model) -> None:
    deep = store.fresh("mtp", tiny.lm, layers=2)
    shallow = store.extended(deep, tiny.lm, None, layers=1)
    assert shallow.spec.layers == 1 and set(shallow.own_tensors()) < set(deep.own_tensors())
    assert torch.equal(
        shallow.own_tensors()["model.layers.0.mlp.up_proj.weight"],
        deep.own_tensors()["model.layers.0.mlp.up_proj.weight"],
    )
    with pytest.raises(UsageError, match="no layers to add"):
        store.extended(store.fresh("medusa", tiny.lm), tiny.lm, None, layers=2)
    with pytest.raises(UsageError, match=r"trained without taps=\[0, 1\] and cannot continue with it: fc.weight"):
        store.extended(store.fresh("block", tiny.lm), tiny.lm, None, taps=[0, 1])
    for taps in ([99], [], 3, ["a"]):
        with pytest.raises(UsageError, match="a list of hidden states from 0 to"):
            store.fresh("mtp", tiny.lm, taps=taps)
    for given in ({"linked": "x"}, {"linked": -5}, {"steps": 0}, {"layers": True}):
        with pytest.raises(UsageError, match="of a head must be an integer of at least"):
            store.fresh("medusa", tiny.lm, **given)
    with pytest.raises(UsageError, match="output matrix of its own"):
        store.extended(store.fresh("mtp", tiny.lm, own_output=True), tiny.lm, torch.arange(4))
    own = store.fresh("mtp", tiny.lm, torch.arange(4), own_output=True)
    with pytest.raises(UsageError, match="output matrix of its own"):  # as many tokens, but others
        store.extended(own, tiny.lm, torch.arange(4, 8))
    assert store.extended(own, tiny.lm, torch.arange(4), layers=2).spec.layers == 2


@pytest.mark.parametrize(
    "device, dtype, asked, wanted",
    [
        ("cpu", torch.float32, None, False),
        ("cpu", torch.float32, True, True),
        ("cpu", torch.bfloat16, None, True),
        ("cuda", torch.float32, None, True),
        ("cuda", torch.float32, False, False),
    ],
)
def test_where_bfloat16_is_computed_in(device: str, dtype: torch.dtype, asked: bool | None, wanted: bool) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    with heads.autocast(torch.device(device), dtype, asked):
        assert torch.is_autocast_enabled(device) == wanted


def test_a_target_in_16_bits_is_not_computed_with_in_32() -> None:
    with pytest.raises(UsageError, match="leave bf16 on"):
        heads.autocast(torch.device("cpu"), torch.bfloat16, False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", CASES)
def test_weights_are_kept_in_float32(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.train.recipes.whole.load", lambda *_, **__: wrap(module_of(small().lm).cuda()))
    half = wrap(toy_training.speaker().to("cuda", torch.bfloat16), name="half")
    loop = prepare(run_settings(kind, folder, validation=2, steps=8, **CASES[kind]), half)
    assert {parameter.dtype for parameter in loop.parameters} == {torch.float32}
    points = run(loop)
    assert points[-1].loss is not None and points[1].loss is not None and points[-1].loss < points[1].loss


def test_a_head_that_was_unrolled_can_still_draft(tiny: Model, folder: Path) -> None:
    head = heads.HeadRecipe(run_settings("mtp", folder), tiny, []).head
    head.unroll(torch.zeros(1, 5, dtype=torch.long), torch.zeros(1, 5, 32), 2)
    plain = tiny.generate([1, 2, 3], method="plain", max_tokens=8)
    assert tiny.generate([1, 2, 3], method="mtp", head=head, max_tokens=8).tokens == plain.tokens


# LayerSkip


def test_layers_are_dropped_more_the_later_they_come() -> None:
    chances = exits.probs(5, 0.2)
    assert chances[0] == 0 and chances[-1] == pytest.approx(0.2) and (chances.diff() > 0).all()
    assert [exits.ramped(step, 11) for step in (0, 10)] == pytest.approx([0, 1])


def test_exits_take_turns() -> None:
    assert exits.rotational(0, 6, 3) == [0, 3, 5] and exits.rotational(4, 6, 3) == [1, 4, 5]
    assert exits.gradual(0, 4, 80) == [3] and exits.gradual(10, 4, 80) == [2, 3]
    assert exits.gradual(30, 4, 80) == exits.gradual(79, 4, 80) == [0, 1, 2, 3]
    weights = exits.weights([0, 2, 5], 6, 0.5)
    assert sum(weights.values()) == pytest.approx(1)
    assert weights[2] / weights[5] == pytest.approx(0.5 * 3 / (5 + 0.5 * 10))
    assert exits.weights([5], 6, 0) == {5: 1}


def test_a_single_exit_is_trained_beside_the_last_layer(toy: Model, folder: Path) -> None:
    given = dict(curriculum="single", exit_scale=3.0, option={"exit": 2})
    recipe = LayerSkipRecipe(run_settings("layerskip", folder, **given), toy, [])
    assert recipe.weights(5, 10) == {1: 0.75, recipe.layer_count - 1: 0.25}


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2"])
def test_exits_say_what_the_first_layers_say(kind: str) -> None:
    shape = {"llama": GROUPED, "gemma3_text": GROUPED | {"sliding_window": 8}, "gpt2": {"n_embd": 32, "n_layer": 3}}
    model = build(kind, torch.float32, **shape[kind], vocab_size=VOCAB)
    lm, tokens = wrap(model).lm, torch.arange(12).view(2, 6)
    exit_ = exits.Exits(model)
    left = exit_.run(tokens, torch.zeros(3, 2, dtype=torch.bool))
    for layers in (1, 2, 3):
        logits = exit_.logits(left[layers - 1].flatten(0, 1)).view(2, 6, -1)
        part = lm.layers.slice(range(layers), compile=False)
        expected = torch.stack([part.reference().native(text, 6) for text in tokens.tolist()])
        assert torch.allclose(logits, expected, atol=1e-4)
    dropped = torch.tensor([[False, False], [True, False], [False, False]])
    left = exit_.run(tokens, dropped)
    without = lm.layers.slice([0, 2], compile=False).reference().native(tokens[0].tolist(), 6)
    whole = lm.reference().native(tokens[1].tolist(), 6)
    assert torch.allclose(exit_.logits(left[-1][0]), without, atol=1e-4)
    assert torch.allclose(exit_.logits(left[-1][1]), whole, atol=1e-4)
    assert not any(layer._forward_hooks for layer in exit_.layers)


# The loop


@pytest.mark.parametrize("kind", CASES)
def test_what_is_learnt_the_engine_sees(kind: str, toy: Model, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss falls, acceptance rises, the target stays as it is, and what was saved gives the target's own text."""
    monkeypatch.setattr("outpace.train.recipes.whole.load", small)
    model = module_of(toy.lm)
    before = copy.deepcopy(model.state_dict())
    given = {"steps": 40, "validation": 4, "validate_every": 20, "validation_tokens": 20, **CASES[kind]}
    points = run(prepare(run_settings(kind, folder, **given), toy))
    assert points[-1].loss is not None and points[1].loss is not None and points[-1].loss < 0.7 * points[1].loss
    measured = [point.measured for point in points if point.measured is not None]
    assert len(measured) == 3
    assert measured[-1].acceptance > measured[0].acceptance + 0.05
    assert measured[-1].tokens_per_pass > measured[0].tokens_per_pass + 0.5
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert log.read(folder) == points
    served, method = served_from(kind, toy, folder)
    prompt = toy_training.prompts(50)[-1]
    plain = served.generate(prompt, method="plain", max_tokens=20)
    assert served.generate(prompt, max_tokens=20, **method).tokens == plain.tokens


def served_from(kind: str, toy: Model, folder: Path) -> tuple[Model, dict[str, Any]]:
    """As a user loads it."""
    from transformers import AutoModelForCausalLM

    if kind in store.KINDS:
        return toy, {"method": kind, "head": str(folder)}
    saved = wrap(AutoModelForCausalLM.from_pretrained(folder))
    return (toy, {"method": "draft", "draft": saved}) if kind == "draft" else (saved, {"method": kind, "exit": 1})


@pytest.mark.parametrize("kind", ["mtp", "layerskip"])
def test_a_run_goes_on_as_if_it_had_not_stopped(kind: str, toy: Model, folder: Path) -> None:
    """Bit for bit: losses and weights, over the end of an epoch, with layers that are dropped at random."""
    given = {"steps": 7, "save_every": 3, "accumulate": 2, "batch": 256, "dropout": 0.5}
    given = {name: value for name, value in given.items() if name in settings.fields_of(kind)}
    whole = prepare(run_settings(kind, folder.with_name("whole"), **given), toy)
    expected = run(whole)
    broken = prepare(run_settings(kind, folder, **given), toy).run()
    first = [next(broken) for _ in range(5)]  # the fourth step comes after the checkpoint, and is done again
    broken.close()
    loop = prepare(run_settings(kind, folder, **given), toy, resume=True)
    assert loop.reached.step == 3
    rest = run(loop)
    assert [p.loss for p in first[:4] + rest] == [p.loss for p in expected]
    assert [p.acceptance for p in rest] == [p.acceptance for p in expected[4:]]
    assert [p.step for p in log.read(folder)] == list(range(8))
    assert loop.reached == whole.reached and loop.reached.epoch > 0
    theirs = whole.recipe.state()
    assert all(torch.equal(value, theirs[name]) for name, value in loop.recipe.state().items())


def test_another_run_is_not_taken_up(toy: Model, folder: Path) -> None:
    run(prepare(run_settings("mtp", folder, steps=1), toy))
    with pytest.raises(UsageError, match=r"where ahead was 0, seed was 0"):
        prepare(run_settings("mtp", folder, steps=1, seed=1, ahead=2), toy, resume=True)
    with pytest.raises(UsageError, match="already holds a run"):
        prepare(run_settings("mtp", folder), toy)
    longer = prepare(run_settings("mtp", folder, steps=2), toy, resume=True)
    assert [point.step for point in run(longer)] == [2]
    with pytest.raises(UsageError, match="holds no training run"):
        prepare(run_settings("mtp", folder.parent), toy)
    with pytest.raises(UsageError, match="no checkpoint"):
        prepare(run_settings("mtp", folder.with_name("nowhere")), toy, resume=True)


def test_ctrl_c_ends_the_step_and_leaves_a_checkpoint(toy: Model, folder: Path) -> None:
    loop = prepare(run_settings("mtp", folder, steps=9), toy)
    points, handler = loop.run(), signal.getsignal(signal.SIGINT)
    assert [next(points).step, next(points).step] == [0, 1]
    signal.raise_signal(signal.SIGINT)
    assert next(points).step == 2
    with pytest.raises(KeyboardInterrupt):
        next(points)
    assert checkpoint.read(folder).reached.step == 2
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_checkpoint_is_whole_or_not_there(toy: Model, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(prepare(run_settings("mtp", folder, steps=1), toy))
    found, files = checkpoint.read(folder), set(folder.iterdir())

    def full(_: Any, file: Any) -> None:
        file.write(b"half of it")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="no space"):
        found.write(folder)
    assert checkpoint.read(folder).reached == found.reached and set(folder.iterdir()) == files
    (folder / checkpoint.FILE).write_bytes(b"half of it")
    with pytest.raises(OutpaceError, match="no checkpoint that can be resumed"):
        checkpoint.read(folder)


def test_accumulated_batches_are_one_large_batch(toy: Model, folder: Path) -> None:
    """All texts, which are as long as each other, make one batch, or two."""
    found = []
    for name, batch, accumulate in (("large", 960, 1), ("small", 480, 2)):
        given = {"batch": batch, "accumulate": accumulate, "steps": 1}
        found.append(run(prepare(run_settings("mtp", folder.with_name(name), **given), toy))[1])
    large, small = found
    assert large.tokens == small.tokens == 40 * 20
    assert [large.loss, large.norm, *large.acceptance] == pytest.approx(
        [small.loss, small.norm, *small.acceptance], rel=1e-5
    )


def test_two_processes_do_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun would start them; this process is the first."""
    alone = toy_training.shared_run(tmp_path, Distributed())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    given = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-m", "tests.toy_training", str(tmp_path)]
    other = subprocess.Popen(command, cwd=ROOT, env=os.environ | given | {"RANK": "1", "LOCAL_RANK": "1"})
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("outpace.train.distributed.PATIENCE", timedelta(seconds=90))
    world = Distributed.join("cpu")
    try:
        together = toy_training.shared_run(tmp_path, world)
        assert other.wait(60) == 0
    finally:
        world.leave()
        other.kill()
    ours, theirs = together.recipe.state(), torch.load(tmp_path / "rank1.pt")
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    expected = alone.recipe.state()
    assert all(torch.allclose(value, expected[name], atol=1e-9) for name, value in ours.items())
    one, two = log.read(tmp_path / "of1"), log.read(tmp_path / "of2")
    assert [p.loss for p in two[1:]] == pytest.approx([p.loss for p in one[1:]], rel=1e-9)


def test_a_process_without_a_row_computes_for_nothing(said: list[list[int]]) -> None:
    batch = batch_of([said[0], said[1][:9], said[2]])
    parts = [Distributed(rank, 4).share(batch) for rank in range(4)]
    assert [len(part.tokens) for part, _ in parts] == [1, 1, 1, 1]
    assert [count for _, count in parts] == [20, 5, 20, 0]
    assert Distributed(1, 2).share(batch)[0].tokens.tolist() == batch.tokens[1:2].tolist()


def scripted(monkeypatch: pytest.MonkeyPatch, values: list[float]) -> None:
    """Let the engine measure these tokens per pass."""
    given = iter(values)
    monkeypatch.setattr("outpace.train.loop.measure", lambda *_: validate.ValidationFigures(next(given), 0.5, [0.5]))


def test_early_stop_keeps_the_best(toy: Model, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [1.0, 1.5, 1.4, 1.45, 9.0])
    loop = prepare(run_settings("mtp", folder, steps=9, validation=2, validate_every=1, patience=2), toy)
    points = run(loop)
    assert points[-1].step == 3 and loop.reached.best == 1.5
    assert json.loads((folder / store.CONFIG).read_text())["notes"]["steps"] == 1


def test_a_gradient_that_is_not_finite_stops_the_run(toy: Model, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = prepare(run_settings("mtp", folder), toy)
    before = loop.recipe.state()
    measure = loop.recipe.measure  # type: ignore[attr-defined]
    monkeypatch.setattr(
        loop.recipe, "measure", lambda steps: measure(steps)._replace(loss=measure(steps).loss * torch.inf)
    )
    with pytest.raises(OutpaceError, match="not finite"):
        run(loop)
    assert all(torch.equal(value, before[name]) for name, value in loop.recipe.state().items())


def test_no_prompt_is_both_trained_on_and_held_out() -> None:
    records = [recorded([i % 5, 1, i], 2) for i in range(20)]
    found = validate.split(records, 2, seed=0)
    assert len(found.held_out) == 2 and len(found.records) == 12
    assert not {tuple(r.tokens[:2].tolist()) for r in found.records} & set(map(tuple, found.held_out))
    with pytest.raises(UsageError, match="too few to hold out 5"):
        validate.split(records, 5, seed=0)


# Models that are trained whole


def test_what_a_draft_can_be(tiny: Model, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [recorded(list(range(20)))]
    pruned = DraftRecipe(run_settings("draft", folder, remove=1), tiny, records)
    assert len(pruned.trained.model.layers) == 2 and pruned.trained.config.num_hidden_layers == 2
    monkeypatch.setattr("outpace.train.recipes.whole.load", small)
    other = DraftRecipe(run_settings("draft", folder, draft="small"), tiny, records)
    lost = other.loss(batch_of([list(range(20))]), 0, 1)  # the distributions meet on the tokens that both have
    lost.loss.backward()
    assert lost.loss.isfinite() and other.trained.vocab_size == 68
    for wrong in ({}, {"remove": 1, "keep": "0"}, {"remove": 3}, {"keep": "7"}):
        with pytest.raises(UsageError):
            DraftRecipe(run_settings("draft", folder, **wrong), tiny, records)


@pytest.mark.parametrize("option", [{"exit": 3}, {"exit": "auto"}, {"skip": 1}])
def test_layerskip_is_trained_for_one_exit(option: dict[str, Any], tiny: Model, folder: Path) -> None:
    with pytest.raises(UsageError, match="one exit"):
        LayerSkipRecipe(run_settings("layerskip", folder, option=option), tiny, [])


# The command line


@pytest.fixture
def command(toy: Model, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr("outpace.cli.training.train.load_model", lambda name, how: toy)
    return lambda *given: CliRunner().invoke(app, ["train", *map(str, given)])


def test_the_command_trains_and_goes_on(command: Callable[..., Any], folder: Path) -> None:
    config = folder.with_name("run.yaml")
    config.write_text(f"data: [{folder.parent / 'texts.jsonl'}]\noutput: {folder}\nsteps: 9\nvalidation: 0\n")
    done = command("mtp", "toy", "--config", config, "--steps", 2, "--head", "feedforward=16", "--ahead", 2)
    assert done.exit_code == 0, done.output
    assert f"--method mtp -o head={folder}" in done.output
    assert (folder / plot.FILE).read_text().startswith("<?xml")
    assert json.loads((folder / store.CONFIG).read_text())["spec"]["feedforward"] == 16
    again = command("mtp", "--output", folder, "--resume", "--steps", 3, "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["steps"] == 3
    assert len(log.read(folder)) == 4


def test_the_command_refuses(command: Callable[..., Any], folder: Path) -> None:
    folder.with_name("run.yaml").write_text("stesp: 9\n")
    for given, told in (
        (["mtp", "toy"], "a training run needs data"),
        (["mtp", "toy", "--config", folder.with_name("run.yaml")], "did you mean 'steps'"),
        (["mtp", "--resume"], "--resume needs --output"),
        (["mtp", "toy", "--data", folder.parent / "texts.jsonl", "--output", folder, "--loss", "lk"], "unknown loss"),
    ):
        refused = command(*given)
        assert refused.exit_code == 2 and told in refused.output, refused.output
    assert "rotation" not in command("mtp", "--help").output
    assert "--rotation" in command("layerskip", "--help").output
