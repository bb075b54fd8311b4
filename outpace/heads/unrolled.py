"""Attention over chains that start at every place of a text at once: the training-time test of EAGLE-3.

Column t of step 0 sees what lies before it in the text. In later steps it sees that, and what its own chain made in the
steps before, which lies in its own column; so one pass per step trains the chains of all places.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "outpace_unrolled"


class Chained:
    """Keys and values of the steps so far, by layer."""

    def __init__(self) -> None:
        self.keys: dict[int, list[Tensor]] = {}  # layer -> steps of [batch, heads, columns, dim]
        self.values: dict[int, list[Tensor]] = {}


def attend(
    module: nn.Module,
    query: Tensor,  # [batch, heads, columns, dim]
    key: Tensor,  # [batch, kv heads, columns, dim]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    chained: Chained,
    scaling: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:  # [batch, columns, heads, dim]
    groups = query.shape[1] // key.shape[1]
    keys = chained.keys.setdefault(module.layer_idx, [])  # type: ignore[arg-type]
    values = chained.values.setdefault(module.layer_idx, [])  # type: ignore[arg-type]
    keys.append(key.repeat_interleave(groups, dim=1))
    values.append(value.repeat_interleave(groups, dim=1))
    query = query * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if len(keys) == 1:
        out = nn.functional.scaled_dot_product_attention(query, keys[0], values[0], is_causal=True, scale=1.0)
        return out.transpose(1, 2), None
    columns = query.shape[2]
    later = torch.ones(columns, columns, dtype=torch.bool, device=query.device).triu(1)
    before = (query @ keys[0].transpose(-1, -2)).masked_fill(later, -torch.inf)
    own = torch.stack([(query * k).sum(-1) for k in keys[1:]], dim=-1)  # [batch, heads, columns, steps]
    weights = torch.cat([before, own], dim=-1).softmax(-1, dtype=torch.float32).to(value.dtype)
    out = weights[..., :columns] @ values[0]
    for step, v in enumerate(values[1:]):
        out = out + weights[..., columns + step, None] * v
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, attend)
