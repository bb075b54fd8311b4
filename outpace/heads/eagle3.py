"""EAGLE-3's network: three of the target's states become one, and one layer reads it beside the next token."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

from outpace.heads.base import Spec
from outpace.heads.recursive import Entrance, Recursive
from outpace.models.ends import Ends


class EagleLayer(nn.Module):
    """A Llama layer whose attention reads a state and a token side by side."""

    def __init__(self, config: LlamaConfig, index: int):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = LlamaAttention(config, index)
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(self.self_attn, name)
            setattr(self.self_attn, name, nn.Linear(2 * hidden, old.out_features, bias=False))
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(hidden, eps)
        self.hidden_norm = LlamaRMSNorm(hidden, eps)
        self.post_attention_layernorm = LlamaRMSNorm(hidden, eps)

    def forward(self, hidden_states: Tensor, embeds: Tensor, **given: Any) -> Tensor:
        both = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden_states)], dim=-1)
        attended, _ = self.self_attn(both, attention_mask=None, **given)
        states = hidden_states + attended
        return states + self.mlp(self.post_attention_layernorm(states))


class EagleEntrance(Entrance):
    def __init__(self, config: LlamaConfig, ends: Ends, spec: Spec):
        super().__init__(config, ends, spec)
        hidden = config.hidden_size
        self.fc = nn.Linear(len(spec.taps) * hidden, hidden, bias=False)
        self.layers = nn.ModuleList(EagleLayer(config, i) for i in range(spec.layers))
        if spec.normed:
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(hidden, config.rms_norm_eps) for _ in spec.taps)

    def fuse(self, hidden: Tensor) -> Tensor:
        if self.spec.normed:
            parts = hidden.chunk(len(self.spec.taps), dim=-1)
            hidden = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(hidden)

    def enter(self, embeds: Tensor, states: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return states, {"embeds": embeds}


class Eagle3(Recursive):
    """The head of EAGLE-3, or of 3.1 with `normed`."""

    kind: ClassVar[str] = "eagle3"
    entrance = EagleEntrance

    @classmethod
    def usual(cls, stack: int, given: dict[str, Any]) -> dict[str, Any]:
        """An early, a middle and a late state; fewer where there are too few layers."""
        return {"taps": tuple(sorted({min(2, stack - 1), stack // 2, max(stack - 3, 0)}))}
