"""Tiny random Transformers models, one per architecture, on which the adapters are proven.

Weights are large, so that logits have clear gaps and greedy text does not repeat itself; windows are shorter than the
prompts of the tests; no token ends a text. Mixtures of experts are float32, for which Transformers has its kernels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 101
WINDOW = 8
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

SHAPE: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=4096,
    initializer_range=0.4,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
GROUPED: dict[str, Any] = dict(num_key_value_heads=2, head_dim=8)
EXPERTS: dict[str, Any] = dict(num_experts_per_tok=2, moe_intermediate_size=16)
DELTA_NET: dict[str, Any] = dict(
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    layer_types=[LINEAR, FULL, LINEAR],
)
STATE_SPACE: dict[str, Any] = dict(mamba_d_state=8, mamba_expand=2)
GPT: dict[str, Any] = dict(n_embd=32, n_layer=3, n_head=4, n_positions=4096)


def build(kind: str, dtype: torch.dtype = torch.float64, **config: Any) -> PreTrainedModel:
    """A model of this `model_type` with random weights, the same ones every time."""
    torch.manual_seed(0)
    settings = AutoConfig.for_model(kind, **{**SHAPE, **config})
    model = AutoModelForCausalLM.from_config(settings, dtype=dtype).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:  # biases and scales start as zeros and ones, which would hide their loss
                weight += 0.1 * torch.randn_like(weight)
    return model


def _tiny(kind: str, dtype: torch.dtype = torch.float64, **config: Any) -> Callable[[], PreTrainedModel]:
    return lambda: build(kind, dtype, **config)


def _experts(kind: str, **config: Any) -> Callable[[], PreTrainedModel]:
    return _tiny(kind, torch.float32, **{**EXPERTS, **config})


PACKED: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _tiny("llama", **GROUPED),
    "mistral": _tiny("mistral", **GROUPED, sliding_window=WINDOW),
    "qwen2": _tiny("qwen2", num_key_value_heads=2, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": _tiny("qwen3", **GROUPED),
    "gemma2": _tiny(
        "gemma2", **GROUPED, sliding_window=WINDOW, query_pre_attn_scalar=8, attn_logit_softcapping=4.0,
        final_logit_softcapping=20.0, layer_types=[SLIDING, FULL, SLIDING],
        attn_implementation="eager",  # under sdpa, Transformers 5.17 forgets the soft cap
    ),
    "gemma3": _tiny(
        "gemma3_text", **GROUPED, sliding_window=WINDOW, query_pre_attn_scalar=8, layer_types=[SLIDING, FULL, SLIDING],
    ),
    "phi3": _tiny("phi3", num_key_value_heads=2, sliding_window=WINDOW),
    "gpt2": _tiny("gpt2", **GPT),
    "gpt_neox": _tiny("gpt_neox"),
    "starcoder2": _tiny("starcoder2", num_key_value_heads=2, sliding_window=WINDOW),
    "olmo2": _tiny("olmo2", num_key_value_heads=2),
    "smollm3": _tiny("smollm3", num_key_value_heads=2, no_rope_layers=[1, 0, 1]),
    "mixtral": _experts("mixtral", **GROUPED, num_local_experts=4, sliding_window=WINDOW),
    "qwen3_moe": _experts("qwen3_moe", **GROUPED, num_experts=4, initializer_range=0.6),
    "gpt_oss": _experts(
        "gpt_oss", **GROUPED, num_local_experts=4, sliding_window=WINDOW, layer_types=[SLIDING, FULL, SLIDING],
    ),
    "deepseek_v3": _experts(
        "deepseek_v3", num_key_value_heads=4, n_routed_experts=4, n_group=2, topk_group=1, kv_lora_rank=8,
        q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6, first_k_dense_replace=1,
    ),
}  # fmt: skip
"""Attention that goes through our function: trees, packed ragged batches, slices."""

NATIVE: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3_next": _experts("qwen3_next", **GROUPED, **DELTA_NET, num_experts=4, shared_expert_intermediate_size=16),
    "qwen3_5": _tiny("qwen3_5_text", **GROUPED, **DELTA_NET),
    "falcon_h1": _tiny("falcon_h1", num_key_value_heads=2, **STATE_SPACE, mamba_d_ssm=32, mamba_n_heads=4,
                       mamba_chunk_size=8),
    "mamba2": _tiny("mamba2", num_heads=8, head_dim=8, state_size=8, n_groups=2, chunk_size=8),
    "mamba": _tiny("mamba", state_size=8),
    "jamba": _tiny("jamba", num_key_value_heads=2, **STATE_SPACE, attn_layer_period=3, attn_layer_offset=1,
                   num_experts=1, num_experts_per_tok=1),
    "lfm2": _tiny("lfm2", num_key_value_heads=2, block_auto_adjust_ff_dim=False, layer_types=["conv", FULL, "conv"]),
    "llama4": _experts("llama4_text", **GROUPED, num_local_experts=2, attention_chunk_size=WINDOW, moe_layers=[],
                       intermediate_size_mlp=48),
    "gptj": _tiny("gptj", **GPT, rotary_dim=4),
    "bloom": _tiny("bloom", n_layer=3, n_head=4),
    "doge": _tiny("doge", **GROUPED, attn_implementation="eager"),  # sdpa forgets causality in Transformers 5.17
}  # fmt: skip
"""State or attention of their own: chains only, one row at a time."""

MODELS = PACKED | NATIVE


def blurred(model: PreTrainedModel, amount: float) -> PreTrainedModel:
    """A copy whose head is noisy, which makes it a draft that agrees with the model in part."""
    draft = copy.deepcopy(model)
    weight = draft.get_output_embeddings().weight
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1), dtype=weight.dtype)
    with torch.no_grad():
        weight += amount * weight.std() * noise
    return draft
