"""Ends: the two matrices between tokens and states, which trained heads borrow from their target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Ends:
    """What enters a model's first layer for a token, and what its last state is compared with for each token."""

    embed: Tensor  # [vocab, hidden]
    unembed: Tensor  # [vocab, hidden]
    config: PreTrainedConfig | None = None  # of the layers between

    @property
    def hidden(self) -> int:
        return self.embed.shape[1]

    @property
    def vocab(self) -> int:
        return self.embed.shape[0]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Ends | None:
        """None for a model whose ends are no plain matrices of one width."""
        embed, head = model.get_input_embeddings(), model.get_output_embeddings()
        given = [getattr(module, "weight", None) for module in (embed, head)]
        config = model.config.get_text_config()
        if getattr(config, "tie_word_embeddings", False) and given[0] is not None:
            given[1] = given[0]  # a quantised head is a copy of them
        if any(not isinstance(w, Tensor) or not w.is_floating_point() or w.dim() != 2 for w in given):
            return None
        ends = cls(given[0].detach(), given[1].detach(), config)  # type: ignore[union-attr]
        return ends if ends.unembed.shape == ends.embed.shape else None

    @property
    def fingerprint(self) -> list[float]:
        """A few numbers by which the same weights are known again, in another precision too."""
        places = torch.linspace(0, self.embed.numel() - 1, 16, dtype=torch.float64).long()
        return self.embed.reshape(-1)[places.to(self.embed.device)].float().tolist()
