"""`bitwise=True`: the same bits, whatever else is in the pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outpace.api.load import wrap
from outpace.api.model import Model
from outpace.core.tree import Tree
from outpace.errors import UnsupportedModel
from outpace.models.hf.bitwise import TOKENS, BitwiseRunner, _cut, _passes
from outpace.models.segment import Segment
from tests import tiny_models
from tests.conftest import LOSSLESS as METHODS, settings_of

PROMPTS = [[1, 2, 3, 1, 2], list(range(40)), [9, 8, 7, 6] * 5]


def exact(kind: str, dtype: torch.dtype, **config: Any) -> Model:
    return wrap(tiny_models.build(kind, dtype, **config), bitwise=True)


@pytest.fixture(scope="module", params=[torch.float32, torch.float16], ids=["float32", "float16"])
def llama(request: pytest.FixtureRequest) -> Model:
    return exact("llama", request.param, num_key_value_heads=2)


def bits(model: Model, prompts: Any, **settings: Any) -> list[list[float]]:
    done = model.generate(prompts, logprobs=0, max_tokens=24, **settings)
    done = done if isinstance(done, list) else [done]
    return [[entry.logprob for entry in completion.logprobs] for completion in done]


@pytest.fixture(scope="module")
def plain(llama: Model) -> list[list[float]]:
    return [bits(llama, prompt, method="plain")[0] for prompt in PROMPTS]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_the_bits_of_plain_decoding(name: str, llama: Model, plain: list[list[float]]) -> None:
    method = settings_of(name, llama.lm.layers.slice([0, 1]))  # type: ignore[attr-defined]
    assert bits(llama, PROMPTS, **method) == plain  # in a ragged batch
    assert [bits(llama, prompt, **method)[0] for prompt in PROMPTS] == plain
    llama.clear_cache()
    assert bits(llama, PROMPTS[::-1], **method) == plain[::-1]  # from the first token on, in another order


def test_without_it_the_bits_differ() -> None:
    """Else these tests would show nothing."""
    model = wrap(tiny_models.build("llama", torch.float32, num_key_value_heads=2))
    plain = [bits(model, prompt, method="plain")[0] for prompt in PROMPTS]
    assert bits(model, PROMPTS, method="recycling") != plain


def test_windows_and_soft_caps() -> None:
    model = wrap(tiny_models.MODELS["gemma2"](), bitwise=True)
    plain = [bits(model, prompt, method="plain")[0] for prompt in PROMPTS]
    assert bits(model, PROMPTS, method="recycling") == plain


def test_hidden_states_come_with_it(llama: Model) -> None:
    given = {"method": "ngram", "verifier": "contrastive"}
    assert bits(llama, PROMPTS, **given) == [bits(llama, prompt, **given)[0] for prompt in PROMPTS]


def test_a_model_with_a_cache_of_its_own_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="runs with its own cache"):
        wrap(tiny_models.MODELS["mamba2"](), bitwise=True)


def test_gpt_oss_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="bitwise=True cannot be guaranteed: GptOssForCausalLM"):
        wrap(tiny_models.MODELS["gpt_oss"](), bitwise=True)


def test_a_model_that_mixes_rows_is_refused() -> None:
    model = tiny_models.build("llama", torch.float32)

    def mixing(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out + 1e-6 * out.mean(dim=1, keepdim=True)

    model.model.layers[0].mlp.register_forward_hook(mixing)
    with pytest.raises(UnsupportedModel, match="bitwise=True cannot be guaranteed"):
        wrap(model, bitwise=True)


def test_a_slice_of_it_is_exact_too(llama: Model) -> None:
    assert isinstance(llama.lm.layers.slice([0, 2]).runner, BitwiseRunner)  # type: ignore[union-attr]


def test_jobs_are_cut_into_passes_of_one_size() -> None:
    tree = Tree.chain(list(range(30)))
    jobs = [Segment(0, 4, [1, 2, 3], tree), Segment(1, 0, list(range(5))), Segment(2, 7, [], tree, since=20)]
    passes = list(_passes(jobs))
    assert [sum(len(part.segment.tokens) for part in parts) for parts in passes] == [TOKENS, TOKENS, TOKENS]
    for index, job in enumerate(jobs):
        mine = [part.segment for parts in passes for part in parts if part.owner == index]
        assert [t for part in mine for t in part.tokens] == job.tokens
        assert [p for part in mine for p in part.positions] == job.positions
        assert mine[0].offset == job.offset and mine[-1].end == job.end


def test_a_cut_keeps_what_comes_before() -> None:
    tree = Tree([5, 6, 7, 8], [-1, 0, 0, 1])
    part = _cut(Segment(3, 10, [1, 2], tree), 1, 4)
    assert (part.start, part.pending, part.since) == (11, [2], 0)
    assert part.tree is not None and part.tree.tokens == [5, 6]
