"""bfloat16 copies of float32 weights. Kernels read the copies and widen each weight, so results have the same bits.

Most published models have weights that are exact bfloat16 numbers, even when loaded as float32. A CPU pass is bound by
reading weights from memory, so a second copy in half the bytes makes it faster.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outpace.models.hf.int8 import linears
from outpace.models.memory import free
from outpace.models.quantized import is_plain


class Bf16Linear(nn.Module):
    """A float32 linear layer whose weights are stored as bfloat16."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Linear, weight: Tensor):
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", layer.bias.detach() if layer.bias is not None else None)
        self.in_features, self.out_features = layer.in_features, layer.out_features

    def forward(self, x: Tensor) -> Tensor:
        return LINEAR(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return nn.functional.linear(x, weight.to(x.dtype), bias)


OPS = torch.library.Library("outpace_halves", "DEF")
OPS.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
OPS.impl("linear", linear, "CompositeExplicitAutograd")
OPS.impl("linear", lambda x, weight, bias: x.new_empty(*x.shape[:-1], weight.shape[0]), "Meta")
LINEAR = torch.ops.outpace_halves.linear.default


class Bf16Copies:
    """The bfloat16 copies of one model's weights, shared by all slices of the model."""

    def __init__(self) -> None:
        self._copies: dict[int, Tensor | None] = {}  # by address; None where bfloat16 would lose bits

    @property
    def bytes(self) -> int:
        return sum(copy.nbytes for copy in self._copies.values() if copy is not None)

    def replace_linears(self, model: nn.Module) -> None:
        """Replace the linear layers of our own copy of a model, where no bits are lost and memory allows."""
        found = linears(model)
        new = {child.weight.data_ptr(): child.weight.nbytes // 2 for *_, child in found}
        missing = sum(count for address, count in new.items() if address not in self._copies)
        if missing > free(torch.device("cpu")) // 2:
            return
        for parent, name, child in found:
            copy = self._of(child.weight.detach())
            if copy is not None:
                setattr(parent, name, Bf16Linear(child, copy))

    def stale(self, model: nn.Module) -> bool:
        """Return whether any weight of this model has changed since it was copied."""
        weights = [layer.weight.detach() for layer in model.modules() if is_plain(layer)]
        return bool(self._copies) and any(self._changed(weight) for weight in weights)

    def _changed(self, weight: Tensor) -> bool:
        copy = self._copies.get(weight.data_ptr(), weight.new_empty(0))
        return copy is not None and not torch.equal(copy.to(weight.dtype), weight)

    def _of(self, weight: Tensor) -> Tensor | None:
        address = weight.data_ptr()
        if address not in self._copies:
            copy = weight.to(torch.bfloat16)
            self._copies[address] = copy if torch.equal(copy.float(), weight) else None
        return self._copies[address]
