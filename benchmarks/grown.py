"""A small Llama grown to the shape of a large one: it generates the small one's text at the cost of the large one.

New dimensions of the hidden state are zero, and new heads and layers add nothing. So a benchmark can have the cost of
an 8B model and real text, without the weights of an 8B model. The small model's trained heads grow with it
(grown_heads.py), so that drafts are real too.

    python benchmarks/grown.py smollm2-135m-instruct --output grown  # 16 GB, for `outpace bench grown`
    python benchmarks/grown.py smollm2-135m-instruct --output grown --heads grown-heads
    outpace generate "..." --model grown --method eagle3 -o head=grown-heads/eagle3

One new dimension is not zero: every token's embedding has the same small number there. From it, the output matrix
gives tokens that the small model does not have very low logits, so that they are never sampled.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from outpace.api import demo_weights

SHAPES: dict[str, dict[str, Any]] = {
    "8b": dict(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=128256,
    ),
    "1b": dict(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, vocab_size=128256,
    ),
    "cpu": dict(  # the least that SmolLM2-135M grows to with everything new: dimensions, layers, heads, tokens
        hidden_size=1152, intermediate_size=3072, num_hidden_layers=32, num_attention_heads=12,
        num_key_value_heads=4, head_dim=128, vocab_size=65536,
    ),
}  # fmt: skip
# The number in every embedding, and its weight in the output of new tokens. The number is too small to change a norm,
# and the weight makes up for it and for the division by a state's norm. float16 cannot store so large a weight.
GUARD, GUARD_OUTPUT = 2.0**-10, -(2.0**27)


def source(small: str) -> str:
    """The folder of a demo model; any other name is a folder already."""
    return str(demo_weights.fetch(small)) if small in demo_weights.DEMO_MODELS else small


def grown(small: str, device: str = "cuda", shape: str = "8b", dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    """Grow the small model to a shape, by default that of 8B."""
    model = read(small)
    return grow(model, large_config(model.config, **SHAPES[shape]), device, dtype)


def read(small: str) -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(source(small), dtype=torch.float32)


def grow(small: LlamaForCausalLM, config: LlamaConfig, device: str, dtype: torch.dtype) -> LlamaForCausalLM:
    """Build a model of `config` that computes the same function as `small`, in exact arithmetic."""
    old, new = small.config, config
    with torch.device("meta"):
        large = LlamaForCausalLM(new)
    large = large.to(dtype).to_empty(device=device)
    large.model.rotary_emb = type(large.model.rotary_emb)(new).to(device)
    for parameter in large.parameters():
        parameter.data.zero_()
    heads, shrink = HeadRows(old, new), norm_factor(old, new)
    for i, layer in enumerate(small.model.layers):
        target = large.model.layers[i]
        for name in ("input_layernorm", "post_attention_layernorm"):
            _put(getattr(target, name).weight, getattr(layer, name).weight * shrink)
        attention, grown = layer.self_attn, target.self_attn
        _put_heads(grown.q_proj.weight, attention.q_proj.weight * heads.stretch, heads.query)
        _put_heads(grown.k_proj.weight, attention.k_proj.weight, heads.key)
        _put_heads(grown.v_proj.weight, attention.v_proj.weight, heads.value)
        _put_heads(grown.o_proj.weight.T, attention.o_proj.weight.T, heads.out)
        for name in ("gate_proj", "up_proj", "down_proj"):
            _put(getattr(target.mlp, name).weight, getattr(layer.mlp, name).weight)
    _put(large.model.norm.weight, small.model.norm.weight * shrink)
    _put(large.model.embed_tokens.weight, small.model.embed_tokens.weight)
    _put(large.lm_head.weight, small.lm_head.weight)
    if new.vocab_size > old.vocab_size:
        _exclude_new_tokens(large, old)
    return large.eval()


def _exclude_new_tokens(large: LlamaForCausalLM, old: LlamaConfig) -> None:
    """Give tokens that the small model does not have very low logits, where zeros would make them likely enough."""
    at = old.hidden_size  # the first new dimension; no layer reads it or writes to it
    if at == large.config.hidden_size:
        raise ValueError("a larger vocabulary needs a larger hidden size")
    large.model.embed_tokens.weight.data[:, at] = GUARD
    large.model.norm.weight.data[at] = 1.0
    large.lm_head.weight.data[old.vocab_size :, at] = GUARD_OUTPUT


def norm_factor(old: LlamaConfig, new: LlamaConfig) -> float:
    """What weights of norms are multiplied by: zeros lower the mean square, so normed states would grow."""
    return math.sqrt(old.hidden_size / new.hidden_size)


class HeadRows:
    """The new row of each row of a projection: heads keep their key head, and dimensions keep their rotation."""

    def __init__(self, old: LlamaConfig, new: LlamaConfig):
        group_old = old.num_attention_heads // old.num_key_value_heads
        group_new = new.num_attention_heads // new.num_key_value_heads
        if group_old > group_new or old.num_key_value_heads > new.num_key_value_heads:
            raise ValueError("the larger model needs as many key heads, and as many queries for each")
        places = [h // group_old * group_new + h % group_old for h in range(old.num_attention_heads)]
        # Frequency i of n rotates by theta ** (-i / n), which is frequency i * m / n of m.
        half_old, half_new = old.head_dim // 2, new.head_dim // 2
        turned = [i * half_new // half_old for i in range(half_old)]
        turned += [half_new + i for i in turned]
        plain = list(range(old.head_dim))
        keys = list(range(old.num_key_value_heads))
        self.stretch = math.sqrt(new.head_dim / old.head_dim)  # queries: logits are divided by the root of the head dim
        self.query = [p * new.head_dim + d for p in places for d in turned]
        self.key = [p * new.head_dim + d for p in keys for d in turned]
        self.value = [p * new.head_dim + d for p in keys for d in plain]
        self.out = [p * new.head_dim + d for p in places for d in plain]


def _put(target: Tensor, source: Tensor) -> None:
    target.data[tuple(slice(0, n) for n in source.shape)] = source.to(target)


def _put_heads(target: Tensor, source: Tensor, rows: list[int]) -> None:
    target.data[torch.tensor(rows, device=target.device), : source.shape[1]] = source.to(target)


def large_config(small: LlamaConfig, **shape: int) -> LlamaConfig:
    """A config of this shape with the small model's rotary base, and its epsilon scaled to the new hidden size."""
    hidden = shape["hidden_size"]
    return LlamaConfig(
        **shape,
        max_position_embeddings=40_000,
        rope_parameters=small.rope_parameters,
        rms_norm_eps=small.rms_norm_eps * small.hidden_size / hidden,
        tie_word_embeddings=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("small", help="demo model or folder of a Llama")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--output", default="grown", help="folder to write")
    parser.add_argument("--heads", type=Path, help="folder to write the grown heads to, each in a folder named by kind")
    parser.add_argument("--small-heads", type=Path, help="folder of the small model's heads; default: those it finds")
    parser.add_argument("--narrow", action="store_true", help="inner layers of heads keep their width")
    asked = parser.parse_args()
    model = grown(asked.small, "cpu", asked.shape)
    model.save_pretrained(asked.output)
    AutoTokenizer.from_pretrained(source(asked.small)).save_pretrained(asked.output)
    if asked.heads is not None:
        import grown_heads  # it imports this module

        grown_heads.write(read(asked.small), model, asked.small_heads, asked.heads, asked.narrow)


if __name__ == "__main__":
    main()
