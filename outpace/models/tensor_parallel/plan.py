"""How Transformers shares a model among processes, and what cannot be shared. Checked before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from outpace.errors import UnsupportedModel, UsageError
from outpace.models.tensor_parallel.shards import STYLES

KEYS = {"k_proj", "qkv_proj", "query_key_value"}  # layers that make the keys of attention


def check(config: PreTrainedConfig, size: int) -> None:
    """Raise an error if this model cannot run on so many processes."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    name, plan = type(model).__name__, model.tp_plan
    if not any("*" in module for module in plan):
        raise UnsupportedModel(f"Transformers has no tensor-parallel plan for {name}: leave tensor_parallel out")
    if unknown := sorted(set(plan.values()) - STYLES):
        raise UnsupportedModel(
            f"tensor_parallel does not support {name}, whose layers are shared as {', '.join(unknown)}: leave it out"
        )
    text = config.get_text_config()
    heads = text.num_attention_heads
    groups = getattr(text, "num_key_value_heads", None) or heads
    if _splits_heads(plan) and (heads % size or groups % size):
        fitting = [str(count) for count in range(2, groups + 1) if gcd(heads, groups) % count == 0]
        advice = f"use {' or '.join(fitting)}" if fitting else "leave it out"
        raise UsageError(
            f"tensor_parallel={size} does not divide the {heads} attention heads and {groups} key-value heads of "
            f"{name}: {advice}"
        )


def _splits_heads(plan: Mapping[str, str]) -> bool:
    """Return whether each process has some of the attention heads."""
    return any(module.rsplit(".")[-1] in KEYS and style == "colwise" for module, style in plan.items())
