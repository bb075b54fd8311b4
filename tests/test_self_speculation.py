"""Drafts from the target's own layers: early exits that are resumed, layers that are left out, checkpoints of them."""

from __future__ import annotations

import json
import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import outpace
from outpace import registry
from outpace.advise.rank import MethodChoice, replay
from outpace.advise.recording import record
from outpace.api.model import Model
from outpace.api.request import Request
from outpace.cli.common import app
from outpace.core.tree import Tree
from outpace.drafting.layer_search import LayerProbe, ProbeText, agreement, gain, parse, spell, tokens_per_pass, without
from outpace.errors import UnsupportedModel, UsageError
from outpace.models.adapt import adapt
from outpace.models.cacheless import CachelessLM
from outpace.models.early_exit import EarlyExitLM
from outpace.models.hf import checkpoint
from outpace.models.hf.cache import SlotCache
from outpace.models.hf.lm import TransformersLM
from outpace.models.hf.snapshot import SnapshotLM
from outpace.models.segment import PartialPass, Segment
from outpace.sampling.settings import Sampling
from outpace.testing import ToyLM
from tests.test_models import PROMPTS, assert_same, only_layers, text, tiny, tokens, transformers_logits, wrapped
from tests.tiny_models import NATIVE, PACKED, build

SHAPES = [{"depth": 4}, {"depth": 3, "width": 3, "nodes": 40}]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Exits


@pytest.mark.parametrize("name", PACKED)
def test_a_pass_goes_on_from_what_was_begun(name: str):
    """A tree that is drafted in part, in another order, with pending tokens: the logits are those of Transformers."""
    model, lm = tiny(name), adapt(tiny(name))
    early = lm.layers.early_exit(2)
    assert isinstance(early, EarlyExitLM)
    small, prompts = only_layers(model, [0, 1]), [text(30, 1), text(9, 2)]
    rows = [lm.acquire(prompt) for prompt in prompts]
    early.feed(prompts, rows)
    drafted = [Tree([7, 8, 9], [-1, 0, 0]), Tree.chain([7, 8])]
    first = early.score(drafted, rows)
    drafted[0].add(1, 10)
    drafted[0].add(2, 12)
    later = early.score(drafted, rows, since=[3, 2])
    seen = torch.cat([first[0].logits.all(), later[0].logits.all()])
    for node in range(5):
        path = [drafted[0].tokens[n] for n in drafted[0].path(node)]
        assert_same(seen[node], transformers_logits(small, prompts[0] + path)[-1])
    # Node 1 was dropped with its child, the others stand elsewhere, and some are new.
    asked = [Tree([7, 5, 9, 6, 12, 13], [-1, 0, 0, 1, 2, 4]), Tree([7, 3, 8, 4], [-1, 0, 0, 2])]
    scores = lm.score(asked, rows)
    for tree, score, prompt in zip(asked, scores, prompts, strict=True):
        for node in range(len(tree)):
            path = [tree.tokens[n] for n in tree.path(node)]
            assert_same(score.logits[node], transformers_logits(model, prompt + path)[-1])
    lm.keep([[0, 2, 4, 5], [0, 2, 3]], rows)
    after = lm.score([Tree.chain([20, 21]), Tree([22])], rows)
    assert_same(after[0].logits.all(), transformers_logits(model, [*prompts[0], 7, 9, 12, 13, 20, 21])[-2:])
    assert_same(after[1].logits.all(), transformers_logits(model, [*prompts[1], 7, 8, 4, 22])[-1:])


class Evaluations:
    """What every layer of a packed model computed: (layer, the text up to and with the token) -> times."""

    def __init__(self, lm: TransformersLM, monkeypatch: pytest.MonkeyPatch):
        self.times: Counter[tuple[int, tuple[int, ...]]] = Counter()
        write = SlotCache.write

        def counted(cache: SlotCache, layer: int, key: Any, value: Any, jobs: list[Segment]) -> None:
            if cache is lm.cache:
                for job in jobs:
                    self.add(lm, layer, job)
            write(cache, layer, key, value, jobs)

        monkeypatch.setattr(SlotCache, "write", counted)

    def add(self, lm: TransformersLM, layer: int, job: Segment) -> None:
        row = lm.slots[job.slot]
        held = (row.tokens + row.pending)[: job.start]
        for i in range(len(job.pending)):
            self.times[layer, (*held, *job.pending[: i + 1])] += 1
        assert job.layout is not None
        for node in range(job.since, len(job.tree)):
            path = [job.tree.tokens[n] for n in job.tree.path(node)]
            self.times[layer, (*held, *job.pending, *path)] += 1


@pytest.mark.parametrize("shape", SHAPES, ids=["chain", "tree"])
@pytest.mark.parametrize("exit", [1, 2])
def test_no_layer_runs_twice_for_a_token(exit: int, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    ours, prompts = outpace.wrap(tiny("llama")), [text(9, 1), text(3, 2), text(14, 3)]
    plain = tokens(ours.generate(prompts, method="plain", max_tokens=24))
    ours.clear_cache()
    assert isinstance(ours.lm, TransformersLM)
    found = Evaluations(ours.lm, monkeypatch)
    drafted = ours.generate(prompts, method="layerskip", exit=exit, max_tokens=24, **shape)
    assert tokens(drafted) == plain
    assert sum(c.stats.accepted for c in drafted) > 0
    assert set(found.times.values()) == {1}
    # Every token that was fed went through all layers: none was skipped either.
    layers = [{seen for layer, seen in found.times if layer == i} for i in range(3)]
    assert layers[0] == layers[1] == layers[2]
    assert all(tuple(p + a[:-1]) in layers[2] for p, a in zip(prompts, plain, strict=True))


def test_what_a_draft_that_is_pruned_began_is_the_only_thing_that_is_lost(monkeypatch: pytest.MonkeyPatch):
    """Under a policy that verifies less than was drafted, the first layers of some guesses ran for nothing."""
    ours, prompts = outpace.wrap(tiny("llama")), [text(9, 1), text(3, 2)]
    found = Evaluations(ours.lm, monkeypatch)  # type: ignore[arg-type]
    options = {"method": "layerskip", "exit": 2, "depth": 4, "width": 3, "max_tokens": 24}
    plain = tokens(ours.generate(prompts, method="plain", max_tokens=24))
    ours.clear_cache()
    found.times.clear()
    for policy in ("auto", "fixed:nodes=2", "heuristic", "confidence"):
        assert tokens(ours.generate(prompts, policy=policy, **options)) == plain
        ours.clear_cache()
        last = {seen: times for (layer, seen), times in found.times.items() if layer == 2}
        assert set(last.values()) == {1}
        found.times.clear()


def test_requests_with_other_exits_and_methods_share_a_pass():
    for name in ("llama", "gemma2", "gpt2"):
        ours = wrapped(name)
        methods = [
            "layerskip:exit=1", "plain", "layerskip:exit=2,width=3", "recycling", "layerskip:skip=1-1", "pruned",
        ]  # fmt: skip
        settings = {"temperature": 0.8, "seed": 3, "max_tokens": 20}
        rows = [Request.from_keywords(text(5 + 9 * i, i), {"method": m, **settings}) for i, m in enumerate(methods)]
        plain = [ours.generate(row.prompt, method="plain", **settings).tokens for row in rows]
        assert tokens(ours.generate(rows)) == plain


@pytest.mark.parametrize("verifier", ["residual", "contrastive"])
def test_other_verifiers(verifier: str):
    ours = wrapped("llama")
    given = {"verifier": verifier, "max_tokens": 16, **({"temperature": 0.9} if verifier == "residual" else {})}
    found = tokens(ours.generate(PROMPTS, method="layerskip", exit=2, depth=3, width=2, **given))
    assert [len(answer) for answer in found] == [16] * 3
    if verifier == "contrastive":  # it reads hidden states, so that its passes begin anew
        assert found == tokens(ours.generate(PROMPTS, method="plain", **given))


def test_memory_that_runs_out_costs_guesses_only():
    lm = outpace.wrap(tiny("llama"))
    plain = tokens(lm.generate(PROMPTS, method="plain", max_tokens=40))
    assert isinstance(lm.lm, TransformersLM)
    tight = outpace.wrap(tiny("llama"), kv_cache_bytes=lm.lm.cache.token_bytes * 300)
    found = tight.generate(PROMPTS, method="layerskip", exit=2, depth=4, width=3, max_tokens=40)
    assert tokens(found) == plain


def test_a_pass_that_breaks_off_is_computed_anew(monkeypatch: pytest.MonkeyPatch):
    ours = outpace.wrap(tiny("llama"))
    plain = ours.generate(PROMPTS[0], method="plain", max_tokens=24).tokens
    resume, calls = TransformersLM._resume, []

    def breaks(lm: TransformersLM, jobs: list[Segment]) -> Any:
        calls.append(jobs)
        found = resume(lm, jobs)
        if len(calls) % 3 == 1:
            raise torch.OutOfMemoryError("in the middle")
        return found

    monkeypatch.setattr(TransformersLM, "_resume", breaks)
    found = ours.generate(PROMPTS[0], method="layerskip", exit=2, depth=3, width=3, nodes=4, max_tokens=24)
    assert found.tokens == plain and len(calls) > 3


def test_a_job_is_put_in_the_order_of_what_was_begun():
    begun = PartialPass(Tree([1, 2, 3, 4], [-1, 0, 0, 2]), 2, torch.arange(5.0)[:, None])  # one pending token
    job = Segment(0, 10, [9], Tree([1, 5, 3, 2, 4], [-1, 0, 0, 1, 2])).resume(begun)
    assert job.resumed is not None and job.layout is not None
    assert job.tree.tokens == [1, 3, 4, 5, 2] and job.tree.parents == [-1, 0, 1, 0, 3]
    assert job.resumed.nodes == [0, 2, 3] and job.resumed.order == [0, 3, 1, 4, 2]
    assert job.resumed.states.flatten().tolist() == [0.0, 1.0, 3.0, 4.0]
    rest = job.remainder()
    assert rest is not None and (rest.start, rest.since, rest.tokens) == (11, 3, [5, 2])
    other = Segment(0, 10, [9], Tree([8])).resume(begun)  # another root: only what was pending is known
    assert other.resumed is not None and other.resumed.nodes == [] and len(other.resumed.states) == 1
    whole = Segment(0, 10, [9], begun.tree).resume(begun)
    assert whole.remainder() is None


# Slices


@pytest.mark.parametrize("name", NATIVE)
def test_models_with_a_cache_of_their_own_leave_layers_out(name: str):
    lm = adapt(tiny(name))
    assert isinstance(lm, SnapshotLM) and lm.layers.count == 3 and lm.layers.early_exit(1) is None
    with pytest.raises(UsageError, match="must include layer 0"):
        lm.layers.slice([1, 2])
    assert_same(*(part.reference().native(PROMPTS[1], 4) for part in (lm.layers.slice([0, 1, 2]), lm)))
    part = lm.layers.slice([0, 2])
    assert not torch.equal(part.reference().native(PROMPTS[1], 4), lm.reference().native(PROMPTS[1], 4))


@pytest.mark.parametrize("name", ["gptj", "bloom", "doge"])
def test_a_layer_that_is_left_out_of_such_a_model_is_not_there(name: str):
    assert_same(
        adapt(tiny(name)).layers.slice([0, 2]).reference().native(PROMPTS[0], 5),
        transformers_logits(only_layers(tiny(name), [0, 2]), PROMPTS[0])[-5:],
    )


# Which layers


def test_layers_are_spelled_and_read():
    assert parse("0-3+7+9-10") == [0, 1, 2, 3, 7, 9, 10] == parse(spell([0, 1, 2, 3, 7, 9, 10]))
    assert parse((4, 2)) == [4, 2] and parse(3) == [3] and spell([5]) == "5" and parse("") == []
    assert without(5, [1, 3]) == [0, 2, 4]
    for wrong in ("a", "3-", "-3", "1,2"):
        with pytest.raises(UsageError, match="is not a list of layers"):
            parse(wrong)
    for gone in ([0], [5], [-1]):
        with pytest.raises(UsageError, match="can be left out"):
            without(5, gone)


def test_what_guesses_are_worth():
    never, always = [[False] * 9], [[True] * 10, [True] * 5]
    assert agreement(never) == 0 and tokens_per_pass(never, 4) == 1 and gain(never, 0.5, 4) == pytest.approx(1 / 3)
    assert agreement(always) == 1 and tokens_per_pass(always, 4) == 5 and gain(always, 0.0, 4) == 5
    some = [[True, True, False, True, False, False]]  # three at once, two, one
    assert tokens_per_pass(some, 4) == 2 and tokens_per_pass(some, 1) == 1.5 and agreement(some) == 0.5


@pytest.mark.parametrize("depth", [1, 4])
def test_a_probe_of_an_answer_tells_what_a_run_will_do(depth: int):
    ours = wrapped("llama")
    plain = ours.generate(PROMPTS, method="plain", max_tokens=30)
    samples = [ProbeText(p + c.tokens, len(p) - 1) for p, c in zip(PROMPTS, plain, strict=True)]
    probe = LayerProbe(ours.lm, samples)
    assert [choices[:30] for choices in probe.wanted] == tokens(plain)
    for matches, options in (
        (probe.exit(2), {"method": "layerskip", "exit": 2}),
        (probe.kept([0, 2]), {"method": "pruned", "layers": "0+2"}),
    ):
        found = [ours.generate(p, depth=depth, max_tokens=31, **options).stats for p in PROMPTS]
        assert sum(s.tokens for s in found) / sum(s.passes for s in found) == pytest.approx(
            tokens_per_pass(matches, depth),
            rel=0.03,  # a chain is cut where the answer ends
        )


def deep(idle: tuple[int, ...], layers: int = 8) -> outpace.Model:
    """A Llama in which some layers do nearly nothing."""
    model = build("llama", num_hidden_layers=layers, num_key_value_heads=2)
    with torch.no_grad():
        for i in idle:
            model.model.layers[i].self_attn.o_proj.weight.mul_(1e-3)
            model.model.layers[i].mlp.down_proj.weight.mul_(1e-3)
    return outpace.wrap(model)


def test_layers_that_do_nothing_are_found():
    probe = LayerProbe(deep((3, 4)).lm, [ProbeText(text(40, 1))])
    assert probe.block(2) == [3, 4] and probe.block(1) in ([3], [4])
    assert agreement(probe.kept(without(8, [3, 4]))) == 1.0 > agreement(probe.kept(without(8, [1, 2])))
    assert probe.best_count(4, 4) == 2
    apart = LayerProbe(deep((2, 5)).lm, [ProbeText(text(40, 1)), ProbeText(text(20, 2))])
    assert apart.search(2) == [2, 5]
    found, block = (agreement(apart.kept(without(8, gone))) for gone in (apart.search(2), apart.block(2)))
    assert found > block


def test_the_exit_is_where_nothing_comes_after():
    probe = LayerProbe(deep((4, 5, 6, 7)).lm, [ProbeText(text(40, 1))])
    assert agreement(probe.exit(4)) == 1.0 > agreement(probe.exit(2))
    assert probe.best_exit(4) == 4


def test_exits_of_models_that_cannot_resume_are_those_of_slices():
    lm = adapt(tiny("llama"))
    exact = outpace.wrap(tiny("llama"), bitwise=True).lm
    assert exact.layers.early_exit(1) is None and lm.layers.early_exit(1) is not None
    assert LayerProbe(exact, [ProbeText(PROMPTS[0])]).exit(2) == LayerProbe(lm, [ProbeText(PROMPTS[0])]).exit(2)


def test_layers_are_chosen_on_the_first_prompt():
    ours = deep((4, 5, 6, 7))
    plain = ours.generate(PROMPTS, method="plain", max_tokens=16)
    for options in (
        {"method": "layerskip", "exit": "auto"}, {"method": "layerskip", "skip": 3},
        {"method": "pruned", "remove": "auto"}, {"method": "pruned", "remove": 2, "by": "search"},
        {"method": "pruned", "layers": "0-3+7"}, {"method": "layerskip", "skip": (4, 6)},
    ):  # fmt: skip
        found = ours.generate(PROMPTS, max_tokens=16, **options)
        assert tokens(found) == tokens(plain)
        accepted, drafted = (sum(getattr(c.stats, key) for c in found) for key in ("accepted", "drafted"))
        assert accepted == drafted, options  # these layers do nothing


# What goes wrong, and what stands in for a model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "layerskip", "exit": 9}, "leaves nothing to verify with: this model has 3 layers"),
        ({"method": "layerskip", "exit": -1}, "neither a number of layers nor 'auto'"),
        ({"method": "layerskip", "exit": "deep"}, "neither a number of layers nor 'auto'"),
        ({"method": "layerskip", "skip": -1}, "is not a number of layers"),
        ({"method": "layerskip", "skip": 1, "exit": 1}, "not both"),
        ({"method": "layerskip", "skip": "0-1"}, "1 to 2 can be left out"),
        ({"method": "layerskip", "skip": "x"}, "is not a list of layers"),
        ({"method": "layerskip", "width": 0}, "layerskip needs depth"),
        ({"method": "layerskip:nodes=8+depth=2"}, "whole numbers"),
        ({"method": "pruned", "remove": 3}, "leaves no layer: this model has 3"),
        ({"method": "pruned", "remove": "most"}, "neither a number of layers nor 'auto'"),
        ({"method": "pruned", "by": "angel"}, "did you mean 'angle'"),
        ({"method": "pruned", "layers": "0-3"}, "layers 0 to 2"),
        ({"method": "pruned", "layers": "0-1", "remove": 1}, "not both"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(options: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        wrapped("llama").generate(PROMPTS[0], max_tokens=4, **options)


def test_a_model_without_layers_says_so():
    class Whole(CachelessLM):
        vocab, max_length = 8, 64

        def forward(self, jobs: Any, taps: Any) -> Any:
            raise AssertionError("nothing runs")

        def reference(self) -> Any:
            raise AssertionError("nothing runs")

    for method in ("layerskip", "pruned"):
        with pytest.raises(UnsupportedModel, match=f"{method} needs a model's layers"):
            Model(Whole()).generate([1, 2], method=method, max_tokens=4)
    with pytest.raises(UsageError, match="exits after 1 to 1"):
        ToyLM(layers=2).layers.early_exit(2)


def test_one_drafter_serves_several_targets():
    drafter = registry.method("layerskip", exit=1)
    for name in ("llama", "qwen3", "llama"):
        ours = wrapped(name)
        plain = tokens(ours.generate(PROMPTS, method="plain", max_tokens=8))
        assert tokens(ours.generate(PROMPTS, method=drafter, max_tokens=8)) == plain


@pytest.mark.parametrize("method", ["layerskip", "pruned"])
def test_advice_replays_them_with_the_layers_themselves(method: str, toy: Model):
    prompts = [[1, 2, 3, 1, 2], list(range(30))]
    recordings = record(toy, prompts, 16, Sampling(), lambda: None)
    found = replay(toy, recordings, MethodChoice(method), {}, Sampling())
    live = toy.generate(prompts[0], method=registry.method(method), max_tokens=16).stats
    assert found.stats.tokens == 32 and found.work[0].passes.total() == live.passes


# Checkpoints


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2", "smollm3", "gpt2", "gpt_oss", "bloom"])
def test_a_pruned_checkpoint_is_a_model_of_these_layers(name: str, tmp_path: Path):
    model, folder = tiny(name), tmp_path / "drafts" / "small"
    checkpoint.save(model, [0, 2], ByteTokenizerFiles(), folder, "how it was made")
    small = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype)
    assert small.config.num_hidden_layers == 2 and model.config.num_hidden_layers == 3
    if getattr(model.config, "layer_types", None):
        assert small.config.layer_types == [model.config.layer_types[i] for i in (0, 2)]
    assert_same(transformers_logits(small, PROMPTS[0]), transformers_logits(only_layers(model, [0, 2]), PROMPTS[0]))
    assert (folder / "README.md").read_text() == "how it was made"
    assert list(folder.glob("*.safetensors")) and (folder / "tokenizer.txt").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["small"]  # nothing is left of the writing
    plain = tokens(wrapped(name).generate(PROMPTS, method="plain", max_tokens=12))
    assert tokens(wrapped(name).generate(PROMPTS, method="draft", draft=outpace.wrap(small), max_tokens=12)) == plain


class ByteTokenizerFiles:
    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.txt").write_text("bytes")


def test_a_checkpoint_takes_16_bits_where_that_loses_nothing(tmp_path: Path):
    model = build("llama", torch.float32, tie_word_embeddings=True).to(torch.bfloat16).float()
    checkpoint.save(model, [0], None, tmp_path / "short", "")
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "short", dtype="auto")
    assert small.dtype == torch.bfloat16 and model.dtype == torch.float32
    assert small.lm_head.weight is small.model.embed_tokens.weight
    checkpoint.save(build("llama", torch.float32), [0], None, tmp_path / "long", "")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "long", dtype="auto").dtype == torch.float32


@pytest.mark.parametrize("name", ["jamba", "mamba2", "deepseek_v3"])
def test_a_model_whose_config_cannot_say_it_is_refused(name: str, tmp_path: Path):
    with pytest.raises(UnsupportedModel, match="layers"):
        checkpoint.save(tiny(name), [1, 2], None, tmp_path / "small", "")
    assert not list(tmp_path.iterdir())


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = wrapped("llama")
    monkeypatch.setattr("outpace.cli.training.prune.load_model", lambda name, how: model)
    monkeypatch.setattr("outpace.prompts.tasks.encode", lambda prompt, lm: text(20, len(prompt.turns[0])))
    folder = tmp_path / "small"

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["prune", "tiny", "--max-tokens", "4", *arguments])

    found = json.loads(run("--remove", "1", "--json", "--output", str(folder)).stdout)
    assert found["kept"] == [0, 2] and found["removed"] == [1] and found["output"] == str(folder)
    assert 0 <= found["agreement"] <= 1 <= found["tokens_per_pass"] and 0 < found["share"] < 1
    note = (folder / "README.md").read_text()
    assert "Layers 0+2 of 3 of `tiny`, chosen by angle" in note and "outpace prune" in note
    shown = run("--layers", "0-1")
    assert shown.exit_code == 0 and "--method pruned -o layers=0-1" in shown.stdout
    assert json.loads(run("--remove", "1", "--by", "search", "--json").stdout)["output"] is None
    for arguments, message in (
        (["--remove", "1", "--output", str(folder)], "already exists"),
        (["--remove", "3"], "leaves no layer: tiny has 3"),
        ([], "give either --remove"),
        (["--remove", "1", "--layers", "0"], "give either --remove"),
        (["--layers", "0-7"], "layers 0 to 2"),
        (["--layers", "first"], "is not a list of layers"),
        (["--remove", "1", "--by", "luck"], "unknown rule"),
    ):
        wrong = run(*arguments)
        assert wrong.exit_code == 2 and message in wrong.stderr.replace("\n", " "), wrong.stderr


def test_the_benchmark_on_a_tiny_model(tmp_path: Path):
    module = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "self_speculation.py"))
    probe = LayerProbe(deep((3, 4)).lm, [ProbeText(text(30, 1), 5)])
    found = list(module["points"](module["Probes"](probe, probe, 3), [2, 7], [1, 2], [2], lambda: None))
    assert [point.kind for point in found] == ["exit", "exit", "block", "block", "search"]
    assert found[3].agreement == 1.0 and found[3].layers == "0-2+5-7"  # these two do nothing
    lines = module["table"](found).splitlines()
    assert len(lines) == 7 and "100%" in lines[5] and len({line.count("|") for line in lines}) == 1
    module["plot"](found, tmp_path / "plots" / "tiny.png", "tiny")
    assert (tmp_path / "plots" / "tiny.png").stat().st_size > 1000


def test_auto_takes_no_drafter_that_asks_a_model():
    for name in ("layerskip", "pruned", "draft", "auto"):
        with pytest.raises(UsageError, match="cannot be a candidate of auto"):
            registry.method("auto", candidates=f"suffix+{name}")
