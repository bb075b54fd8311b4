"""LoRA adapters: what is refused, and what is noticed later. Their texts are compared in test_checkpoints.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import outpace
from outpace import OutpaceError, UnsupportedModel, UsageError
from outpace.cli import checks
from outpace.models import adapters
from tests.tiny_models import GROUPED, build

peft: Any = pytest.importorskip("peft", reason="peft is not installed")
PROMPT = [1, 5, 9, 20, 33, 2, 7]


def base(**settings: Any) -> Any:
    return build("llama", torch.float32, **GROUPED, **settings)


def adapted(seed: int = 3, **settings: Any) -> Any:
    made = peft.get_peft_model(base(), peft.LoraConfig(**dict(r=2, target_modules=["q_proj", "up_proj"]) | settings))
    strengthen(made, seed)
    return made.eval()


def strengthen(model: Any, seed: int) -> None:
    torch.manual_seed(seed)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("adapter")
    adapted().save_pretrained(place)
    return place


def ours(model: Any) -> list[int]:
    return outpace.wrap(model).generate(PROMPT, method="recycling", max_tokens=12).tokens


def test_wrap_runs_the_model_inside_of_pefts(folder: Path):
    model = adapted()
    expected = model.generate(input_ids=torch.tensor([PROMPT]), do_sample=False, max_new_tokens=12, pad_token_id=0)
    assert ours(model) == expected[0, len(PROMPT) :].tolist() != ours(base())
    assert ours(adapters.load(base(), folder)) == ours(model)
    assert ours(model.merge_and_unload()) == ours(adapted())


def test_a_switched_adapter_is_noticed():
    model = adapted()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    strengthen(model, 7)
    wrapped = outpace.wrap(model)
    first = wrapped.generate(PROMPT, max_tokens=8).tokens
    model.set_adapter("other")
    with pytest.raises(UsageError, match="switched, scaled or merged"):
        wrapped.generate(PROMPT, max_tokens=8)
    assert ours(model)[:8] != first
    model.set_adapter("default")
    assert wrapped.generate(PROMPT, max_tokens=8).tokens == first
    with model.disable_adapter(), pytest.raises(UsageError, match="switched"):
        wrapped.generate(PROMPT, max_tokens=8)
    model.merge_adapter()
    with pytest.raises(UsageError, match="merged"):
        wrapped.generate(PROMPT, max_tokens=8)


def test_weights_of_an_adapter_may_change_in_place():
    model = adapted()
    wrapped = outpace.wrap(model)
    wrapped.generate(PROMPT, max_tokens=4)
    strengthen(model, 9)
    wrapped.weights_changed()
    assert wrapped.generate(PROMPT, max_tokens=12).tokens == ours(adapted(9))


def test_adapters_that_do_not_fit(folder: Path, tmp_path: Path):
    with pytest.raises(OutpaceError, match=r"is not an adapter: it has no adapter_config\.json"):
        adapters.load(base(), tmp_path)
    for other in (base(hidden_size=48), build("gpt2", torch.float32), base(num_hidden_layers=4)):
        with pytest.raises(OutpaceError, match=r"does not fit .*; load the model that it was trained on"):
            adapters.load(other, folder)
    with pytest.raises(OutpaceError, match="has weights for layers that LlamaForCausalLM does not have"):
        adapters.load(base(num_hidden_layers=2), folder)


def test_files_of_an_adapter(folder: Path, tmp_path: Path):
    (tmp_path / adapters.CONFIG).write_text((folder / adapters.CONFIG).read_text())
    torch.save(load_file(folder / adapters.WEIGHTS), tmp_path / "adapter_model.bin")  # a pickle is never read
    with pytest.raises(OutpaceError, match=r"it has no adapter_model\.safetensors"):
        adapters.load(base(), tmp_path)
    save_file(load_file(folder / adapters.WEIGHTS), tmp_path / adapters.WEIGHTS)
    settings = json.loads((folder / adapters.CONFIG).read_text())
    (tmp_path / adapters.CONFIG).write_text(
        json.dumps(settings | {"task_type": "CAUSAL_LM", "alora_invocation_tokens": [1, 2]})
    )
    with pytest.raises(UnsupportedModel, match="the kind aLoRA are not supported, only LoRA"):
        adapters.load(base(), tmp_path)


def test_other_kinds_of_adapters_are_refused():
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    for config in (prompts, peft.IA3Config(task_type="CAUSAL_LM")):
        with pytest.raises(UnsupportedModel, match="only LoRA"):
            outpace.wrap(peft.get_peft_model(base(), config))


def test_options_that_exclude_each_other(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UsageError, match="leave quantize out"):
        outpace.load("any", adapter=folder, quantize="int8")
    with pytest.raises(UsageError, match="adapter"):
        outpace.load(str(tmp_path / "any.gguf"), adapter=folder)
    with pytest.raises(OutpaceError, match="not a folder or a Hugging Face id"):
        checks.adapter("no such adapter")
    checks.adapter(str(folder))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(OutpaceError, match=r"pip install 'outpace\[peft\]'"):
        adapters.load(base(), folder)
