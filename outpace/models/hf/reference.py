"""ModelReference: plain forward passes of a Transformers model, which `outpace verify` compares the engine with.

They run without our cache and attention, in the model's own precision and in a higher one.
"""

from __future__ import annotations

import copy
import inspect

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outpace.models.quantized import quantized_layers, tensors


class ModelReference:
    """One pass over a whole text. The high-precision copy is made on first use, on the CPU if the device is full."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self._precise: PreTrainedModel | None = None
        self._selects = "logits_to_keep" in inspect.signature(model.forward).parameters

    def native(self, tokens: list[int], count: int) -> Tensor:
        return self._run(self.model, tokens, count)

    def precise(self, tokens: list[int], count: int) -> Tensor:
        if self._precise is None:
            self._precise = _high_precision(self.model)
        return self._run(self._precise, tokens, count).double()

    @torch.no_grad()
    def _run(self, model: PreTrainedModel, tokens: list[int], count: int) -> Tensor:  # [count, vocab]
        ids = torch.tensor([tokens], device=model.get_input_embeddings().weight.device)
        options = {"logits_to_keep": count} if self._selects else {}
        return model(input_ids=ids, use_cache=False, **options).logits[0, -count:]


class KeptPrecision(nn.Module):
    """A quantised layer inside a model of higher precision: its kernels take no other dtype than their own."""

    def __init__(self, layer: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.held = (layer,)  # in a tuple, so that the conversion of the model does not reach it
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.held[0](x.to(self.dtype)).to(x.dtype)


def _high_precision(model: PreTrainedModel) -> PreTrainedModel:
    """Copy the model: in float32 if it is a 16-bit model, in float64 otherwise."""
    dtype = torch.float32 if model.dtype.itemsize <= 2 else torch.float64
    if quantized := dict(quantized_layers(model)):
        ours = copy.deepcopy(model, {id(t): t for layer in quantized.values() for t in tensors(layer)})
        for name in quantized:
            ours.set_submodule(name, KeptPrecision(ours.get_submodule(name), model.dtype))
        return nn.Module.to(ours, dtype)  # Transformers refuses to convert some quantised models
    try:
        return copy.deepcopy(model).to(dtype)
    except torch.OutOfMemoryError:
        on_cpu = {id(p): torch.nn.Parameter(p.to("cpu", dtype), requires_grad=False) for p in model.parameters()}
        return copy.deepcopy(model, on_cpu).to("cpu", dtype)
