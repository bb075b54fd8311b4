"""Attention over chains that start at every position of a text at once: the training-time test of EAGLE-3.

At step 0, column t sees the text up to it. At later steps it also sees what its own chain added in earlier steps, which
is stored in its own column. So one pass per step trains the chains of all positions.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from outpace.heads.torch_compile import compile_function

NAME = "outpace_unrolled"
_compiled = cache(compile_function)


class ChainKeyValues(NamedTuple):
    """Keys or values of a layer: those of the text, and those that the chains have added, each in its own column."""

    text: Tensor  # [batch, heads, columns, dim]
    own: Tensor | None  # [batch, heads, columns, steps, dim]

    def then(self, new: Tensor) -> ChainKeyValues:  # [batch, heads, columns, dim]
        new = new.unsqueeze(3)
        return ChainKeyValues(self.text, new if self.own is None else torch.cat([self.own, new], dim=3))


class ChainCache:
    """Keys and values of the steps so far, by layer."""

    def __init__(self) -> None:
        self.keys: dict[int, ChainKeyValues] = {}
        self.values: dict[int, ChainKeyValues] = {}

    def add(self, layer: int, key: Tensor, value: Tensor) -> tuple[ChainKeyValues, ChainKeyValues]:
        """Add a step's keys and values, and return everything that the step sees."""
        for sides, new in ((self.keys, key), (self.values, value)):
            sides[layer] = sides[layer].then(new) if layer in sides else ChainKeyValues(new, None)
        return self.keys[layer], self.values[layer]


def attend(
    module: nn.Module,
    query: Tensor,  # [batch, heads, columns, dim]
    key: Tensor,  # [batch, kv heads, columns, dim]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    chained: ChainCache,
    scaling: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:  # [batch, columns, heads, dim]
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    keys, values = chained.add(module.layer_idx, key, value)  # type: ignore[arg-type]
    query = query * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if keys.own is None or values.own is None:
        out = nn.functional.scaled_dot_product_attention(query, keys.text, values.text, is_causal=True, scale=1.0)
    else:
        out = _compiled(_mixed, query.device)(query, keys.text, values.text, keys.own, values.own)
    return out.transpose(1, 2), None


def _mixed(query: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor) -> Tensor:
    """Attend over the text up to a column, and over the column's own chain."""  # [batch, heads, columns, dim]
    columns = query.shape[2]
    later = torch.ones(columns, columns, dtype=torch.bool, device=query.device).triu(1)
    before = (query @ keys.transpose(-1, -2)).masked_fill(later, -torch.inf)
    own = (query.unsqueeze(3) * own_keys).sum(-1)  # [batch, heads, columns, steps]
    weights = torch.cat([before, own], dim=-1).softmax(-1, dtype=torch.float32).to(values.dtype)
    return weights[..., :columns] @ values + (weights[..., columns:, None] * own_values).sum(3)


AttentionInterface.register(NAME, attend)
