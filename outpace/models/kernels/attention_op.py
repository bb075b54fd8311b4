"""The attention operator of compiled layers on a GPU: few tokens with masks of their own, or whole prompts."""

from __future__ import annotations

import torch
from torch import Tensor

from outpace.models.kernels import attention, prompt_attention
from outpace.models.kernels.attention import KernelRule, PassVisibility


def attend(q: Tensor, keys: Tensor, values: Tensor, seen: PassVisibility, rule: KernelRule) -> Tensor:
    """Return the attention output of each token; zeros for tokens of no job."""
    # [tokens, heads, dim], [pool, kv heads, dim] twice -> [tokens, heads, dim]
    options = [rule.scale, float(rule.window), rule.softcap]
    return torch.ops.outpace.attend(q, keys, values, list(seen), rule.sinks, options)


@torch.library.custom_op(
    "outpace::attend",
    mutates_args=(),
    schema="(Tensor q, Tensor keys, Tensor values, Tensor[] seen, Tensor? sinks, float[] options) -> Tensor",
)
def _attend(
    q: Tensor, keys: Tensor, values: Tensor, seen: list[Tensor], sinks: Tensor | None, options: list[float]
) -> Tensor:
    scale, window, softcap = options
    kernel = attention if len(seen[1]) else prompt_attention
    return kernel.launch(q, keys, values, PassVisibility(*seen), KernelRule(scale, int(window), softcap, sinks))


@_attend.register_fake
def _(
    q: Tensor, keys: Tensor, values: Tensor, seen: list[Tensor], sinks: Tensor | None, options: list[float]
) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)
