"""The same promises on a GPU; skipped where there is none. The choices are those of the CPU."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import outpace
from outpace.api.model import Model
from outpace.errors import UnsupportedModel
from outpace.models.compiled.cuda_graph import GraphRunner
from outpace.models.gpu_memory import GrowingTensor
from tests.callers import WAYS, Way, check
from tests.conftest import LOSSLESS as METHODS, settings_of
from tests.tiny_models import MODELS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PROMPTS = [[1, 2, 3, 1, 2], [5], [9, 8, 7, 6] * 9]
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "top_p": 0.95, "seed": 3},
    "constrained": {
        "repetition_penalty": 1.2, "presence_penalty": 0.3, "logit_bias": {3: 2.0}, "bad_words": [[4], [1, 2]],
        "min_tokens": 10, "stop_token_ids": [7], "temperature": 0.8, "top_k": 30, "logprobs": 3,
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=["llama", "gemma2", "gpt_oss", "qwen3_next", "mamba2"])
def pair(request: pytest.FixtureRequest) -> tuple[Model, Model]:
    """The same weights on both devices, in float64, or float32 for mixtures of experts: near ties do not happen."""
    model = MODELS[request.param]()
    there = MODELS[request.param]().cuda()
    there.load_state_dict(model.state_dict())
    return outpace.wrap(model), outpace.wrap(there)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", METHODS)
def test_gpu_equals_cpu(name: str, setting: str, pair: tuple[Model, Model]) -> None:
    cpu, gpu = pair
    given = {"max_tokens": 24, **SETTINGS[setting]}
    draft = gpu.lm.layers.slice([0, 1]) if gpu.lm.trees else gpu.lm  # type: ignore[attr-defined]
    want = [c.tokens for c in cpu.generate(PROMPTS, method="plain", **given)]
    try:
        found = gpu.generate(PROMPTS, **settings_of(name, draft), **given)
    except UnsupportedModel:  # the only reason for which a method may refuse a model
        assert not gpu.lm.trees  # it keeps a state of its own
        return
    assert [c.tokens for c in found] == want


@pytest.mark.parametrize("verifier", ["residual", "typical", "contrastive"])
def test_verifiers_run(verifier: str, pair: tuple[Model, Model]) -> None:
    _, gpu = pair
    if gpu.lm.trees:
        given = {"verifier": verifier, "temperature": 0.9, "max_tokens": 16, "width": 2}
        found = gpu.generate(PROMPTS, **settings_of("draft", gpu.lm.layers.slice([0, 1])), **given)  # type: ignore[attr-defined]
        assert [len(c.tokens) for c in found] == [16] * 3


def test_out_of_memory_fails_one_request() -> None:
    model = MODELS["llama"]().cuda()
    lm = outpace.wrap(model, kv_cache_bytes=2**16)
    short, long = lm.generate([[1, 2], list(range(50)) * 20], method="ngram", max_tokens=8)
    assert short.finish_reason == "length" and long.finish_reason == "error"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_exact_passes_have_the_same_bits(name: str, dtype: torch.dtype) -> None:
    lm = outpace.wrap(MODELS["llama"]().to("cuda", dtype), bitwise=True)
    given = {"max_tokens": 32, "logprobs": 0}
    draft = lm.lm.layers.slice([0, 1])  # type: ignore[attr-defined]
    plain = [lm.generate(prompt, method="plain", **given).logprobs for prompt in PROMPTS]
    assert [c.logprobs for c in lm.generate(PROMPTS, **settings_of(name, draft), **given)] == plain


@pytest.fixture(scope="module")
def graphs() -> Model:
    """Float32, so that near ties do not happen; passes are CUDA graphs that begin before the last one was read."""
    model = outpace.wrap(MODELS["llama"]().float().cuda(), compile=True)
    assert isinstance(model.lm.runner, GraphRunner) and model.lm.runner.most_tokens
    return model


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("method", ["plain", "suffix", "auto", "draft", "eagle3"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_caller_gets_its_own_text(way: Way, method: str, temperature: float, graphs: Model) -> None:
    prompts = [*PROMPTS, [4, 4], list(range(30)), [7, 7, 7], [60, 2], [11, 12] * 4]
    given = {**settings_of(method, graphs.lm.layers.slice([0, 1])), "temperature": temperature}  # type: ignore[attr-defined]
    for count in (2, 8):
        check(graphs, prompts[:count], given, way)


def test_long_prompts_and_many_requests_on_graphs(graphs: Model) -> None:
    """Prompts share uncaptured passes, and 150 requests a graph."""
    eager = outpace.wrap(MODELS["llama"]().float().cuda(), compile=False)
    prompts = [[(i * i + 7 * j) % 90 for j in range(3 + i % 5 + 300 * (i % 9 == 4))] for i in range(150)]
    graphs.max_batch = 256
    for settings in ({}, {"temperature": 0.9, "top_p": 0.9}):
        given = {"method": "plain", "max_tokens": 12, **settings}
        want = [done.tokens for done in eager.generate(prompts, **given)]
        assert [done.tokens for done in graphs.generate(prompts, **given)] == want
    assert isinstance(graphs.lm.runner, GraphRunner) and graphs.lm.runner.most_tokens  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "mistral"])
def test_prompts_longer_than_a_window_on_graphs(kind: str) -> None:
    model = outpace.wrap(MODELS[kind]().float().cuda(), compile=True)
    eager = outpace.wrap(MODELS[kind]().float().cuda(), compile=False)
    prompts = [[(i + 7 * j * j) % 60 for j in range(length)] for i, length in enumerate((400, 3, 150))]
    given = {"method": "plain", "max_tokens": 10}
    want = [done.tokens for done in eager.generate(prompts, **given)]
    assert [done.tokens for done in model.generate(prompts, **given)] == want


def test_memory_grows_in_place() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    memory = GrowingTensor((2, 2), (1, 64), torch.bfloat16, device)
    first, address = memory.entries, memory.tensor.data_ptr()
    memory.tensor.fill_(3)
    memory.grow(first + 1)
    assert memory.entries > first and memory.tensor.data_ptr() == address
    assert (memory.tensor[:, :, :first] == 3).all() and not memory.tensor[:, :, first:].any()
    before, held = torch.cuda.mem_get_info(device)[0], memory.entries
    with pytest.raises(torch.OutOfMemoryError):
        memory.grow(2**40 // 128)
    assert memory.entries == held and (memory.tensor[:, :, :first] == 3).all()
    assert torch.cuda.mem_get_info(device)[0] >= before - 2**26  # nothing stays taken
    del memory
    gc.collect()
    assert torch.cuda.mem_get_info(device)[0] > before
