"""Checkpoints as people have them: quantised by other packages, or with a LoRA adapter, as target and as draft.

Tiny models are quantised by each package itself, saved, and loaded again. A package that is missing skips its kinds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import outpace
from outpace import UnsupportedModel, UsageError
from outpace.models.adapt import adapt
from outpace.models.compiled.code_cache import signature
from outpace.models.hf import checkpoint
from outpace.models.hf.lm import TransformersLM
from outpace.models.hf.tolerance import apart
from outpace.models.memory import weights
from outpace.models.quantized import kinds, mixing_layer, quantized_layers
from tests.checkpoint_kinds import KINDS, MIXING
from tests.conftest import LOSSLESS, settings_of
from tests.tiny_models import GROUPED, build

SIZES: dict[str, Any] = GROUPED | dict(hidden_size=64, intermediate_size=128, head_dim=16, initializer_range=0.2)
VOCAB = 128
PROMPTS = [[1, 5, 9, 20, 33, 2, 7], [3, 4], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23]]
# compressed-tensors imports torch's deprecated parts; gptqmodel deletes a temporary folder late.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def needs(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The models are too small to share, and the machine may be busy with other tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a kind of checkpoint, which is written when it is first asked for; "plain" is the model itself."""
    root = tmp_path_factory.mktemp("checkpoints")
    names = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB)})))

    @cache
    def place(name: str) -> Path:
        folder = root / name.replace(" ", "-")
        if name == "plain":
            build("llama", torch.float32, **SIZES, vocab_size=VOCAB).save_pretrained(folder)
        else:
            kind = KINDS.get(name)
            (MIXING[name] if kind is None else kind.write)(place("plain"), folder)
        names.save_pretrained(folder)
        return folder

    return place


@pytest.fixture(scope="module")
def loaded(places: Callable[[str], Path]) -> Callable[..., outpace.Model]:
    @cache
    def load(name: str, **options: Any) -> outpace.Model:
        if name != "plain":
            needs(KINDS[name].package)
            options = {"bitwise": KINDS[name].rounds} | options
            if KINDS[name].adapter:
                return outpace.load(places("plain"), adapter=places(name), **options)
        return outpace.load(places(name), **options)

    return load


def theirs(places: Callable[[str], Path], name: str) -> Any:
    """The same checkpoint as its own package runs it."""
    if not KINDS[name].adapter:
        return AutoModelForCausalLM.from_pretrained(places(name), dtype="auto").eval()
    from peft import PeftModel

    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(places("plain")), places(name)).eval()


def tokens(found: list[outpace.Completion]) -> list[list[int]]:
    return [completion.tokens for completion in found]


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", KINDS)
def test_every_lossless_method_equals_plain_decoding(name: str, temperature: float, places, loaded):
    ours = loaded(name)
    assert isinstance(ours.lm, TransformersLM)
    settings = dict(temperature=temperature, seed=5, max_tokens=12)
    plain = tokens(ours.generate(PROMPTS, method="plain", **settings))
    draft = loaded("plain").lm  # of another kind than the target
    for method in LOSSLESS:
        found = ours.generate(PROMPTS, **settings_of(method, draft), **settings)
        assert tokens(found) == plain, method


@pytest.mark.parametrize("name", KINDS)
def test_it_is_the_model_that_its_package_runs(name: str, places, loaded):
    ours, model = loaded(name), theirs(places, name)
    for prompt in PROMPTS:
        row = ours.lm.acquire([])
        ours.lm.feed([prompt[:1]], [row])
        scores = ours.lm.score([outpace.Tree.chain(prompt[1:])], [row])[0]
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, 1:]
        assert apart(scores.logits.all(), expected) < (0.02 if KINDS[name].rounds else 1e-4)
        ours.lm.release(row)
        if not KINDS[name].rounds:
            text = model.generate(input_ids=torch.tensor([prompt]), do_sample=False, max_new_tokens=12, pad_token_id=0)
            assert ours.generate(prompt, max_tokens=12).tokens == text[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", KINDS)
def test_it_drafts_for_a_plain_model(name: str, places, loaded):
    target = loaded("plain")
    plain = target.generate(PROMPTS, method="plain", max_tokens=12)
    found = target.generate(PROMPTS, method="draft", draft=loaded(name), depth=3, max_tokens=12)
    assert tokens(found) == tokens(plain)
    assert sum(c.stats.accepted for c in found) > 0


@pytest.mark.parametrize("name", KINDS)
def test_capabilities(name: str, places, loaded):
    ours = loaded(name)
    lm = ours.lm
    model, plain = lm.model, loaded("plain").lm.model
    quantized = not KINDS[name].adapter
    assert any(quantized_layers(model)) is quantized
    held = weights(model)
    if quantized and KINDS[name].package != "compressed_tensors":  # which unpacks its weights in the first pass
        assert held < weights(plain)
    assert all(kind in lm.identity for kind in kinds(model)) and f"{held} bytes" in lm.identity
    assert lm.weights.memory(10).weights == held
    assert weights(lm.view) == held and weights(nn.ModuleList([model, lm.view])) == held  # all tensors are shared
    assert lm.embeddings.fingerprint == loaded("plain").lm.embeddings.fingerprint
    part = lm.layers.slice([0, 2], compile=False)
    scores = part.score([outpace.Tree.chain(PROMPTS[0])], [part.acquire([])])[0]
    assert apart(scores.logits.all(), lm.layers.reference([0, 2]).native(PROMPTS[0], len(PROMPTS[0]))) < 0.02
    precise, native = (run(PROMPTS[0], 4) for run in (lm.reference().precise, lm.reference().native))
    assert precise.dtype == torch.float64 and apart(native, precise) < 0.02
    before = lm.weights.version
    ours.weights_changed()
    assert lm.weights.version == before + 1
    with pytest.raises(UnsupportedModel, match="cannot be written without some of its layers"):
        checkpoint.save(model, [0, 1], None, Path("never-written"), "")


@pytest.mark.parametrize("name", ["torchao int8", "bitsandbytes nf4", "lora"])
def test_compiled_on_a_cpu(name: str, loaded):
    ours = loaded(name, compile=True, bitwise=False)
    assert ours.lm.runner.kind == "compiled"
    assert len(ours.lm.runner.layer_kinds) == 1  # the code is shared
    for temperature in (0.0, 0.8):
        settings = dict(temperature=temperature, seed=5, max_tokens=12)
        plain = tokens(loaded(name, compile=False, bitwise=False).generate(PROMPTS, method="plain", **settings))
        for method in ("plain", "recycling", "layerskip"):
            assert tokens(ours.generate(PROMPTS, method=method, **settings)) == plain


@pytest.mark.parametrize("package", MIXING)
def test_a_model_that_mixes_tokens_is_refused(package: str, places):
    needs(package)
    with pytest.raises(UnsupportedModel, match=r"mixes tokens: model\.layers\.0\..* per token"):
        outpace.load(places(package))


class PerTensor(nn.Linear):
    """Rounds all rows of its input with one scale."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().max() / 127
        return super().forward((x / scale).round() * scale)


class PerToken(nn.Linear):
    """Rounds each row of its input with its own scale."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
        return super().forward((x / scale).round() * scale)


def test_mixing_and_rounding_are_told_apart(caplog: pytest.LogCaptureFixture):
    def made(layer: type[nn.Linear]) -> Any:
        model = build("llama", torch.float32, **SIZES)
        mlp = model.model.layers[1].mlp
        mlp.up_proj.__class__ = layer
        return model

    assert mixing_layer(made(PerTensor)) == "model.layers.1.mlp.up_proj (PerTensor)"
    with pytest.raises(UnsupportedModel, match="mixes tokens"):
        adapt(made(PerTensor))
    caplog.set_level(logging.WARNING)
    adapt(made(nn.Linear))
    adapt(made(PerToken), bitwise=True)
    assert not caplog.messages
    adapt(made(PerToken))
    assert "rounds activations in model.layers.1.mlp.up_proj (PerToken)" in caplog.text


def test_int8_on_top_and_dtypes(places, loaded):
    needs("torchao")
    with pytest.raises(UsageError, match=r"quantised already \(torchao\): leave quantize out"):
        outpace.load(places("torchao int8"), quantize="int8")
    assert kinds(loaded("torchao float8").lm.model) == ["Float8Tensor"]
    with pytest.raises(UnsupportedModel, match="leave dtype out"):
        outpace.load(places("torchao float8"), dtype="bfloat16")


def test_layers_share_code_only_if_all_of_their_settings_are_equal(places):
    needs("torchao")
    given = AutoModelForCausalLM.from_pretrained(places("torchao int8")).model.layers
    plain = AutoModelForCausalLM.from_pretrained(places("plain")).model.layers
    for layer in (*given, *plain):
        layer.self_attn.layer_idx = 0
    assert signature(given[0], None) == signature(given[1], None)
    assert signature(plain[0], None) == signature(plain[1], None) != signature(given[0], None)
    plain[0].scaling, plain[1].scaling = {"default": 2.0}, {"default": 4.0}
    assert signature(plain[0], None) != signature(plain[1], None)
