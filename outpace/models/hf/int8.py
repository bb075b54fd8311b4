"""int8 weights: each row of a matrix as whole numbers with one scale. Activations and sums stay as they are.

A quantised model is a model of its own: its plain decoding is what its other methods are compared with.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outpace.errors import UnsupportedModel

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
    """x [..., k] times weight [n, k], transposed; the sum first, then the scale."""
    out = (nn.functional.linear(x, weight.to(x.dtype)) * scale).to(x.dtype)
    return out if bias is None else out + bias.to(x.dtype)


OPS = torch.library.Library("outpace_int8", "DEF")
OPS.define("linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias) -> Tensor")
OPS.impl("linear", linear, "CompositeExplicitAutograd")
OPS.impl("linear", lambda x, weight, scale, bias: x.new_empty(*x.shape[:-1], weight.shape[0]), "Meta")
LINEAR = torch.ops.outpace_int8.linear.default


def linears(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Every linear layer, with the module that has it and its name there."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]


def quantize(model: PreTrainedModel) -> PreTrainedModel:
    """Replace every linear layer of this model by an int8 one; the embedding stays, also where the head shares it."""
    found = linears(model)
    if not found:
        raise UnsupportedModel(f"{type(model).__name__} has no linear layers to quantise")
    for parent, name, child in found:
        setattr(parent, name, Int8Linear(child))
    return model
