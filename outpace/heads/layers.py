"""The layer classes of recursive heads: those of Llama or Qwen3, or those of the target, whatever it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModel, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3MLP

from outpace.errors import UsageError
from outpace.models.hf.module import decoder_layers

FULL = "full_attention"
# Settings for a head with one layer of the target: the kind that most of its layers are, so no dense first layers.
ALONE: dict[str, Any] = {
    "num_hidden_layers": 1, "layer_types": [FULL], "first_k_dense_replace": 0, "mlp_only_layers": [],
    "decoder_sparse_step": 1, "mlp_layer_types": ["sparse"],
}  # fmt: skip


class LayerClasses(NamedTuple):
    """The classes of a layer and its parts, with the signatures that Transformers' models use."""

    config: type[PreTrainedConfig]
    layer: Callable[[Any, int], nn.Module]  # config, index
    attention: Callable[[Any, int], nn.Module] | None  # config, index; None: not available alone
    mlp: Callable[[Any], nn.Module] | None  # config
    norm: Callable[[int, float], nn.Module]  # width, epsilon
    rotary: Callable[[Any], nn.Module]  # config


KNOWN = {
    "llama": LayerClasses(LlamaConfig, LlamaDecoderLayer, LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding),
    "qwen3": LayerClasses(Qwen3Config, Qwen3DecoderLayer, Qwen3Attention, Qwen3MLP, LlamaRMSNorm, LlamaRotaryEmbedding),
}
TARGET = "target"  # the name of the target's own parts


def classes_of(name: str, config: PreTrainedConfig) -> LayerClasses:
    """Return the layer classes by name; `config` is that of the head's layers."""
    if name != TARGET:
        return KNOWN[name]
    decoder, _ = _skeleton(config)
    if not hasattr(decoder, "rotary_emb") or not hasattr(decoder, "norm"):
        raise UsageError(f"a head cannot use the layers of {type(decoder).__name__}: it has no `norm` or `rotary_emb`")
    norm, rotary = type(decoder.norm), type(decoder.rotary_emb)
    return LayerClasses(type(config), _target_layer, None, None, norm, rotary)  # type: ignore[arg-type]


def alone(target: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of one full-attention layer of this target."""
    config = copy.deepcopy(target)
    for name, value in ALONE.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, copy.copy(value))
    # Without a mask, torch's attention (sdpa) is causal, but Transformers' own is not.
    config._attn_implementation = "sdpa"
    return config


def _skeleton(config: PreTrainedConfig) -> tuple[PreTrainedModel, nn.Module]:
    """Build a decoder of this config without allocating memory; return it and its only layer."""
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    decoder, name = decoder_layers(model)
    return decoder, getattr(decoder, name)[0]  # type: ignore[return-value]


def _target_layer(config: PreTrainedConfig, index: int) -> nn.Module:
    decoder, layer = _skeleton(config)
    layer = layer.to_empty(device="cpu")
    layer.apply(decoder._init_weights)
    for module in layer.modules():
        if getattr(module, "config", None) is not None:
            module.config = config  # type: ignore[assignment]
        if hasattr(module, "layer_idx"):
            module.layer_idx = index  # type: ignore[assignment]
    return layer
