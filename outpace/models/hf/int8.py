"""int8 weights: integers with one scale per matrix row. Activations and sums keep their dtype.

A quantised model is a model in its own right: its other methods are compared with its own plain decoding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outpace.errors import UnsupportedModel
from outpace.models.quantized import is_plain

LEVELS = 127


class Int8Linear(nn.Module):
    """A linear layer with int8 weights."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Linear):
        super().__init__()
        weight = layer.weight.detach()
        scale = (weight.abs().amax(1).float() / LEVELS).clamp(min=1e-12)
        self.register_buffer("weight", (weight.float() / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale.to(torch.promote_types(weight.dtype, torch.float32)))
        self.register_buffer("bias", layer.bias.detach() if layer.bias is not None else None)
        self.in_features, self.out_features = layer.in_features, layer.out_features

    def forward(self, x: Tensor) -> Tensor:
        return LINEAR(x, self.weight, self.scale, self.bias)


def linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x [..., k] by the transpose of weight [n, k]: first the sum, then the scale."""
    out = (nn.functional.linear(x, weight.to(x.dtype)) * scale).to(x.dtype)
    return out if bias is None else out + bias.to(x.dtype)


OPS = torch.library.Library("outpace_int8", "DEF")
OPS.define("linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias) -> Tensor")
OPS.impl("linear", linear, "CompositeExplicitAutograd")
OPS.impl("linear", lambda x, weight, scale, bias: x.new_empty(*x.shape[:-1], weight.shape[0]), "Meta")
LINEAR = torch.ops.outpace_int8.linear.default


def linears(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """List every plain linear layer with its parent module and its name there.

    An adapter's matrices are in a `ModuleDict`. PEFT reads their dtype, so they stay as they are.
    """
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if is_plain(child) and not isinstance(parent, nn.ModuleDict)
    ]


def quantize(model: PreTrainedModel) -> PreTrainedModel:
    """Replace every linear layer of this model with an int8 one; the embedding stays, even where the head shares it."""
    found = linears(model)
    if not found:
        raise UnsupportedModel(f"{type(model).__name__} has no linear layers to quantise")
    for parent, name, child in found:
        setattr(parent, name, Int8Linear(child))
    return model
