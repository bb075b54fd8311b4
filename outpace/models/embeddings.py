"""The embedding matrices of a model, which heads borrow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Embeddings:
    """The input embedding and output embedding (unembedding) matrices of a model."""

    embed: Tensor  # [vocab, hidden]
    unembed: Tensor  # [vocab, hidden]
    config: PreTrainedConfig | None = None  # of the layers in between

    @property
    def hidden(self) -> int:
        return self.embed.shape[1]

    @property
    def vocab(self) -> int:
        return self.embed.shape[0]

    @property
    def fingerprint(self) -> list[float]:
        """Sixteen numbers that identify the weights, in any precision."""
        places = torch.linspace(0, self.embed.numel() - 1, 16, dtype=torch.float64).long()
        return self.embed.reshape(-1)[places.to(self.embed.device)].float().tolist()
