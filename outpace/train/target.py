"""The frozen target, as training reads it: its distribution and hidden states, without a gradient."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outpace.core.lm import LM
from outpace.errors import UsageError
from outpace.heads.torch_compile import compile_modules
from outpace.models.hf.module import decoder_layers, recording, twin
from outpace.train.data.batches import Batch


class TargetOutputs(NamedTuple):
    """The target's outputs for a batch."""

    logits: Tensor  # [batch, tokens, vocab]: for the token after each one
    hidden: Tensor | None  # [batch, tokens, taps * hidden]


def module_of(lm: LM) -> PreTrainedModel:
    """Return the Transformers model inside an adapter."""
    model = getattr(lm, "model", None)
    if not isinstance(model, PreTrainedModel):
        raise UsageError(f"training needs a Transformers model, but {type(lm).__name__} holds none")
    return model


class Target:
    """A twin of the model that shares its tensors, so that the model itself is left unchanged."""

    def __init__(self, lm: LM):
        self.model = twin(module_of(lm))
        decoder, name = decoder_layers(self.model)
        compile_modules(getattr(decoder, name), self.device)

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    @torch.no_grad()
    def forward(self, tokens: Tensor, taps: tuple[int, ...] = ()) -> TargetOutputs:  # [batch, tokens]
        """Run one plain forward pass; padding is at the end, where no token of a text attends to it."""
        with recording(self.model, taps, row=None) as recorded:  # Transformers' own way would break compiled layers up
            logits = self.model(input_ids=tokens, use_cache=False).logits
        return TargetOutputs(logits, torch.cat([recorded[tap] for tap in taps], dim=-1) if taps else None)


def answer_mask(batch: Batch) -> Tensor:  # [batch, tokens]
    """Return the mask of the tokens whose next token belongs to an answer."""
    return nn.functional.pad(batch.mask[:, 1:], (0, 1))


def with_temperature(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1 else logits / temperature
