"""MTP's network: one layer on the target's last hidden state and the next token, run once per draft token.

The layer is a Llama layer, or one like the target's own for models that ship with such a head. A head may read further
states of the target besides the last.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from outpace.heads.base import HeadSpec
from outpace.heads.joins import StateFusion
from outpace.heads.recursive import Recursive, RecursiveDecoder
from outpace.models.embeddings import Embeddings


class MtpDecoder(RecursiveDecoder):
    def __init__(self, config: PreTrainedConfig, embeddings: Embeddings, spec: HeadSpec):
        super().__init__(config, embeddings, spec)
        hidden, eps, norm = config.hidden_size, config.rms_norm_eps, self.parts.norm
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(hidden, eps), norm(hidden, eps)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList(self.parts.layer(config, i) for i in range(spec.layers))
        self.fuse_taps = StateFusion(hidden, len(spec.taps)) if len(spec.taps) > 1 else nn.Identity()

    def fuse(self, hidden: Tensor) -> Tensor:
        return self.fuse_taps(hidden)

    def enter(self, embeds: Tensor, states: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        both = [self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(states)]
        return self.fc(torch.cat(both, dim=-1)), {}


class MtpHead(Recursive):
    """A single head for all steps of multi-token prediction."""

    kind: ClassVar[str] = "mtp"
    like_target: ClassVar[bool] = True
    entrance = MtpDecoder

    @classmethod
    def defaults(cls, layer_count: int, given: dict[str, Any]) -> dict[str, Any]:
        return {"taps": (layer_count,)}
