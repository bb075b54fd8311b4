"""Compiled passes give what eager ones give: trees, ragged batches, prompts, windows, sinks, int8; on CPU and GPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import outpace
from outpace import registry
from outpace.api.request import Request
from outpace.core.engine import Engine
from outpace.core.tree import Tree
from outpace.heads import store
from outpace.heads.parallel import Text
from outpace.models.compiled import packing
from outpace.models.compiled.bf16_copies import linear
from outpace.models.compiled.cpu import CpuRunner
from outpace.models.compiled.cuda_graph import GraphRunner
from outpace.models.compiled.layers import with_int8_linears
from outpace.models.compiled.run_ahead import PassAhead
from outpace.models.compiled.runner import CompiledRunner
from outpace.models.hf.eager import EagerRunner
from outpace.models.hf.int8 import Int8Linear, quantize
from outpace.models.hf.lm import TransformersLM
from outpace.models.kernels import cpu
from outpace.models.memory import weights
from outpace.models.segment import Segment
from tests import tiny_models

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
PROMPTS = [[5, 9, 2, 7] * 4, [1, 2, 3], list(range(20, 60))]
pytestmark = pytest.mark.skipif(not cpu.available(), reason="no C++ compiler")


def fast(kind: str, device: str = "cpu") -> outpace.Model:
    model = tiny_models.MODELS[kind]().to(device, torch.float32)
    wrapped = outpace.wrap(model, compile=True)
    if (kind, device) != ("mixtral", "cuda"):  # experts may be more than a graph can hold
        assert isinstance(wrapped.lm.runner, GraphRunner if device == "cuda" else CpuRunner)
    return wrapped


@cache
def shared(kind: str, device: str = "cpu") -> outpace.Model:
    """One for all tests that leave it as it is: to compile it takes a while."""
    return fast(kind, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["llama", "gemma2", "mixtral"])
def test_every_method_gives_the_tokens_of_eager_plain_decoding(kind: str, device: str) -> None:
    quick, slow = fast(kind, device), outpace.wrap(tiny_models.MODELS[kind]().to(device, torch.float32), compile=False)
    assert slow.lm.runner is slow.lm.eager
    for settings in ({}, {"temperature": 0.9, "seed": 5}, {"temperature": 1.0, "top_p": 0.9, "top_k": 20}):
        plain = [r.tokens for r in slow.generate(PROMPTS, method="plain", max_tokens=24, **settings)]
        methods = ["plain", "recycling", "layerskip:exit=2,depth=3", "layerskip:exit=1,width=3"]
        heads = ["eagle3:head=random,width=3", "mtp:head=random"] if kind == "llama" else []
        for method in methods + heads:
            together = quick.generate(PROMPTS, method=method, max_tokens=24, **settings)
            assert [r.tokens for r in together] == plain
        assert quick.generate(PROMPTS[0], method="recycling", max_tokens=24, **settings).tokens == plain[0]
    if device == "cpu" or kind != "mixtral":
        assert isinstance(quick.lm.runner, CompiledRunner) and quick.lm.runner.most_tokens  # nothing made it give up
        assert quick.lm.runner.stages._known
        assert kind != "llama" or not quick.lm.eager.stages._known  # windows end within some trees of the others


def test_a_cpu_pass_gives_the_same_bits_alone_and_in_a_tree() -> None:
    lm = shared("llama").lm
    tokens = [3, 1, 4, 1, 5, 9]
    tree = Tree.chain(tokens)
    for i in range(5):
        tree.add(i, 40 + i)
    rows = [lm.acquire([]), lm.acquire([])]
    lm.feed([PROMPTS[2], PROMPTS[2]], rows)
    at_once = lm.score([tree], rows[:1])[0].logits.all()[: len(tokens)].clone()
    one_by_one = []
    for token in tokens:
        one_by_one.append(lm.score([Tree([token])], rows[1:])[0].logits.all().clone())
        lm.keep([[0]], rows[1:])
    assert torch.equal(at_once, torch.cat(one_by_one))


def test_weights_that_are_bfloat16_numbers_are_read_as_such_with_the_same_bits() -> None:
    model = tiny_models.MODELS["llama"]().to(torch.bfloat16).float()
    quick = outpace.wrap(model, compile=True).lm
    assert isinstance(quick.runner, CpuRunner) and 0 < quick.runner.copies.bytes < weights(model)
    assert quick.weights.memory(1).weights == weights(model) + quick.runner.copies.bytes
    assert quick.layers.slice([0]).runner.copies is quick.runner.copies  # type: ignore[attr-defined]
    assert shared("llama").lm.runner.copies.bytes == 0  # type: ignore[attr-defined]  # random float32 would lose bits
    for rows in (1, 3, 5, 8, 19):
        for n, k in ((9, 7), (64, 33), (6, 256)):
            x, weight, bias = torch.randn(rows, k), torch.randn(n, k).bfloat16(), torch.randn(n)
            short, long = (torch.ops.outpace_cpu.linears(x, [w], [], [bias]) for w in (weight, weight.float()))
            assert torch.equal(short, long)
            torch.testing.assert_close(long, torch.nn.functional.linear(x, weight.float(), bias))
            torch.testing.assert_close(long, linear(x, weight, bias))


@pytest.mark.parametrize("device", DEVICES)
def test_int8_is_a_model_of_its_own(device: str) -> None:
    model = quantize(tiny_models.MODELS["llama"]().float()).to(device)
    assert sum(isinstance(module, Int8Linear) for module in model.modules()) > 0
    quick, slow = outpace.wrap(model, compile=True), outpace.wrap(model, compile=False)
    assert isinstance(quick.lm.runner, GraphRunner if device == "cuda" else CpuRunner)
    plain = slow.generate(PROMPTS, method="plain", max_tokens=24)
    for method in ("plain", "recycling"):
        assert [r.tokens for r in quick.generate(PROMPTS, method=method, max_tokens=24)] == [r.tokens for r in plain]


def test_what_the_compiler_cannot_do_later_is_done_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = fast("llama")
    expected = quick.generate(PROMPTS, method="recycling", max_tokens=12)

    def fail(*_: object) -> None:
        raise RuntimeError("a size that it does not know")

    monkeypatch.setattr(quick.lm.runner, "_run", fail)
    again = quick.generate(PROMPTS, method="recycling", max_tokens=12)
    assert [r.tokens for r in again] == [r.tokens for r in expected]
    assert quick.lm.runner.most_tokens == 0  # type: ignore[attr-defined]


def test_a_slice_has_its_own_compiled_passes() -> None:
    whole = shared("llama").lm
    assert isinstance(whole.runner, CpuRunner)
    part = whole.layers.slice([0])
    assert isinstance(part.runner, CpuRunner) and whole.layers.slice([0]) is part  # to compile it takes a while
    assert isinstance(whole.layers.slice([0], compile=False).runner, EagerRunner)
    eager = TransformersLM(whole.model, [0])
    logits = []
    for lm in (part, eager):
        row = lm.acquire([])
        lm.feed([PROMPTS[2]], [row])
        logits.append(lm.score([Tree.chain([1, 2, 3])], [row])[0].logits.all())
    torch.testing.assert_close(*logits)


def test_every_model_of_a_process_is_compiled() -> None:
    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(2):
            lm = fast("llama").lm
            assert isinstance(lm.runner, CpuRunner)
            assert all(layer.kind.direct for layer in lm.runner.module.model.layers)


def test_jobs_that_are_too_many_for_a_pass_go_in_several() -> None:
    jobs = [Segment(i, 0, [], Tree.chain([1] * size)) for i, size in enumerate([3, 4, 9, 2, 2, 2, 1])]
    found = packing.parts(jobs, 8)
    assert [[job.slot for job in part] for part in found] == [[0, 1], [2], [3, 4, 5, 6]]
    many = [Segment(i, 0, [], Tree([1])) for i in range(2 * packing.MOST_SEGMENTS + 1)]
    assert [len(part) for part in packing.parts(many, 512)] == [packing.MOST_SEGMENTS, packing.MOST_SEGMENTS, 1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_large_batch_of_trees_is_not_run_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    quick, slow = fast("llama", "cuda"), outpace.wrap(tiny_models.MODELS["llama"]().to("cuda", torch.float32))
    quick.max_batch = 80
    prompts = [[1 + i, 2, 3, 4 + i % 7] for i in range(80)]
    prompts[7] = [1 + i % 90 for i in range(300)]  # in pieces
    plain = [r.tokens for r in slow.generate(prompts, method="plain", max_tokens=16)]
    monkeypatch.setattr(EagerRunner, "forward", None)  # what is eager would call it
    assert [r.tokens for r in quick.generate(prompts, method="recycling", nodes=12, max_tokens=16)] == plain


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_device_that_is_behind_is_told_what_was_meant() -> None:
    """The host writes what later pieces of a prompt need long before the device has read that of the first ones."""
    quick, slow = fast("llama", "cuda"), outpace.wrap(tiny_models.MODELS["llama"]().to("cuda", torch.float32))
    prompt = [1 + i * i % 90 for i in range(900)]
    logits = []
    for lm in (slow.lm, quick.lm):
        for busy in (1, 500_000_000):  # graphs are captured by the first
            row = lm.acquire([])
            torch.cuda._sleep(busy)  # type: ignore[no-untyped-call]
            lm.feed([prompt], [row])
            found = lm.score([Tree.chain([1, 2, 3])], [row])[0].logits.all().clone()
            lm.release(row)
            lm.clear()
        logits.append(found)
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-4)  # sums run in another order


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.9}, {"temperature": 0.9, "top_k": 30, "top_p": 0.9}], ids=str
)
def test_plain_decoding_begins_its_passes_ahead(sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    quick, slow = fast("llama", "cuda"), outpace.wrap(tiny_models.MODELS["llama"]().to("cuda", torch.float32))
    taken = list[bool]()
    take = PassAhead.take
    monkeypatch.setattr(PassAhead, "take", lambda *given: taken.append(take(*given)) or taken[-1])
    settings = [{"method": "plain", "max_tokens": 9 + 17 * i, "seed": i, **sampling} for i in range(9)]
    for again in range(2):
        texts = []
        for model in (quick, slow):
            engine = Engine(model.lm, max_batch=4)  # some join when others have left
            seqs = [model.sequence(Request.from_keywords(p, s)) for p, s in zip(PROMPTS * 3, settings, strict=True)]
            for seq in seqs:
                engine.submit(seq)
            for _ in engine.run():
                pass
            texts.append([seq.generated for seq in seqs])
        assert texts[0] == texts[1], again
    assert sum(taken) > 0.8 * len(taken) > 100


def test_taps_are_those_of_eager_passes() -> None:
    quick, slow = shared("llama").lm, outpace.wrap(tiny_models.MODELS["llama"]().float(), compile=False).lm
    states = []
    for lm in (quick, slow):
        row = lm.acquire([], taps=(0, 1, -1))
        lm.feed([PROMPTS[1]], [row])
        states.append(lm.score([Tree.chain([1, 2, 3])], [row])[0].hidden)
    torch.testing.assert_close(*states)


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "block"])
def test_heads_beside_a_compiled_target_read_int8_weights_and_stay_as_they_are(kind: str) -> None:
    target = shared("llama")
    head = store.fresh(kind, target.lm)
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    method = registry.method(kind, head=head)
    answers = [target.generate(PROMPTS, method=name, max_tokens=12) for name in ("plain", method)]
    assert [c.tokens for c in answers[0]] == [c.tokens for c in answers[1]]
    after = head.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    served = method._lm.runner.module if kind == "eagle3" else method._head
    kinds = {type(module) for module in served.modules()}
    assert Int8Linear in kinds and torch.nn.Linear not in kinds


def test_a_short_twin_guesses_nearly_the_same() -> None:
    target = shared("llama").lm
    head = store.fresh("medusa", target)
    texts = [Text(3, torch.randn(4, 32)) for _ in range(2)]
    due, found = (h.logits(h.slots(texts, 3)) for h in (head, with_int8_linears(head)))
    assert due.shape == found.shape and 0 < (due - found).abs().max() < 0.05 * due.abs().max()
