"""Small checkpoints of every kind: each package quantises a plain one, or puts an adapter beside it, and writes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM


@dataclass(frozen=True)
class Kind:
    """How a checkpoint is made, and what is expected of it."""

    package: str
    write: Callable[[Path, Path], None]  # from the plain checkpoint's folder into a new one
    rounds: bool = False  # its activations, so that only bitwise passes are exact
    adapter: bool = False  # the folder holds an adapter of the plain model, not a model


def _quantized(make: Callable[[], Any]) -> Callable[[Path, Path], None]:
    def write(plain: Path, folder: Path) -> None:
        given = AutoModelForCausalLM.from_pretrained(plain, quantization_config=make(), dtype=torch.float32)
        given.save_pretrained(folder)

    return write


def _torchao(name: str, **options: Any) -> Callable[[Path, Path], None]:
    def make() -> Any:
        from torchao import quantization
        from transformers import TorchAoConfig

        found = {key: value(quantization) if callable(value) else value for key, value in options.items()}
        return TorchAoConfig(getattr(quantization, name)(**found))

    return _quantized(make)


def _bitsandbytes(**options: Any) -> Callable[[Path, Path], None]:
    def make() -> Any:
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(**options)

    return _quantized(make)


def _compressed(preset: str, **activations: Any) -> Callable[[Path, Path], None]:
    def write(plain: Path, folder: Path) -> None:
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
        from compressed_tensors.quantization.utils import calculate_qparams

        model = AutoModelForCausalLM.from_pretrained(plain)
        scheme = preset_name_to_scheme(preset, ["Linear"])
        size = scheme.weights.group_size = 32 if scheme.weights.group_size else None
        if activations:
            scheme.input_activations = scheme.input_activations.model_copy(update=activations)
        apply_quantization_config(model, QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"]))
        for layer in model.modules():
            if hasattr(layer, "quantization_scheme"):
                groups = layer.weight.detach().unflatten(-1, (-1, size or layer.in_features))  # [out, groups, size]
                scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
                layer.weight_scale.data = scale.to(layer.weight_scale.dtype)
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(folder)
        compressor.update_config(str(folder))

    return write


def _lora(**options: Any) -> Callable[[Path, Path], None]:
    def write(plain: Path, folder: Path) -> None:
        from peft import LoraConfig, get_peft_model

        settings = dict(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM") | options
        adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(plain), LoraConfig(**settings))
        torch.manual_seed(3)
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:  # zero at first
                nn.init.normal_(weight, std=0.2)
        adapted.save_pretrained(folder)

    return write


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the columns in an integer
PACKED_4_BIT: dict[str, dict[str, Any]] = {
    "gptq": dict(desc_act=False, sym=True, checkpoint_format="gptq"),
    "awq": dict(zero_point=True, version="gemm"),
}


def _four_bits(method: str) -> Callable[[Path, Path], None]:
    """Round to 4 bits and pack as GPTQ and AWQ do: their own ways to choose the numbers need a GPU."""

    def write(plain: Path, folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(plain)
        state = model.state_dict()
        for name in [name for name in state if name.endswith("_proj.weight")]:
            weight, start = state.pop(name).T, name.removesuffix("weight")  # [in, out]
            groups = weight.unflatten(0, (-1, 32))  # [groups, 32, out]
            scale = groups.abs().amax(1) / 7  # [groups, out]
            numbers = ((groups / scale[:, None]).round() + 8).flatten(0, 1).int()  # [in, out], of 1 to 15
            if method == "gptq":
                numbers, places = numbers.unflatten(0, (-1, 8)).movedim(1, -1), range(8)  # [in / 8, out, 8]
                state[start + "g_idx"] = torch.arange(len(weight), dtype=torch.int32) // 32
            else:
                numbers, places = numbers.unflatten(1, (-1, 8)), AWQ_ORDER  # [in, out / 8, 8]
            state[start + "qweight"] = sum(numbers[..., place] << 4 * i for i, place in enumerate(places))
            zeros = 0x77777777 if method == "gptq" else 0x88888888 - (1 << 32)  # GPTQ stores them less one
            state[start + "qzeros"] = torch.full((len(groups), weight.shape[1] // 8), zeros, dtype=torch.int32)
            state[start + "scales"] = scale.half()
        model.config.quantization_config = dict(quant_method=method, bits=4, group_size=32) | PACKED_4_BIT[method]
        model.config.save_pretrained(folder)
        state = {name: tensor.contiguous() for name, tensor in state.items()}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

    return write


def _int4(quantization: Any) -> Any:
    return quantization.PerGroup(32)


KINDS: dict[str, Kind] = {
    "torchao int8": Kind("torchao", _torchao("Int8WeightOnlyConfig")),
    "torchao float8": Kind("torchao", _torchao("Float8WeightOnlyConfig")),
    "torchao int4": Kind("torchao", _torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4, granularity=_int4)),
    "torchao int8 activations": Kind("torchao", _torchao("Int8DynamicActivationInt8WeightConfig"), rounds=True),
    "bitsandbytes nf4": Kind(
        "bitsandbytes", _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
        rounds=True,
    ),
    "bitsandbytes int8": Kind("bitsandbytes", _bitsandbytes(load_in_8bit=True, llm_int8_threshold=0.0), rounds=True),
    "compressed-tensors W4A16": Kind("compressed_tensors", _compressed("W4A16")),
    "compressed-tensors W8A8": Kind("compressed_tensors", _compressed("W8A8"), rounds=True),
    "compressed-tensors FP8": Kind("compressed_tensors", _compressed("FP8_DYNAMIC"), rounds=True),
    "gptq": Kind("gptqmodel", _four_bits("gptq")),
    "awq": Kind("gptqmodel", _four_bits("awq")),
    "lora": Kind("peft", _lora(), adapter=True),
    "dora": Kind("peft", _lora(use_dora=True), adapter=True),
}  # fmt: skip
MIXING = {
    "torchao": _torchao("Int8DynamicActivationInt8WeightConfig", granularity=lambda q: q.PerTensor()),
    "bitsandbytes": _bitsandbytes(load_in_8bit=True),  # its columns of outliers are those of any token
    "compressed_tensors": _compressed("FP8_DYNAMIC", strategy="tensor"),
}
