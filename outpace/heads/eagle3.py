"""EAGLE-3's network: three hidden states of the target, fused into one, enter a layer together with the next token."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from outpace.errors import UsageError
from outpace.heads.base import HeadSpec
from outpace.heads.layers import LayerClasses
from outpace.heads.recursive import Recursive, RecursiveDecoder
from outpace.models.embeddings import Embeddings


class EagleLayer(nn.Module):
    """A Llama layer whose attention reads a state and a token side by side."""

    def __init__(self, config: PreTrainedConfig, index: int, spec: HeadSpec, parts: LayerClasses):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        if parts.attention is None or parts.mlp is None:
            raise UsageError(f"an eagle3 head cannot have parts={spec.parts!r}: use llama or qwen3")
        self.self_attn = parts.attention(config, index)
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(self.self_attn, name)
            setattr(self.self_attn, name, nn.Linear(2 * hidden, old.out_features, bias=old.bias is not None))
        self.mlp = parts.mlp(config)
        self.input_layernorm = parts.norm(hidden, eps)
        self.hidden_norm = parts.norm(hidden, eps)
        self.post_attention_layernorm = parts.norm(hidden, eps)
        self.residual_norm = spec.residual_norm

    def forward(self, hidden_states: Tensor, embeds: Tensor, **given: Any) -> Tensor:
        normed = self.hidden_norm(hidden_states)
        both = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        attended, _ = self.self_attn(both, attention_mask=None, **given)
        states = (normed if self.residual_norm else hidden_states) + attended
        return states + self.mlp(self.post_attention_layernorm(states))


class EagleDecoder(RecursiveDecoder):
    def __init__(self, config: PreTrainedConfig, embeddings: Embeddings, spec: HeadSpec):
        super().__init__(config, embeddings, spec)
        hidden, eps, taps = config.hidden_size, config.rms_norm_eps, len(spec.taps)
        self.fc = nn.Linear(taps * hidden, hidden, bias=False)
        self.layers = nn.ModuleList(EagleLayer(config, i, spec, self.parts) for i in range(spec.layers))
        self.entry = spec.entry_norm or ("each" if spec.normed else "none")
        if self.entry == "each":
            self.fc_norm = nn.ModuleList(self.parts.norm(hidden, eps) for _ in spec.taps)
        elif self.entry == "joined":
            self.input_norm = self.parts.norm(taps * hidden, eps)

    def fuse(self, hidden: Tensor) -> Tensor:
        if self.entry == "each":
            states = hidden.chunk(len(self.spec.taps), dim=-1)
            hidden = torch.cat([norm(state) for norm, state in zip(self.fc_norm, states, strict=True)], dim=-1)
        elif self.entry == "joined":
            hidden = self.input_norm(hidden)
        return self.fc(hidden)

    def enter(self, embeds: Tensor, states: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return states, {"embeds": embeds}


class Eagle3Head(Recursive):
    """The head of EAGLE-3, or with `normed` that of EAGLE-3.1."""

    kind: ClassVar[str] = "eagle3"
    entrance = EagleDecoder

    @classmethod
    def defaults(cls, layer_count: int, given: dict[str, Any]) -> dict[str, Any]:
        """Tap an early, a middle and a late state; fewer if there are too few layers."""
        return {"taps": tuple(sorted({min(2, layer_count - 1), layer_count // 2, max(layer_count - 3, 0)}))}
