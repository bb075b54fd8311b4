"""Layers that add further information to a hidden state. They start as zero, so a trained head can be given one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm


class StateFusion(nn.Module):
    """Add to the last of several target states what a layer computes from the others."""

    def __init__(self, hidden: int, taps: int):
        super().__init__()
        self.norms = nn.ModuleList(LlamaRMSNorm(hidden) for _ in range(taps - 1))
        self.fc = nn.Linear((taps - 1) * hidden, hidden, bias=False)
        nn.init.zeros_(self.fc.weight)

    def forward(self, hidden: Tensor) -> Tensor:  # [..., taps * hidden] -> [..., hidden]
        *others, last = hidden.chunk(len(self.norms) + 1, dim=-1)
        normed = [norm(state) for norm, state in zip(self.norms, others, strict=True)]
        return last + self.fc(torch.cat(normed, dim=-1))


class SlotLink(nn.Module):
    """Update a slot's state with the embedding of the token before it and that token's own updated slot."""

    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.norms = nn.ModuleList(LlamaRMSNorm(hidden) for _ in range(3))
        self.enter = nn.Linear(3 * hidden, 2 * inner, bias=False)  # gate and value
        self.leave = nn.Linear(inner, hidden, bias=False)
        nn.init.zeros_(self.leave.weight)

    def forward(self, slot: Tensor, before: Tensor, embeds: Tensor) -> Tensor:  # [..., hidden] each
        known = [norm(x) for norm, x in zip(self.norms, (slot, before, embeds), strict=True)]
        gate, value = self.enter(torch.cat(known, dim=-1)).chunk(2, dim=-1)
        return slot + self.leave(nn.functional.silu(gate) * value)
